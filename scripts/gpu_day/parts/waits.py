"""Finds the calls of the host that wait until the device is idle. If a receive is posted ahead, and its message depends
on the next launch, such a call never ends. The first launch of a kernel is such a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.stages import cycles_per_ms
from gpu_day.bench import Bench, NotRun

SPIN_MS = 300.0  # length of a kernel on another stream
SHARE = 0.5  # a call that takes this share of that time has waited
# Calls that must not wait, on which steps after the first rely.
NEVER = ("allocation", "again", "pinned memory", "stream and event")


def run(bench: Bench) -> None:
    if not bench.machine.has_gpus:
        raise NotRun("there is no device to wait for without a GPU")
    (found,) = bench.ranks(_rank, size=1)
    waiting = [name for name, ms in found if ms >= SHARE * SPIN_MS]
    wrong = [name for name in waiting if name.endswith(NEVER)]
    bench.check(not wrong, f"allocations and launches of loaded kernels do not wait for the device{_named(wrong)}")
    bench.text(f"Host milliseconds of each call while another stream runs a kernel of {SPIN_MS:g} ms.")
    bench.table(["call", "host ms", "waits"], [[name, ms, "yes" if name in waiting else "no"] for name, ms in found])


def _named(names: list[str]) -> str:
    return f"; these do: {', '.join(names)}" if names else ""


def _rank(rank: int, size: int, device: torch.device) -> list[tuple[str, float]]:
    side = torch.cuda.Stream()
    cycles = int(SPIN_MS * cycles_per_ms(device))
    found = []
    for name, call in _calls(device):
        torch.cuda.synchronize(device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)
        began = time.perf_counter()
        call()
        found.append((name, 1e3 * (time.perf_counter() - began)))
    torch.cuda.synchronize(device)
    return found


def _calls(device: torch.device) -> list[tuple[str, Callable[[], Any]]]:
    """(name, call) in order: each call comes after those that it needs, and a kernel's first launch before its
    second."""
    kept: dict[str, torch.Tensor] = {}

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, device=device, dtype=dtype)

    def product(size: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
        one = tensor(size, size, dtype=dtype)
        return lambda: one @ one

    def norm() -> torch.Tensor:
        return F.layer_norm(kept["x"], (256,))

    return [
        ("allocation", lambda: kept.update(x=tensor(1024, 256), large=tensor(1 << 28))),
        ("elementwise kernel, first launch", lambda: kept["x"].fill_(1.0)),
        ("elementwise kernel, again", lambda: kept["x"].fill_(1.0)),
        ("layer norm, first launch", norm),
        ("layer norm, again", norm),
        ("matrix product, first launch", one := product(256)),
        ("matrix product, again", one),
        *((f"matrix product of size {size}", product(size)) for size in (64, 80, 384, 1000)),
        ("matrix product in bfloat16, first launch", two := product(512, torch.bfloat16)),
        ("matrix product in bfloat16, again", two),
        ("pinned memory", lambda: torch.empty(1 << 22, pin_memory=True)),
        ("stream and event", lambda: torch.cuda.Event().record(torch.cuda.Stream())),
        ("memory given back (cudaFree)", lambda: (kept.pop("large"), torch.cuda.empty_cache())),
    ]
