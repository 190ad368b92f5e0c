"""What stages may give each other: parameters, the user's data, constants; inputs that a stage does not use; and what
cannot be given. ``test_differential.py`` has views, frozen stages and outputs that are read later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from megatron_pp.common import log_once
from megatron_pp.errors import P2PShapeError, P2PTypeError, PipelinePeerError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.run_step import ranges_if_profiling
from megatron_pp.testing.pipeline import placement_of, run_in_threads
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import HIDDEN, ToyBlock, ToyData, ToyResult, merged, reference_run, toy_config, toy_loss
from megatron_pp.weight_grad import split_weight_grad
from testkit.models.blocks import Views, of_stage
from testkit.stand_ins.timers import Timers
from testkit.thread_runs.step_runs import Rank, every_policy, in_pipeline, pipeline, result_of

DATA = ToyData(5)


class GivesItsParameter(torch.nn.Module):
    """The first stage of a model that learns its input: the output is the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = torch.nn.Parameter(DATA.microbatch(0)[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.learned


@every_policy
def test_a_parameter_that_is_an_output_keeps_its_data(policy: dict[str, Any]) -> None:
    first = GivesItsParameter()
    result = run_in_threads(2, 1, DATA, block=lambda stage: ToyBlock(stage) if stage else first, **policy)
    expected = reference_run(2, DATA, block=lambda stage: ToyBlock(stage) if stage else GivesItsParameter())
    assert result.difference(expected) == 0.0
    assert torch.equal(first.learned, DATA.microbatch(0)[0])


def forward_with_mean(data_iterator: Any, model: Any) -> Any:
    x, _ = next(data_iterator)
    return model(x), lambda output: (output.mean(), {})


@every_policy
def test_the_users_data_is_not_freed_where_a_stage_hands_it_on(policy: dict[str, Any]) -> None:
    """A first stage without layers gives the very tensor that the data iterator gave."""
    dataset = [DATA.microbatch(mb) for mb in range(DATA.num_microbatches)]

    class GivenData(ToyData):
        def iterator(self) -> Any:
            return iter(dataset)

    in_pipeline(
        *(2, forward_with_mean),
        block=lambda stage: ToyBlock(stage) if stage else torch.nn.Identity(),
        data=GivenData(DATA.num_microbatches),
        **policy,
    )
    for mb, (x, _) in enumerate(dataset):
        assert torch.equal(x, DATA.microbatch(mb)[0])


CUTS: dict[str, tuple[int, Callable[[int], ToyBlock]]] = {  # with the first stage that has gradients
    "detached": (2, of_stage(lambda stage, x, block: block(x.detach() if stage == 2 else x))),
    "not looked at, but for its shape": (
        2,
        of_stage(lambda stage, x, block: block(torch.ones_like(x) if stage == 2 else x)),
    ),
    "a constant given": (2, of_stage(lambda stage, x, block: torch.full_like(x, 0.5) if stage == 2 else block(x))),
    "the last detached": (3, of_stage(lambda stage, x, block: block(x.detach() if stage == 3 else x))),
}


@pytest.mark.parametrize("policy", [{"overlap_p2p_comm": True}, {}], ids=["overlap", "plain"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("size", "chunks", "schedule"), [(4, 1, None), (2, 2, None), (1, 4, None), (2, 2, "zb_v")])
def test_stages_before_a_stage_that_uses_no_input_get_none_or_zeros(
    size: int, chunks: int, schedule: str | None, cut: str, policy: dict[str, Any]
) -> None:
    """If the stages are on one rank, their gradients are None, as in one process. A stage on another rank waits for a
    message and gets zeros.
    """
    at, block = CUTS[cut]
    expected = reference_run(size * chunks, DATA, block=block)
    result = run_in_threads(
        *(size, chunks, DATA),
        block=block,
        prepare=split_weight_grad if schedule else None,
        pipeline_schedule=schedule,
        **policy,
    )
    assert result.losses == expected.losses
    stages = {int(name[0]) for name in expected.grads}
    assert stages == set(range(at, 4)) - ({2} if cut == "a constant given" else set())
    placement = placement_of(toy_config(pipeline_schedule=schedule), size, chunks)
    zeros = set()
    for stage in range(at - 1, -1, -1):
        if stage + 1 in zeros or placement.homes[stage][0] != placement.homes[stage + 1][0]:
            zeros.add(stage)
    assert {int(name[0]) for name in result.grads} == stages | zeros
    for name, grad in result.grads.items():
        assert torch.equal(grad, expected.grads.get(name, torch.zeros_like(grad))), name


def test_sending_zeros_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once._log.cache_clear()
    with caplog.at_level(logging.WARNING, "megatron_pp"):
        for _ in range(2):
            run_in_threads(4, 1, DATA, block=CUTS["the last detached"][1])
    assert [record.message.partition(":")[0] for record in caplog.records] == ["stage 3 does not use its input"]


# -- what cannot be given ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"x": torch.ones(3, 2, HIDDEN)}, "a dict cannot be sent between stages"),
        (None, "a NoneType cannot be sent between stages"),
        ([torch.ones(3, 2, HIDDEN), None], "a NoneType cannot be sent between stages"),
        (torch.ones(3, 2, HIDDEN, dtype=torch.float64), "a tensor of torch.float64 cannot be sent between stages"),
        (torch.ones(3, 2, HIDDEN).to_sparse(), "a Tensor of layout torch.sparse_coo cannot be sent between stages"),
        (torch.nested.as_nested_tensor([torch.ones(3, HIDDEN)] * 2), "a nested Tensor of layout torch.strided cannot"),
        (TwoTensor(*2 * [torch.ones(3, 2, HIDDEN)]), "a TwoTensor of layout torch.strided cannot be sent"),
        ([], "the output of chunk 0 for microbatch 0 is a list of 0 tensors, but the next stage expects 1"),
        (2 * [torch.ones(3, 2, HIDDEN)], "is a list of 2 tensors, but the next stage expects 1"),
        (2 * (torch.ones(3, 2, HIDDEN),), "is a tuple of 2 tensors, but the next stage expects 1"),
    ],
)
@pytest.mark.parametrize("vary", [False, True])
def test_outputs_that_cannot_be_sent_are_refused(output: Any, words: str, vary: bool) -> None:
    block = of_stage(lambda stage, x, block: block(x) if stage else output)

    def raised_by(rank: Rank) -> BaseException:
        with pytest.raises(RuntimeError) as caught:
            rank.step(rank.model(block), forward_step_func=forward_with_mean)
        return caught.value

    raised = pipeline(2, 1, 5, raised_by, timeout=20.0, guarded=True, variable_seq_lengths=vary)
    assert isinstance(raised[0], P2PTypeError | P2PShapeError)
    assert words in str(raised[0])
    assert isinstance(raised[1], PipelinePeerError)


def test_dict_outputs_of_the_last_stage_go_to_the_loss_function() -> None:
    named = of_stage(lambda stage, x, block: {"logits": block(x), "extra": 7} if stage else block(x))

    def step(data_iterator: Any, model: Any) -> Any:
        x, target = next(data_iterator)

        def loss_func(output: Any) -> Any:
            assert output["extra"] == 7
            return toy_loss(target, output["logits"])

        return model(x), loss_func

    result = result_of(*in_pipeline(2, step, block=named, data=DATA))
    assert result.difference(reference_run(2, DATA)) == 0.0


@every_policy
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("chunks", [1, 2])
def test_training_after_an_evaluation(chunks: int, mode: Any, policy: dict[str, Any]) -> None:
    """Whatever mode the user evaluates in, nothing of it stays on the communicator (views are the hard case)."""

    def losses(rank: Rank) -> tuple[list[Any], ToyResult]:
        model = rank.model(Views)
        with mode():
            before = rank.step(model, forward_only=True)
        assert all(p.grad is None for chunk in model for p in chunk.parameters())
        trained = rank.step(model)
        with mode():
            return [*before, *trained, *rank.step(model, forward_only=True)], rank.result(model, [])

    ranks = pipeline(2, chunks, 5, losses, **policy)
    expected = reference_run(2 * chunks, DATA, block=Views)
    assert [float(report["loss"]) for report in ranks[1][0]] == expected.losses * 3
    assert ToyResult(expected.losses, merged([result for _, result in ranks]).grads).difference(expected) == 0.0


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "length"),
    [(1, 1, False, 24), (2, 1, True, 12), (2, 1, False, 24), (1, 3, False, 8), (2, 3, True, 4)],
)
@pytest.mark.parametrize("from_config", [False, True])
def test_received_shapes_hold_this_ranks_share_of_the_sequence(
    tp: int, cp: int, sequence_parallel: bool, length: int, from_config: bool
) -> None:
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

MICROBATCHES = 4


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
