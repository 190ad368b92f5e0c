"""A run that plans anew: numbers stay equal to the last bit, all ranks change together, no step waits for a search."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from megatron_pp import TransformerConfig
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ConfigError, PipelineMismatchError, ScheduleInputError
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.features.replanning import replan_thread, replanning
from megatron_pp.features.replanning.proposing import Answer, Recorded, searched
from megatron_pp.features.replanning.replan_thread import Change, ReplanThread
from megatron_pp.features.replanning.replanning import Replanning, in_steps
from megatron_pp.plan.builder import build_plan
from megatron_pp.runtime.step import StepCall
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.toy import ToyBlock, ToyResult
from tests.harness.proposals import Search, proposal, to
from tests.harness.toy_training import train_toy

Said = Callable[[str], list[str]]


def train(
    num_chunks: int = 1,
    *,
    size: int = 2,
    store: Any = HashStore,
    pause: float = 0.03,
    before: Callable[[int, int, Any], None] = lambda rank, step, config: None,
    **more: Any,
) -> ToyResult:
    """``pause``: seconds before each step."""

    def before_step(rank: int, step: int, config: Any) -> None:
        before(rank, step, config)
        time.sleep(pause)

    network = MemoryNetwork(size, store=store and store())
    return train_toy(network, num_chunks, before=before_step, **{"steps": 12, "microbatches": 6, "split": True, **more})


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replan_thread, "_POLL", 0.01)
    before = len(replanning._REPLANNINGS.items())
    yield
    if len(replanning._REPLANNINGS.items()) > before:  # those of this test's models would search in the next one
        gc.collect()
        replanning._REPLANNINGS.items()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Callable[[Search], None]:
    return lambda search: monkeypatch.setattr(replan_thread, "searched", search)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda part: [line for record in caplog.records if part in (line := record.getMessage())]


# --- numbers, and what is changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "other", "chunks", "split"),
    [("1f1b", "zb_h1", 1, True), ("1f1b", "gpipe", 1, False), ("interleaved_1f1b", "interleaved_zb", 2, True)],
)
def test_numbers_are_those_of_one_plan(
    schedule: str, other: str, chunks: int, split: bool, searches: Callable[[Search], None], said: Said
) -> None:
    searches(to(other))
    fields = {"pipeline_schedule": schedule, "overlap_p2p_comm": True}
    changed = train(chunks, split=split, pipeline_replan="every:2", **fields)
    assert len(said(f"to {other}")) >= 1
    assert said("pipeline_replan: from training step")[0].endswith(f", to {other}")
    assert said(f"{other} P=2")[0].endswith(said("certificate: complete")[-1].rpartition(" ")[2])
    assert changed.difference(train(chunks, split=split, pause=0.0, **fields)) == 0


def test_a_process_searches_with_what_ranks_have_recorded(searches: Callable[[Search], None], said: Said) -> None:
    found: list[Answer] = []

    def search(recorded: Recorded, started: Any) -> Answer:
        if not found:
            found.append(searched(recorded, started))
        return found[0]

    def before(rank: int, step: int, config: Any) -> None:
        until = time.monotonic() + 60.0
        while rank == 0 and step == 5 and not found and time.monotonic() < until:
            time.sleep(0.02)

    searches(search)
    train(pipeline_replan="every:1", before=before, steps=10, microbatches=2)
    (answer,) = found
    assert len(answer.proposals) + len(answer.kept) == 1
    if answer.proposals:
        assert said("from training step")[0].endswith(answer.proposals[0].sentence)
    else:
        assert said("the plan stays: auto finds none that is shorter by 1%")


def test_steps_of_unequal_microbatches_have_plans_of_their_own(searches: Callable[[Search], None], said: Said) -> None:
    """The order of a step is that of its costs, on all ranks; other steps keep theirs."""
    asked: list[Recorded] = []
    ran: list[str] = []
    kinds = [[1.0] * 6, [1.0, 4.1, 1.0, 1.0, 1.0, 1.0], [1.0] * 5 + [0.5]]

    def search(recorded: Recorded, started: Any) -> Answer:
        """One kind at a time."""
        asked.append(recorded)
        unknown = [tuple(shares) for shares in recorded.shares if shares]
        return Answer([proposal(recorded, "gpipe", shares) for shares in unknown[:1]], [])

    searches(search)
    make = StepCall._executor

    def noted(self: StepCall, plan: Any, *rest: Any) -> Any:
        if self.communicator.rank == 0:
            ran.append(plan.spec.schedule)
        return make(self, plan, *rest)

    def before(rank: int, step: int, config: Any) -> None:
        config.microbatch_costs = kinds[step % 3] if rank else lambda: kinds[step % 3]

    with mock.patch.object(StepCall, "_executor", noted):
        changed = train(pipeline_replan="every:3", before=before, steps=24, pipeline_schedule="1f1b")
    assert {tuple(shares) for shares in asked[0].shares} == {(), (1.0, 4.0, *[1.0] * 4), (*[1.0] * 5, 0.5)}
    assert set(ran[2::3]) == {"1f1b"}, "steps whose microbatches cost the same"
    assert ran[0] == ran[1] == "1f1b"
    assert ran[-3:] == ["gpipe", "gpipe", "1f1b"]
    assert changed.difference(train(steps=24, pause=0.0, pipeline_schedule="1f1b")) == 0


def test_costs_are_rounded_so_that_similar_steps_run_one_plan() -> None:
    assert in_steps([2.0, 2.1, 1.9]) == ()
    assert in_steps([1.0, 4.2, 1.1, 0.5, 1.0]) == (1.0, 4.0, 1.0, 0.5, 1.0)
    assert in_steps([10.0, 41.0, 10.5, 5.2, 9.9]) == (1.0, 4.0, 1.0, 0.5, 1.0)


# --- searches that fail, take long, or find nothing


@pytest.mark.parametrize(
    ("fields", "chunks", "draws"),
    [
        ({}, [nn.Linear(1, 1), nn.Linear(1, 1)], False),
        ({}, [nn.Linear(1, 1), nn.Sequential(nn.Dropout(0.1))], True),
        ({}, [nn.Sequential(nn.Dropout(0.1))], False),
        ({"hidden_dropout": 0.1}, [nn.Linear(1, 1), nn.Linear(1, 1)], True),  # a function of the model's, as Megatron's
        ({"attention_dropout": 0.1}, [nn.Linear(1, 1), nn.Linear(1, 1)], True),
    ],
)
def test_chunks_with_dropout_keep_their_turns(fields: dict[str, Any], chunks: list[nn.Module], draws: bool) -> None:
    settings = StepSettings.from_config(SimpleNamespace(pipeline_replan="every:5", **fields))
    assert Replanning(settings, chunks).draws == draws


def test_a_search_that_fails_is_said_once_and_changes_nothing(searches: Callable[[Search], None], said: Said) -> None:
    calls: list[int] = []

    def fail(recorded: Recorded, started: Any) -> Answer:
        calls.append(1)
        raise RuntimeError("the search ended with code 1: MemoryError")

    searches(fail)
    trained = train(pipeline_replan="every:1")
    assert len(calls) > 1
    assert len(said("no plan was searched")) == 1
    assert said("MemoryError")
    assert not said("from training step")
    assert trained.difference(train(pause=0.0)) == 0


def test_a_search_delays_no_step_and_is_taken_at_a_later_boundary(
    searches: Callable[[Search], None], said: Said
) -> None:
    began, let_go = threading.Event(), threading.Event()

    def search(recorded: Recorded, started: Any) -> Answer:
        began.set()
        assert let_go.wait(30.0)
        return to("gpipe")(recorded, started)

    def before(rank: int, step: int, config: Any) -> None:
        if step == 8 and rank == 0:  # seven steps are over, and the search is not
            assert began.wait(30.0)
            assert not said("from training step")
            let_go.set()

    searches(search)
    train(pipeline_replan="every:1", before=before, steps=16)
    assert int(said("from training step")[0].split()[4]) > 8


def test_a_plan_that_is_not_the_verified_one_is_run_by_no_rank(searches: Callable[[Search], None], said: Said) -> None:
    def search(recorded: Recorded, started: Any) -> Answer:
        found = proposal(recorded, "gpipe")
        return Answer([replace(found, programs=(found.programs[0], found.programs[1] + " FREE_F0.0"))], [])

    searches(search)
    trained = train(pipeline_replan="every:2")
    assert said("which were verified")
    assert not said("from training step")
    assert trained.difference(train(pause=0.0)) == 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ReplanThread, Change], Change]], None]:
    """What a rank makes of what was found is changed."""
    make = ReplanThread._made

    def change(of: Callable[[ReplanThread, Change], Change]) -> None:
        monkeypatch.setattr(ReplanThread, "_made", lambda self, answer: [of(self, one) for one in make(self, answer)])

    return change


def test_a_plan_that_one_rank_cannot_read_is_run_by_none(
    searches: Callable[[Search], None], said: Said, made: Any
) -> None:
    def cannot_read(thread: ReplanThread, change: Change) -> Change:
        if thread.rank:
            raise MemoryError("no room for tasks")
        return change

    searches(to("gpipe"))
    made(cannot_read)
    train(pipeline_replan="every:1")
    assert said("MemoryError: no room for tasks")
    assert not said("from training step")


def test_ranks_that_change_to_different_plans_are_told_apart(searches: Callable[[Search], None], made: Any) -> None:
    def another(thread: ReplanThread, change: Change) -> Change:
        other = build_plan(replace(change.plan.spec, schedule="eager_1f1b"))
        return change._replace(plan=other) if thread.rank else change

    searches(to("gpipe"))
    made(another)
    with pytest.raises(PipelineMismatchError, match="schedule: rank 0 has gpipe, rank 1 has eager_1f1b"):
        train(pipeline_replan="every:1")


# --- what is refused


@pytest.mark.parametrize("value", ["every:0", "each:5", "every:", "every:-1", "every:1.5", 100, "100", "every:٣"])
def test_a_value_that_is_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="it must be every:N, such as every:100"):
        TransformerConfig(num_layers=2, hidden_size=4, num_attention_heads=1, pipeline_replan=value)
    with pytest.raises(ScheduleInputError, match="it must be every:N, such as every:100"):
        train(pipeline_replan=value, steps=1)


@pytest.mark.parametrize("costs", [[1.0] * 5, [1.0] * 5 + [0.0], [1.0] * 5 + [float("nan")], [1.0] * 5 + ["a"]])
def test_costs_that_cannot_be(costs: list[Any]) -> None:
    with pytest.raises(ScheduleInputError, match=r"microbatch_costs is .* it must be 6 finite numbers above 0"):
        train(microbatch_costs=costs, steps=1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pipeline_schedule": "pipe_offload", "chunks": 2}, "activations are offloaded"),
        ({"offload_chunks": 1}, "activations are offloaded"),
        ({"sequence_slices": 3}, "sequences are cut into slices"),
        ({"overlapped_forward_backward": in_turn}, "pairs of a forward and a backward run as one"),
        ({"skip_tensors": "skip=0>1"}, "tensors skip stages"),
        ({"cuda_graph_impl": "transformer_engine"}, "config.cuda_graph_impl is 'transformer_engine', whose graphs"),
        ({"cuda_graph_impl": "local"}, "config.cuda_graph_impl is 'local', whose graphs share memory"),
        ({"fine_grained_activation_offloading": True}, "config.fine_grained_activation_offloading is set, by which"),
        ({"moe_paged_stash": True}, "config.moe_paged_stash is set, by which Megatron finds"),
    ],
)
def test_runs_that_cannot_be_planned_anew(fields: dict[str, Any], why: str) -> None:
    chunks = fields.pop("chunks", 1)
    with pytest.raises(ScheduleInputError, match=f"cannot be planned anew: {why}"):
        train(chunks, pipeline_replan="every:5", steps=1, **fields)


def test_chunks_that_share_a_parameter_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.nn.Parameter(torch.zeros(1))

    class Tied(ToyBlock):
        def __init__(self, stage: int) -> None:
            super().__init__(stage)
            self.tied = shared

    with pytest.raises(ScheduleInputError, match="chunks of a rank share a parameter"):
        train(2, block=Tied, pipeline_replan="every:5", steps=1)


def test_ranks_that_do_not_all_plan_anew() -> None:
    def before(rank: int, step: int, config: Any) -> None:
        config.pipeline_replan = "every:5" if rank else None

    with pytest.raises(PipelineMismatchError, match="pipeline_replan: rank 0 has None, rank 1 has every:5"):
        train(before=before, steps=2)


def test_a_group_without_a_store() -> None:
    with pytest.raises(ScheduleInputError, match="needs a store"):
        train(store=None, pipeline_replan="every:5", steps=1)


def test_evaluation_and_one_rank_have_nothing_to_plan() -> None:
    assert len(train(size=1, pipeline_replan="every:1", steps=2, pause=0.0).losses) == 12
