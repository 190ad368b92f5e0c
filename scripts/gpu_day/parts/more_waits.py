"""Counts how often calls of a training step wait for the device. The calls are products with a new number of rows (as
experts' tokens have), allocations that first return cached blocks, the first operations of communicators, and
recompilations.

If receives are posted ahead, the share of operations that wait decides how likely two of them wait for each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.stages import cycles_per_ms
from gpu_day import outside
from gpu_day.bench import Bench, NotRun

SPIN_MS = 120.0  # length of a kernel on another stream
SHARE = 0.5  # a call that takes this share of that time has waited
GROUP = 40  # products that are counted together
ALLOCATORS = {"default": "", "expandable segments": "expandable_segments:True"}
LIMIT_GIB = 4.0  # limit of a process's memory, so that an allocation has to return blocks
_ROWS = (512, 640, 768)


def run(bench: Bench) -> None:
    if not bench.machine.has_gpus:
        raise NotRun("there is no device to wait for without a GPU")
    sizes = bench.sizes
    products = GROUP * (6 if bench.sizes.repeats > 1 else 1)
    (found,) = bench.ranks(_products, products, 4 * sizes.seq_length, 4 * sizes.hidden, size=1)
    waited, again = ([ms >= SHARE * SPIN_MS for ms in times] for times in zip(*found, strict=True))
    groups = [sum(waited[start : start + GROUP]) for start in range(0, products, GROUP)]
    bench.check(not any(again), f"a product of a number of rows that has run before does not wait ({sum(again)} do)")
    bench.numbers(share=sum(waited) / products, groups=groups)
    bench.text(
        f"Products in bfloat16 of a random number of rows, 1 to {4 * sizes.seq_length}: {sum(waited)} of {products} "
        f"wait for the device; of each {GROUP} in turn {', '.join(map(str, groups))}."
    )
    rows: list[list[Any]] = []
    for name, setting in ALLOCATORS.items():
        environment = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
        (found,) = bench.ranks(_retry, size=1, environment=environment)
        rows.append([f"allocation that gives blocks back, {name}", *found])
    calls = bench.ranks(_communicators)
    rows += [[name, ms, _waits(ms), ""] for name, ms in ((name, max(one[name] for one in calls)) for name in calls[0])]
    bench.text(f"Host milliseconds of each call while another stream runs a kernel of {SPIN_MS:g} ms.")
    bench.table(["call", "host ms", "waits", "retries of the allocator"], rows)


def _waits(ms: float) -> str:
    return "yes" if ms >= SHARE * SPIN_MS else "no"


class Clock:
    """Times calls while a kernel runs on another stream of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream()
        self.cycles = int(SPIN_MS * cycles_per_ms(device))

    def ms(self, call: Callable[[], Any]) -> float:
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(self.cycles)
        began = time.perf_counter()
        call()
        took = 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize(self.device)
        return took


def _products(
    rank: int, size: int, device: torch.device, count: int, most_rows: int, hidden: int
) -> list[tuple[float, float]]:
    """The milliseconds of each product's call, and those of the same call again."""
    clock = Clock(device)
    draw = random.Random(1)
    weight = torch.ones(hidden, 4 * hidden, device=device, dtype=torch.bfloat16)
    found = []
    for _ in range(count):
        tokens = torch.ones(draw.randint(1, most_rows), hidden, device=device, dtype=torch.bfloat16)
        first, again = (clock.ms(lambda tokens=tokens: tokens @ weight) for _ in range(2))  # type: ignore[misc]
        found.append((first, again))
    return found


def _retry(rank: int, size: int, device: torch.device) -> tuple[float, str, str]:
    """An allocation that returns cached blocks, one of them used by another stream. Its milliseconds, whether it waits,
    and its retries."""
    clock = Clock(device)
    quarter = int(LIMIT_GIB * 2**28)
    outside.limit_memory(device, LIMIT_GIB)
    kept = [torch.empty(quarter, dtype=torch.uint8, device=device) for _ in range(3)]
    kept[0].record_stream(clock.side)
    del kept[:2]
    before = outside.allocator_retries(device)
    ms = clock.ms(lambda: kept.append(torch.empty(5 * quarter // 2, dtype=torch.uint8, device=device)))
    return ms, _waits(ms), str(outside.allocator_retries(device) - before)


def _communicators(rank: int, size: int, device: torch.device) -> dict[str, float]:
    """The milliseconds of each call, by name: operations of communicators, and a function that torch compiles."""
    clock = Clock(device)
    whole, half = torch.ones(1 << 20, device=device), torch.ones(1 << 19, device=device)
    dist.reduce_scatter_tensor(half, whole)
    other = dist.new_group(list(range(size)))

    def exchange() -> Any:
        return dist.isend(half, 1) if rank == 0 else dist.irecv(half, 0)

    calls: list[tuple[str, Callable[[], Any]]] = [
        ("all-gather after a reduce-scatter", lambda: dist.all_gather_into_tensor(whole, half, async_op=True)),
        ("all-gather, again", lambda: dist.all_gather_into_tensor(whole, half, async_op=True)),
        ("first collective of a communicator", lambda: dist.all_reduce(half, group=other, async_op=True)),
        ("first send and receive of a group", exchange),
        ("send and receive, again", exchange),
    ]
    found, kept = {}, []
    for name, call in calls:
        dist.barrier()
        found[name] = clock.ms(lambda call=call: kept.append(call()))  # type: ignore[misc]
    function = outside.compiled(_gelu_times)
    for rows in _ROWS:
        x = torch.ones(rows, 256, device=device)
        try:
            found[f"torch.compile, {rows} rows"] = clock.ms(lambda x=x: function(x))  # type: ignore[misc]
        except Exception as error:  # no compiler on this machine
            found[f"torch.compile, {rows} rows: {type(error).__name__}"] = 0.0
    return found


def _gelu_times(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x) * x
