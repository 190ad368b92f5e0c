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
from tests.harness.step_runs import Rank, forward_with, in_pipeline, pipeline

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


class Halves(ToyData):
    """What one of two context-parallel ranks has of each sequence."""

    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().microbatch(mb)
        return x[: self.seq_length // 2], target[: self.seq_length // 2]


def test_context_parallel_size_scales_a_mean_loss_and_not_a_sum() -> None:
    def gradient(of_sums: bool) -> torch.Tensor:
        def loss_func(loss: torch.Tensor) -> Any:
            return (loss, torch.tensor(5), {}) if of_sums else (loss, {})

        groups = SimpleNamespace(pp=ThreadGroup(0, 2), cp=ThreadGroup(0, 2), tp=ThreadGroup(0, 1))
        _, blocks = in_pipeline(
            2, forward_with(loss_func), data=Halves(4, seq_length=6), more={"pg_collection": groups}
        )
        return blocks[0].linear.weight.grad

    torch.testing.assert_close(gradient(of_sums=False), gradient(of_sums=True) * 2 * 5)  # cp size, tokens


# -- timers and profiler ranges ---------------------------------------------------------------------------


class Timers:
    """Megatron's timers as the schedules use them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.name = ""

    def __call__(self, name: str, log_level: int | None = None) -> Timers:
        self.name = name if log_level is None else f"{name}/{log_level}"
        return self

    def start(self, barrier: bool = False) -> None:
        self.lines.append(f"{self.name} start{' barrier' if barrier else ''}")

    def stop(self) -> None:
        self.lines.append(f"{self.name} stop")


def profiled() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def test_megatrons_timers_run() -> None:
    timers = [Timers(), Timers()]
    fields: dict[str, Any] = {"fields_of": lambda rank: {"timers": timers[rank]}, "barrier_with_L1_time": False}
    pipeline(2, 1, MICROBATCHES, lambda rank: rank.step(rank.model()), **fields)
    for lines in (each.lines for each in timers):
        assert lines[0] == "forward-backward/1 start"
        assert lines[-1] == "forward-backward stop"
        assert lines.count("forward-compute/2 start") == lines.count("forward-compute stop") == MICROBATCHES
        assert lines.count("backward-compute/2 start") == lines.count("backward-compute stop") == MICROBATCHES


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
