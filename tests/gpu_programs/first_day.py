"""A machine with virtual GPUs for ``scripts/gpu_day``: the replacements of its one seam, ``outside``."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import gpu_check
import torch
import torch.distributed as dist
from gpu_day import outside, table, unloaded
from gpu_day.bench import Sizes
from gpu_day.parts import exposed, faults, megatron, more_waits, named, overlap, pairs, waits

from benchmarks.report import BenchmarkError
from megatron_pp.faults.causes import mutual_waits
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.plan.ir.instruction import FREE_F
from megatron_pp.runtime.engine.executor import PlanExecutor
from testkit import race_cases
from testkit.faults.fault_scenarios import Episode, Pool, Report
from testkit.rank_processes import RanksTimedOutError
from testkit.streams import StreamNetwork
from testkit.streams.device import current_device
from testkit.streams.timelines import Lane
from testkit.streams.torch_calls import cuda
from testkit.virtual_ranks import run_on_virtual_devices, virtual_machine

SIZES = Sizes(1, 0.25, 20.0, 3, 8, 16, 0.05, ("1f1b",))
MEGATRONS = {"losses": [5.0, 4.0], "theirs": [5.0, 4.0], "difference": 0.0}
TIMES = {"ms": {engine: [2.0, 1.0] for engine in megatron.ENGINES}, "difference": 0.0}
_BUSY = 20.0  # many programs may share the cores that replace GPUs


@contextmanager
def machine(gpus: int, *places: tuple[Any, str, Any]) -> Iterator[None]:
    """Make a machine with GPUs, NVLink between all of them, all packages, and ``places`` (see ``virtual_machine``)."""
    answers: dict[str, Any] = {
        "gpu_count": lambda: gpus,
        "run_ranks": _run_ranks,
        "fault_pool": _pool(GlooPool),
        "own_process": _in_this_process,
        "links_of": no_links,
        "is_installed": lambda package: True,
        "nvidia_smi": _NvidiaSmi(gpus),
        "contexts": lambda: [dist.get_rank() % gpus],
        "peer_access": lambda one, other: True,
        "peak_mib": _Peaks(),
        "at_once": lambda jobs, workers: [job() for job in jobs],
        "limit_memory": lambda device, gib: None,
        "allocator_retries": lambda device: 1,
        "compiled": lambda function: function,
        "mps": lambda: nullcontext({}),
    }
    stand_ins: list[tuple[Any, str, Any]] = [(outside, name, answer) for name, answer in answers.items()]
    stand_ins += [(faults, "MOST_RANKS", 2), (race_cases, "LATE", 0.05), (overlap, "COST", 10.0)]
    stand_ins += [(exposed, "SCHEDULES", {"interleaved_1f1b": 2})]
    stand_ins += [(part, "MICROBATCHES", 4) for part in (exposed, pairs)]  # the conditions hold for any number
    stand_ins += [(overlap, "SHARED_COST", 10.0)]  # seconds of the host, which mean nothing here
    stand_ins += [(unloaded.Launches, "launch", lambda launches: torch.cuda.synchronize())]
    stand_ins += [(part, "SPIN_MS", 5000.0) for part in (waits, more_waits)]  # longer than on a loaded host
    stand_ins += [(named, "TIMEOUTS", {"p2p_timeout": 1.5, "compute_timeout": 20.0})]
    stand_ins += [(torch.cuda, "Event", LaneEvent), (torch.cuda, "_sleep", _sleep), (gpu_check, "Sizes", lambda: SIZES)]
    with virtual_machine(*stand_ins, *places):
        yield


def _run_ranks(
    work: Callable[..., Any], size: int, args: tuple[Any, ...], seconds: float, environment: dict[str, str], start: str
) -> list[Any]:
    """Run ``work`` on virtual devices. Megatron cannot run in threads, as its state is global: canned losses."""
    if args[1] is megatron.timed:
        return [dict(TIMES)] * size
    if args[1] is megatron.train:
        return [{"losses": MEGATRONS["theirs"]} if "--engine" in args[2][0] else dict(MEGATRONS)] * size
    return run_on_virtual_devices(work, size, args, timeout=_BUSY * seconds, environment=environment)


def _in_this_process(body: Callable[[Any], None], seconds: float, receive: Callable[[Any], None]) -> str:
    body(receive)
    return ""


def no_links(size: int, rate: float) -> AbstractContextManager[Any]:
    raise BenchmarkError("a virtual machine has none")


class _NvidiaSmi:
    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    def __call__(self, *arguments: str) -> str:
        if arguments[0] == "topo":
            rows = [
                [f"GPU{one}", *("X" if one == other else "NV18" for other in range(self.gpus))]
                for one in range(self.gpus)
            ]
            return "\n".join("\t".join(row) for row in rows)
        return f"{os.getpid()}, GPU-0, 700\n" if "compute-apps" in arguments[0] else "580.00\n"


@contextmanager
def links(size: int, rate: float) -> Iterator[list[Any]]:
    """Yield the places that ranks enter, as of a shaped network."""
    yield [SimpleNamespace(enter=lambda: None, interface="lo") for _ in range(size)]


class _Peaks:
    """The peak memory of each rank, which is less each time it is asked for."""

    def __init__(self) -> None:
        self.asked = threading.local()

    def __call__(self, device: torch.device, step: Callable[[], Any]) -> float:
        step()
        self.asked.times = getattr(self.asked, "times", 0) + 1
        return 8.0 / self.asked.times


class GlooPool(Pool):
    """Real processes on gloo, which a fault may kill."""

    def run(self, episode: Episode, deadline: float = 60.0) -> dict[int, Report]:
        return super().run(replace(episode, backend="gloo"), deadline)


# -- planted faults ----------------------------------------------------------------------------------------------------


class Planted(NamedTuple):
    """A fault, as (place, name, replacement), and the parts that have to fail with it."""

    places: list[tuple[Any, str, Any]]
    parts: tuple[str, ...]


def _transfer_wrongly(network: StreamNetwork, content: torch.Tensor, into: torch.Tensor) -> None:
    _TRANSFER(network, content, into)
    if into.is_floating_point():
        into.add_(0.5)


def _free_slowly(engine: PlanExecutor, at: Any) -> None:
    if at.op == FREE_F:
        time.sleep(0.02)  # more than a loaded machine adds to the step of the comparison
        torch.cuda._sleep(100_000_000)
    _FREE(engine, at)


def _pool(kind: type[GlooPool]) -> Callable[[int, str], GlooPool]:
    """Return a function that makes a pool with forked ranks."""

    def started(size: int, start: str) -> GlooPool:
        # Not on import: then ranks of all tests would be forked from a process without their modules.
        multiprocessing.set_forkserver_preload(["testkit.faults.fault_scenario_worker"])
        return kind(size, "forkserver")

    return started


class SilentPool(GlooPool):
    """A pool in which no rank raises."""

    def run(self, episode: Episode, deadline: float = 60.0) -> dict[int, Report]:
        return {rank: replace(report, error=None) for rank, report in super().run(episode, deadline).items()}


class ThoughtPool:
    """A pool without processes, for programs that can start none; ``NO_FAULTS`` replaces the judge of its reports."""

    def __init__(self, size: int) -> None:
        self.reports = {rank: Report(rank, 3, 1.0) for rank in range(size)}

    def __enter__(self) -> ThoughtPool:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: there are no processes to end."""

    def run(self, episode: Episode, deadline: float) -> dict[int, Report]:
        return self.reports


