"""Each fault that lets two streams race is caught, and what ``record_stream`` hides.

Early frees are harmless while the handle owns the bytes, and where they are not, ``record_stream``, which torch calls
for every point-to-point tensor on NCCL, delays the reuse: a run on GPUs with the stock allocator shows nothing.
"""

from __future__ import annotations

import pytest

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.plan.ir.spec import BATCHED, PLAIN, PlanSpec
from megatron_pp.runtime.engine.executor import PlanExecutor
from testkit.device_runs.stream_runs import plan_on_streams
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
    WritesIntoGradient,
    WritesIntoOutput,
)
from testkit.streams import LATER_STEPS

SPECS = {
    "1f1b": PlanSpec("1f1b", 3, 1, 4),
    "interleaved": PlanSpec("interleaved_1f1b", 2, 2, 4),
    "zb_v": PlanSpec("zb_v", 2, 2, 4),
    "batched": PlanSpec("1f1b", 3, 1, 4, policy=BATCHED),
    "plain": PlanSpec("1f1b", 3, 1, 4, policy=PLAIN),
    "variable": PlanSpec("interleaved_1f1b", 2, 2, 4, variable_shapes=True),
    "named": PlanSpec("interleaved_1f1b", 2, 2, 4, skip_tensors="blocks"),
}
EARLY_FREES = (FreesWhenPosted, DropsGradientWhenPosted, DeallocatesWhatItDefers, WaitsOnAnotherHandle)
# The kind of race that each of these is, on every plan, with the handle's ownership in place.
WRONG_ACCESSES = {
    WritesIntoOutput: "read/write",
    WritesIntoGradient: "read/write",
    ReadsBeforeItArrived: "write/read",
    ReadsGradientBeforeItArrived: "write/read",
    FreesPostedReceive: "write/reuse",
}
each_plan = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@each_plan
@pytest.mark.parametrize("core", [P2PCore, OwnsNothing])
def test_the_engine_does_not_race_and_its_wait_alone_suffices(core: type[P2PCore], spec: PlanSpec) -> None:
    report = plan_on_streams(spec, core=core)
    assert not report.races, str(report)


@each_plan
def test_an_early_free_without_ownership_is_a_race(spec: PlanSpec) -> None:
    """Megatron-LM#4047."""
    report = plan_on_streams(spec, FreesWhenPosted, OwnsNothing)
    kinds = {race.kind for race in report.races}
    assert kinds == {"read/reuse"}, str(report)
    race = report.races[0]
    assert race.first.what.startswith("send to rank ")
    assert "SEND_F" in race.first.instruction
    assert race.freed is not None
    assert race.freed.instruction == race.first.instruction
    assert race.second.timeline is not race.first.timeline


def test_a_named_tensor_that_is_dropped_while_it_is_sent_is_a_race() -> None:
    report = plan_on_streams(SPECS["named"], DropsNamedWhenPosted, OwnsNothing)
    assert {race.kind for race in report.races} == {"read/reuse"}, str(report)
    assert all(":block" in race.first.instruction for race in report.races)
    assert not plan_on_streams(SPECS["named"], DropsNamedWhenPosted).races, "the handle owns the bytes"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", EARLY_FREES)
def test_early_frees_with_and_without_ownership_and_record_stream(mutant: type[PlanExecutor]) -> None:
    for name in ("1f1b", "interleaved", "zb_v"):
        spec = SPECS[name]
        assert plan_on_streams(spec, mutant, OwnsNothing).races
        assert not plan_on_streams(spec, mutant).races, "the handle owns the bytes"
        assert not plan_on_streams(spec, mutant, OwnsNothing, record_streams=True).races, "the allocator waits"


def has_place(mutant: type[PlanExecutor], spec: PlanSpec) -> bool:
    """Where shapes vary a receive is waited where it is posted; so is a batch, and nothing gets its memory before.
    Whoever has waited for a named tensor has the one before it on its channel too.
    """
    if spec.skip_tensors and mutant in (ReadsBeforeItArrived, ReadsGradientBeforeItArrived):
        return False
    if spec.variable_shapes:
        return mutant in (WritesIntoOutput, WritesIntoGradient)
    return spec.policy != BATCHED or mutant is not FreesPostedReceive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "name"),
    [(mutant, name) for mutant in WRONG_ACCESSES for name, spec in SPECS.items() if has_place(mutant, spec)],
)
def test_wrong_accesses_are_races_whoever_owns_the_bytes(mutant: type[PlanExecutor], name: str) -> None:
    """In a later step: the first launch of a mutant's own kernel would wait for the device, and so for the transfer."""
    report = plan_on_streams(SPECS[name], mutant, rules=LATER_STEPS)
    assert WRONG_ACCESSES[mutant] in {race.kind for race in report.races}, str(report)


@pytest.mark.parametrize("mutant", [WritesIntoOutput, WritesIntoGradient, ReadsBeforeItArrived])
def test_record_stream_does_not_hide_wrong_accesses(mutant: type[PlanExecutor]) -> None:
    assert plan_on_streams(SPECS["interleaved"], mutant, record_streams=True).races
