"""What users of Megatron's schedules count on, with our own engine and plain modules; ranks as threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import HIDDEN, ToyData
from megatron_pp.tracing.observers import ranges_if_profiling
from tests.harness.blocks import of_stage
from tests.harness.step_runs import Rank, in_pipeline, pipeline
from tests.harness.timers import Timers

MICROBATCHES = 4
DATA = ToyData(MICROBATCHES)

# -- shapes between stages ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "length"),
    [(1, 1, False, 24), (2, 1, True, 12), (2, 1, False, 24), (1, 3, False, 8), (2, 3, True, 4)],
)
@pytest.mark.parametrize("from_config", [False, True])
def test_shapes_between_stages(tp: int, cp: int, sequence_parallel: bool, length: int, from_config: bool) -> None:
    """A receive has the share of the sequence that this rank holds, by the process groups given or by the config."""
    seen: list[Any] = []

    def look(stage: int, x: torch.Tensor, block: Any) -> torch.Tensor:
        seen.append((stage, tuple(x.shape)))
        return block(x)

    def forward_step(iterator: Any, model: Any) -> Any:
        x = torch.ones(length, DATA.micro_batch_size, HIDDEN)
        return model(x), lambda out: (out.mean(), {"loss": out.detach().mean()})

    fields: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    groups = {"tp": ThreadGroup(0, tp), "cp": ThreadGroup(0, cp)}
    if from_config:
        fields |= {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    more = {} if from_config else {"pg_collection": SimpleNamespace(pp=ThreadGroup(0, 2), **groups)}
    in_pipeline(2, forward_step, block=of_stage(look), data=ToyData(4, seq_length=24), more=more, **fields)
    assert set(seen) == {(stage, (length, DATA.micro_batch_size, HIDDEN)) for stage in range(2)}


# -- timers and profiler ranges ---------------------------------------------------------------------------


def profiled() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def test_megatrons_timers_run() -> None:
    timers = [Timers(), Timers()]
    fields: dict[str, Any] = {"fields_of": lambda rank: {"timers": timers[rank]}, "barrier_with_L1_time": False}
    pipeline(2, 1, MICROBATCHES, lambda rank: rank.step(rank.model()), **fields)
    compute = {"forward-compute", "backward-compute"}
    for each in timers:
        assert (each.lines[0], each.lines[-1]) == ("forward-backward start", "forward-backward stop")
        assert (each.levels["forward-backward"], {each.levels[name] for name in compute}) == (1, {2})
        assert {each.lines.count(f"{name} {what}") for name in compute for what in ("start", "stop")} == {MICROBATCHES}


def test_a_profile_names_every_instruction() -> None:
    def names_of(rank: Rank) -> list[str]:
        if rank.rank == 1:
            return rank.step(rank.model())
        with profiled() as profile:  # a profiler watches the thread that started it
            rank.step(rank.model())
        return [event.name for event in sorted(profile.events(), key=lambda e: e.time_range.start)]

    names = pipeline(2, 1, MICROBATCHES, names_of, batch_p2p_comm=True)[0]
    program = [
        str(at) for at in build_plan(PlanSpec("1f1b", 2, 1, MICROBATCHES, group_size=2, policy="batched")).programs[0]
    ]
    assert [name for name in names if name in set(program)] == program


def test_without_a_profiler_nothing_is_recorded() -> None:
    assert ranges_if_profiling() is None
    with profiled():
        assert ranges_if_profiling() is not None
