"""A checker that knows nothing of the package reads what the engine asked of its devices: no race, and each fault."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.features.pairs.pair_runner import on_two_streams
from megatron_pp.plan.ir.spec import BATCHED, ONE_QUEUE, PLAIN, POLICIES, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.runtime.engine.executor import PlanExecutor
from testkit.device_runs.stream_runs import on_one_device, plan_on_streams
from testkit.device_runs.virtual_timelines import PairsBy
from testkit.judges import stream_judge
from testkit.judges.stream_judge import Judge, faults_in
from testkit.mutants.executor_mutants import (
    DeallocatesWhatItDefers,
    DropsGradientWhenPosted,
    OwnsNothing,
    ReadsBeforeItArrived,
    ReadsGradientBeforeItArrived,
    WaitsOnAnotherHandle,
)
from testkit.mutants.stream_mutants import (
    DropsNamedWhenPosted,
    FreesPostedReceive,
    FreesWhenPosted,
    TransfersOnComputeStream,
    WaitsAtOnce,
    WritesIntoGradient,
    WritesIntoOutput,
)
from testkit.streams import LATER_STEPS, StreamReport
from testkit.streams.call_log import CallLog
from testkit.sweeps import EXHAUSTIVE
from testkit.thread_runs.output_layer_runs import Case, step_on_nccl

FAMILIES = [name for name, family in SCHEDULES.items() if family.search is None and not family.barriers]
FEATURES: dict[str, dict[str, Any]] = {"": {}, "pairs": {"overlap_pairs": True}, "offload": {"offload_chunks": 1}}
GRID = list(product((2, 4), (1, 2, 3), POLICIES, FEATURES))


def judged(
    path: Path, spec: PlanSpec, executor: Callable[..., PlanExecutor] = PlanExecutor, **more: Any
) -> tuple[StreamReport, list[str]]:
    """What the race check of the package says of a step, and what the judge says of its log."""
    log = CallLog()
    report = plan_on_streams(spec, PairsBy(on_two_streams, executor), log=log, **more)
    log.write(path / "calls.jsonl")
    return report, faults_in(path / "calls.jsonl")


def test_the_stream_judge_imports_nothing_of_the_package(tmp_path: Path) -> None:
    """The judge runs as a script of its own."""
    path = Path(stream_judge.__file__)
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names
    for mutant, words in ((PlanExecutor, "no fault"), (WritesIntoOutput, "use the same memory in no order")):
        _, faults = judged(tmp_path, PlanSpec("1f1b", 2, 1, 2), mutant)
        command = [sys.executable, "-I", str(path), str(tmp_path / "calls.jsonl")]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (ran.returncode, len(ran.stdout.splitlines())) == (bool(faults), len(faults) or 1)
        assert words in ran.stdout


@pytest.mark.parametrize(("n", "schedule"), list(enumerate(FAMILIES)))
def test_the_stream_judge_finds_no_race_in_any_schedule(n: int, schedule: str, tmp_path: Path) -> None:
    """Sizes, policies and features take turns: each schedule has two of 54."""
    family, some = SCHEDULES[schedule], [GRID[(17 * n + 13 * k) % len(GRID)] for k in range(2)]
    for size, chunks, policy, feature in GRID if EXHAUSTIVE else some:
        fields = {} if schedule == "pipe_offload" and feature == "pairs" else FEATURES[feature]
        sizes = size, family.chunks or chunks, 8 if size == 2 else 4
        spec = PlanSpec(schedule, *sizes, policy=policy, slices=2 if family.sliced else 1, **fields)
        report, faults = judged(tmp_path, spec)
        assert not faults, f"{spec}: {faults[:3]}"
        assert report.reused > 0, "memory that nobody reuses shows no early free"


@pytest.mark.parametrize("schedule", ["vocab_1f1b", "vocab_1f1b_alg1"])
def test_the_stream_judge_finds_no_race_in_collectives(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the transport for NCCL, with threads that run freely."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    log = CallLog()
    step_on_nccl(Case(schedule, 2, 4), log, overlap_p2p_comm=True)
    faults = Judge().judge(log.records)
    assert not faults, faults[:3]


SPECS = {
    "interleaved": PlanSpec("interleaved_1f1b", 2, 2, 4),
    "batched": PlanSpec("1f1b", 3, 1, 4, policy=BATCHED),
    "plain": PlanSpec("1f1b", 3, 1, 4, policy=PLAIN),
    "named": PlanSpec("interleaved_1f1b", 2, 2, 4, skip_tensors="blocks"),
}
EARLY_FREES = (FreesWhenPosted, DropsGradientWhenPosted, DeallocatesWhatItDefers, WaitsOnAnotherHandle)
WRONG_ACCESSES = (WritesIntoOutput, WritesIntoGradient, ReadsBeforeItArrived, ReadsGradientBeforeItArrived)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        *product((*EARLY_FREES, *WRONG_ACCESSES), ["interleaved", "batched", "plain"]),
        *product([FreesPostedReceive], ["interleaved", "plain"]),
        (DropsNamedWhenPosted, "named"),
    ],
)
def test_each_fault_is_found(mutant: type[PlanExecutor], name: str, tmp_path: Path) -> None:
    frees = mutant in EARLY_FREES or mutant is DropsNamedWhenPosted
    report, faults = judged(tmp_path, SPECS[name], mutant, core=OwnsNothing if frees else P2PCore)
    assert report.races
    assert faults
    assert all("in no order" in fault for fault in faults)


@pytest.mark.parametrize("mutant", EARLY_FREES)
def test_a_fault_that_the_handle_makes_harmless_is_none(mutant: type[PlanExecutor], tmp_path: Path) -> None:
    report, faults = judged(tmp_path, SPECS["interleaved"], mutant)
    assert not report.races
    assert not faults


def test_devices_that_hang_are_no_race(tmp_path: Path) -> None:
    assert judged(tmp_path, SPECS["interleaved"], WaitsAtOnce)[1] == []
    ahead = replace(SPECS["interleaved"], device=(ONE_QUEUE,))
    report, faults = judged(tmp_path, ahead, kind=TransfersOnComputeStream, rules=LATER_STEPS)
    assert not report.races
    assert faults == ["the devices wait for each other forever"]


@pytest.mark.parametrize("seed", range(8))
def test_both_checks_agree_on_random_programs(seed: int) -> None:
    """Operations, waits and synchronisations of three streams and two tensors."""
    found = set()
    for number in range(seed * 10, seed * 10 + 10):
        log = CallLog()
        report = on_one_device(partial(random_program, random.Random(number)), log=log)
        faults = Judge().judge(log.records)
        assert bool(report.races) == bool(faults), f"program {number}: {report}, {faults}"
        found.add(bool(faults))
    assert found == {True, False}


def random_program(draw: random.Random) -> list[Any]:
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    tensors, kept = [torch.zeros(8), torch.zeros(8)], []
    torch.cuda.synchronize()
    for _ in range(draw.randrange(3, 12)):
        at, other = draw.sample(streams, 2)
        tensor, first = draw.choice(tensors), draw.randrange(5)
        action = draw.random()
        if action < 0.6:
            at.wait_stream(other)
        elif action < 0.7:
            at.synchronize()
        else:
            with torch.cuda.stream(at):
                kept.append(tensor[first : first + 3].add_(1) if draw.random() < 0.5 else tensor[first:] + 1)
    return kept


START = [
    {"do": "format", "name": "calls of virtual devices", "version": 1},
    {"do": "stream", "rank": 0, "stream": 0, "name": "host", "host": True},
    {"do": "stream", "rank": 0, "stream": 1, "name": "default stream", "host": False},
    {"do": "allocate", "rank": 0, "address": 512, "bytes": 8, "stream": 1},
]
ADD = {"do": "launch", "stream": 1, "what": "add", "reads": [], "writes": []}
ODD: dict[str, dict[str, Any]] = {
    "uses 16 bytes at 512, which it does not have": {**ADD, "reads": [[512, 16]]},
    "uses 4 bytes at 0, which it does not have": {**ADD, "writes": [[0, 4]]},
    "has two things at 516": {"do": "allocate", "rank": 0, "address": 516, "bytes": 8, "stream": 1},
    "gives back what it does not have, at 516": {"do": "free", "rank": 0, "address": 516},
    "event 5 is waited for and was never recorded": {"do": "wait", "stream": 1, "event": 5},
    "the devices wait for each other forever": {**ADD, "do": "post", "after": 1, "event": 1, "ends": 1},
}


@pytest.mark.parametrize("words", ODD)
def test_impossible_logs_are_reported_as_faults(words: str) -> None:
    assert Judge().judge(START) == []
    (fault,) = Judge().judge([*START, ODD[words]])
    assert words in fault


def test_a_log_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="this is not a log of calls, or one of another version"):
        Judge().judge([{**START[0], "version": 2}])