NO_FAULTS: list[tuple[Any, str, Any]] = [
    (outside, "fault_pool", lambda size, start: ThoughtPool(size)),
    (faults, "complaints", lambda *_: []),
    (faults, "seconds_to_detect", lambda *_: {1: 0.1}),
]


class HungPool(GlooPool):
    """A pool whose ranks never answer."""

    def __enter__(self) -> HungPool:
        return self

    def run(self, episode: Episode, deadline: float = 60.0) -> dict[int, Report]:
        raise RanksTimedOutError([0], deadline)


def _write_nothing(me: Any) -> None:
    me.announce()
    dist.send(me.tensor(), 1)


_TRANSFER, _FREE = StreamNetwork.transfer, PlanExecutor._free
_OTHER = {"losses": [5.0, 4.5], "theirs": [5.0, 4.0], "difference": 0.5}
_HARMLESS = {**race_cases.CASES, "h": race_cases.CASES["h"]._replace(send=_write_nothing)}
_EVERY_STEP = (
    "ahead",
    "ahead_4",
    "named",
    "first_steps",
    "steps",
    "eight",
    "shapes",
    "slices",
    "offload",
    "output_layer",
    "one_gpu_steps",
)
_EVERY_MEGATRON = tuple(part.name for part in table.PARTS if part.name.startswith("megatron"))

