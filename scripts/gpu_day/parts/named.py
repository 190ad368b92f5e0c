"""Two operations that wait for each other's messages. The engine must name them in time, and abort them. Each launches
a kernel that is not loaded, after a receive was posted whose message the other rank sends later.

Controls are the same launches under the default plan, under ``device_sync=True``, and under Megatron-core's own
interleaved schedule. In that schedule no two operations wait for each other.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines import make_step, surroundings
from benchmarks.work import Unavailable, Work
from gpu_day import ranks
from gpu_day.bench import Bench
from gpu_day.unloaded import Launches, LaunchingBlock
from megatron_pp.comm.backends import group_transport
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.ir.spec import DEVICE_RULES
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import reference_run

RANKS = 2
P2P_TIMEOUT = 5.0
TIMEOUTS = {"p2p_timeout": P2P_TIMEOUT, "compute_timeout": 60.0}
SLACK = 10.0  # seconds after p2p_timeout until the last rank has raised
PATIENCE = 45.0  # seconds for ranks that do not raise, with the start of their processes
MICROBATCHES = 4
PLANS: dict[str, dict[str, Any]] = {
    "device_sync=False": {"device_sync": False},
    "default": {},
    "device_sync=True": {"device_sync": True},
}
AHEAD = "device_sync=False"
# Default plans are safe if lowering has the rule ANY_WAIT.
SAFE = [name for name in PLANS if name != AHEAD and (name != "default" or "any_wait" in DEVICE_RULES)]
WORDS = ("operations wait for each other's messages", "F0.2", "B0.1", "device_sync")
_NONE: frozenset[int] = frozenset()
_ALL = frozenset(range(2 * MICROBATCHES))


def run(bench: Bench) -> None:
    rows = []
    for name, fields in PLANS.items():
        found, logged = _found(bench, {**fields, **TIMEOUTS})
        rows += [[name, rank, one["said"], one["seconds"]] for rank, one in enumerate(found)]
        if name == AHEAD:
            said = [f"{one['said']} {log}" for one, log in zip(found, logged, strict=True)]
            named = any(all(word in text for word in WORDS) for text in said)
            bench.check(named, "two operations that wait for each other are named, and the setting that ends it")
            left = all(one["said"].startswith("PipelineStallError") for one in found)
            bench.check(left, "an abort ends both operations, and both ranks raise")
            seconds = max(one["seconds"] for one in found)
            bench.check(seconds < P2P_TIMEOUT + SLACK, f"within p2p_timeout and {SLACK:g} s ({seconds:.1f} s)")
        elif name in SAFE:
            bench.check(all(one["said"] == ranks.EQUAL for one in found), f"{name}: the same launches do not hang")
    rows.append(["Megatron's interleaved schedule", "all", *_control(bench)])
    bench.text(f"Rank 0 launches in F0.2 what it has not loaded, rank 1 in B0.1; p2p_timeout {P2P_TIMEOUT:g} s.")
    bench.table(["plan", "rank", "what happened", "s"], [[plan, rank, said[:300], s] for plan, rank, said, s in rows])


def _found(bench: Bench, fields: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The outcome of each rank, and the errors that it logged, also if it never left its step."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = min(P2P_TIMEOUT + PATIENCE, bench.left)
        try:
            found = bench.ranks(_two_launches, {**ranks.OVERLAP, **fields}, folder, seconds=seconds)
        except Exception as error:
            found = [{"said": f"{type(error).__name__}: {error}", "seconds": seconds}] * RANKS
        logs = [Path(folder) / str(rank) for rank in range(RANKS)]
        return found, [" ".join(log.read_text().split()) if log.exists() else "" for log in logs]


def _control(bench: Bench) -> tuple[str, float]:
    began = time.monotonic()
    return ranks.outcome(lambda: bench.ranks(_megatrons, seconds=min(40.0, bench.left))), time.monotonic() - began


def _two_launches(rank: int, size: int, device: torch.device, fields: dict[str, Any], folder: str) -> dict[str, Any]:
    """The outcome of this rank, and its seconds. Errors that it logs also go to a file of ``folder``."""
    chosen = (frozenset({2}), _NONE) if rank == 0 else (_NONE, frozenset({1}))
    began = time.monotonic()
    step = ranks.Step("1f1b", 1, MICROBATCHES, fields)
    with _errors_logged_to(Path(folder) / str(rank)):
        try:
            said, began = _after_warm_up(rank, size, device, step, chosen)
        except Exception as error:
            began = float(vars(error).get("began", began))
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {"said": said, "seconds": time.monotonic() - began}


@contextmanager
def _errors_logged_to(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path)
    logger = logging.getLogger("megatron_pp")
    handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def launching_alone(rank: int, size: int, device: torch.device, step: ranks.Step, who: int) -> str:
    """A step after the first ones, in which only rank ``who`` launches new kernels, in each of its operations."""
    chosen = (_ALL, _ALL) if rank == who else (_NONE, _NONE)
    return _after_warm_up(rank, size, device, step, chosen)[0]


def _after_warm_up(
    rank: int, size: int, device: torch.device, step: ranks.Step, chosen: tuple[frozenset[int], frozenset[int]]
) -> tuple[str, float]:
    """Run a step in which this rank launches new kernels in the forwards and backwards ``chosen``. Returns how its
    gradients differ, and when it began. An exception has that time in ``began``."""
    config = step.config()
    data = step.data(device)
    launches = Launches(device)
    assert dist.group.WORLD is not None
    transport = group_transport(dist.group.WORLD)
    communicator = P2PCommunicator(dist.group.WORLD, config, transport)

    def block(which: tuple[frozenset[int], frozenset[int]]) -> Any:
        return lambda stage: LaunchingBlock(stage, step.hidden, launches, *which).to(device)

    whole = reference_run(size * step.chunks, data, block=block((_NONE, _NONE)))
    for _ in range(2):  # loads all other kernels
        run_rank(rank, size, step.chunks, data, config, communicator, block=block((_NONE, _NONE)), prepare=step.prepare)
    ranks.synchronize(device)
    dist.barrier()
    began = time.monotonic()
    try:
        mine = run_rank(rank, size, step.chunks, data, config, communicator, block=block(chosen), prepare=step.prepare)
        ranks.synchronize(device)
    except Exception as error:
        error.began = began  # type: ignore[attr-defined]
        raise
    finally:
        transport.close()
    return ranks.as_text(ranks.largest_difference(mine.grads, whole.grads)), began


def _megatrons(rank: int, size: int, device: torch.device) -> str:
    """The outcome if both ranks launch new kernels under Megatron-core's schedule with overlap."""
    work = Work("interleaved_1f1b", size, 2, MICROBATCHES, (64, 1, 64))
    chosen = (frozenset({2}), _NONE) if rank == 0 else (_NONE, frozenset({1}))
    launches = Launches(device)
    armed: list[bool] = []

    def stage(number: int) -> torch.nn.Module:
        return LaunchingBlock(number, 64, launches, *(chosen if armed else (_NONE, _NONE))).to(device)

    for _ in range(2):
        try:
            step = make_step("megatron", work, rank, dist.group.WORLD, stage)
        except Unavailable as reason:
            return str(reason)
        with surroundings("megatron"):
            step()
        ranks.synchronize(device)
        dist.barrier()
        armed.append(True)
    return "it ends"