FAULTS = {
    "bytes change on their way": Planted(
        [(StreamNetwork, "transfer", _transfer_wrongly)], ("facts", "links", "one_gpu_race", *_EVERY_STEP)
    ),
    "bytes change on one GPU": Planted([(StreamNetwork, "transfer", _transfer_wrongly)], ("shaped_link",)),
    "releases take their time": Planted(
        [(PlanExecutor, "_free", _free_slowly), (overlap, "COST", 1.2), (overlap, "SHARED_COST", 1.2)],
        ("release", "one_gpu_release", "overlap", "one_gpu_overlap", "exposed"),
    ),
    "releases take their time under MPS": Planted(
        [(PlanExecutor, "_free", _free_slowly), (overlap, "SHARED_COST", 1.2)], ("overlap_mps",)
    ),
    "operations that wait for each other are not found": Planted(
        [(mutual_waits, "find", lambda *_: ("", ()))], ("named",)
    ),
    "the control of the race does nothing": Planted([(race_cases, "CASES", _HARMLESS)], ("race",)),
    "halves of a pair run in turn": Planted([(pairs, "RUNS", dict.fromkeys(pairs.RUNS, in_turn))], ("pairs",)),
    "a rank raises nothing": Planted([(outside, "fault_pool", _pool(SilentPool))], ("faults",)),
    "ranks hang after a fault": Planted([(outside, "fault_pool", _pool(HungPool))], ("faults",)),
    "a rank has a context on another GPU": Planted([(outside, "contexts", lambda: [0, 1])], ("contexts",)),
    "offloading saves no memory": Planted([(outside, "peak_mib", lambda device, step: 1.0)], ("offload",)),
    "every call waits for the device": Planted(
        [(waits, "SHARE", 0.0), (more_waits, "SHARE", 0.0)], ("waits", "more_waits")
    ),
    "processes have other ids outside": Planted([(outside, "nvidia_smi", lambda *_: "1, GPU-0, 700\n")], ()),
    "the GPUs have no FP8": Planted([(sys.modules[__name__], "MEGATRONS", {"not run": "no FP8"})], ()),
    "the numbers are not Megatron's": Planted(
        [(sys.modules[__name__], "MEGATRONS", _OTHER), (sys.modules[__name__], "TIMES", {**TIMES, "difference": 0.5})],
        _EVERY_MEGATRON,
    ),
}
"""The planted faults by name. Every part fails with one of them."""


# -- times of streams --------------------------------------------------------------------------------------------------


def _now(lane: Lane) -> float:
    return float(vars(lane).get("ms", 0.0))


def _sleep(cycles: int) -> None:
    """Add the time to the current stream; other operations take no time."""
    cuda._sleep(cycles)
    here = current_device()
    assert here is not None
    here.stream.ms = _now(here.stream) + 1e-6 * cycles  # type: ignore[attr-defined]


class LaneEvent(cuda.Event):
    """An event with the time of the stream where it was recorded; a stream that waits for it is moved to that time."""

    def record(self, stream: cuda.Stream | None = None) -> None:
        super().record(stream)
        self._time = _now(self._device.stream if stream is None else stream.lane)

    def wait(self, stream: cuda.Stream | None = None) -> None:
        super().wait(stream)
        lane = self._device.stream if stream is None else stream.lane
        lane.ms = max(_now(lane), self._time)  # type: ignore[attr-defined]
