"""A step whose output layer is split over all ranks: the losses and gradients of the whole one, in float64 to 1e-12."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_pp import SplitOutputLayer
from megatron_pp.errors import MegatronPPError, PlanError, ScheduleInputError
from megatron_pp.features.output_layer.output_runner import rows_of_rank
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import RANKWIDE_OPS
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.testing.adversarial_transports import HOSTILE_NETWORKS
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.toy import HIDDEN, ToyBlock
from testkit.mutants.plan_mutants import mutants
from testkit.thread_runs.output_layer_runs import Case, Stage, mean_loss, step, step_on_nccl

NAMES = ("vocab_1f1b", "vocab_1f1b_alg1")


def weighted_sum(losses: torch.Tensor) -> Any:
    """A mask over tokens, as a loss function's gradient differs from token to token."""
    weight = torch.arange(losses.numel(), dtype=losses.dtype).view(losses.shape) % 3
    loss = (losses * weight).sum()
    return loss, weight.sum().int(), {"loss": float(loss.detach())}


def check(case: Case, reports: list[list[Any]], stages: list[Stage]) -> None:
    """Against the same model in one process, its output layer whole."""
    blocks, weight = [ToyBlock(stage).to(case.dtype) for stage in range(case.size)], case.weight().requires_grad_()
    losses = []
    for x, labels in case.data():
        for block in blocks:
            x = block(x)
        token_losses = F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")
        loss, *tokens, report = case.loss(token_losses.view(labels.shape))
        (loss / (tokens[0] if tokens else 1) / case.microbatches).backward()
        losses.append(report["loss"])
    assert reports[:-1] == [[]] * (case.size - 1)
    assert [report["loss"] for report in reports[-1]] == pytest.approx(losses, rel=1e-12)
    pairs = [(torch.cat([stage.output.weight.grad for stage in stages]), weight.grad)]
    for stage, block in zip(stages, blocks, strict=True):
        pairs += [(a.grad, b.grad) for a, b in zip(stage.block.parameters(), block.parameters(), strict=True)]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


STEPS: list[tuple[tuple[int, int, int], dict[str, Any], Any]] = [
    *(((size, count, vocab), {}, mean_loss) for size, count, vocab in ((1, 2, 7), (2, 1, 11), (3, 5, 4), (4, 9, 11))),
    ((3, 5, 11), {"batch_p2p_comm": True}, weighted_sum),
    ((3, 5, 11), {"variable_seq_lengths": True}, weighted_sum),
    ((3, 5, 11), {"deallocate_pipeline_outputs": False}, weighted_sum),
    *(((3, 6, 11), {"network": network}, mean_loss) for network in HOSTILE_NETWORKS),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("sizes", "fields", "loss"), STEPS)
def test_losses_and_gradients_are_those_of_the_whole_layer(
    name: str, sizes: tuple[int, int, int], fields: dict[str, Any], loss: Any
) -> None:
    """Where rows do not divide, the last rank has fewer, or none."""
    fields = dict(fields)
    case, kind = Case(name, *sizes, loss=loss), fields.pop("network", MemoryNetwork)
    check(case, *step(case, kind(case.size), **fields))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_on_nccl_collectives_run_on_a_stream_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On virtual devices, by the transport for NCCL: nothing is read before a collective has written it."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    case = Case(name, 3, 4)
    report, *results = step_on_nccl(case)
    assert not report.races, str(report)
    check(case, *results)


def test_steps_are_equal_to_the_bit_from_run_to_run() -> None:
    case = Case("vocab_1f1b", 3, 5, dtype=torch.float32)
    first, second = (step(case) for _ in range(2))
    assert first[0] == second[0]
    for one, other in zip(first[1], second[1], strict=True):
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_gives_the_losses_and_no_gradients(name: str) -> None:
    case = Case(name, 3, 4)
    reports, stages = step(case, forward_only=True)
    assert reports == step(case)[0]
    assert all(parameter.grad is None for stage in stages for parameter in stage.parameters())


def test_hooks_of_the_rows_fire_once_a_microbatch() -> None:
    """Data-parallel wrappers rely on this."""
    case, fired = Case("vocab_1f1b", 2, 3), []

    def hooked(case: Case, rank: int, split: bool) -> Stage:
        stage = Stage(case, rank, split)
        stage.output.weight.register_post_accumulate_grad_hook(lambda _: fired.append(rank))
        return stage

    step(case, block=hooked)
    assert sorted(fired) == [0] * 3 + [1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutants_that_verify_accepts_give_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On hostile networks; `features/output_layer/` counts what plans refuse."""
    case, rng = Case(name, 2, 4), random.Random(3)
    plan = build_plan(PlanSpec(name, case.size, 1, case.microbatches))
    accepted = [mutant for what, mutant in mutants(plan, rng, 4) if is_of_output_layer(what) and is_accepted(mutant)]
    assert len(accepted) >= 5
    for turn, mutant in enumerate(accepted[:12]):
        monkeypatch.setattr("megatron_pp.runtime.host.build_plan", lambda *_, mutant=mutant: mutant)
        check(case, *step(case, HOSTILE_NETWORKS[turn % 3](case.size, seed=turn), overlap_p2p_comm=True))


def is_of_output_layer(what: str) -> bool:
    return any(f" {op}0" in what for op in RANKWIDE_OPS)


def is_accepted(plan: Plan) -> bool:
    try:
        verify(plan)
    except PlanError:
        return False
    return True


def test_rows_are_padded_on_the_last_ranks() -> None:
    assert [rows_of_rank(11, rank, 4) for rank in range(4)] == [range(3), range(3, 6), range(6, 9), range(9, 11)]
    assert [len(rows_of_rank(5, rank, 4)) for rank in range(4)] == [2, 2, 1, 0]


def test_model_and_schedule_have_to_agree() -> None:
    with pytest.raises(ScheduleInputError, match=r"this rank's model has 0 megatron_pp\.SplitOutputLayer"):
        step(Case("vocab_1f1b", 2, 2), split=False)
    with pytest.raises(ScheduleInputError, match="schedule 1f1b leaves the output layer to the last stage"):
        step(Case("1f1b", 2, 2))


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), torch.int64), ((3, 2), torch.int32)])
def test_labels_of_another_shape_or_dtype_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = SplitOutputLayer(HIDDEN, 5, 0, 1)
    with pytest.raises(ScheduleInputError, match=rf"shape \[{shape[0]}, {shape[1]}\] .* {dtype}; .* \[3, 2\], and"):
        layer(torch.zeros(3, 2, HIDDEN), torch.zeros(shape, dtype=dtype))


def put(label: int, on: tuple[int, ...] = (0, 1, 2)) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """``label`` at tokens 1 and 4, on some ranks."""
    tokens = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor([1, 4]), True).view(3, 2)
    return lambda labels, rank: labels.masked_fill(tokens, label) if rank in on else labels


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("loss", [mean_loss, weighted_sum])
def test_ignored_tokens_have_neither_loss_nor_gradient(name: str, loss: Any) -> None:
    case = Case(name, 3, 4, given=put(-100), loss=loss)
    check(case, *step(case))
    assert step(case, forward_only=True)[0] == step(case)[0]


NO_ROW = r"outside of 0 to 10, and not ignore_index \(-100\): token 1 has label "
DIFFERENT = r"microbatch 0: ranks gave their SplitOutputLayer different labels.*: token [14] has label -?\d+ on rank"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (put(-1), NO_ROW + "-1"),
        (put(11), NO_ROW + "11"),
        *((put(label, on), DIFFERENT) for label in (-100, 3) for on in ((0,), (1,), (2,), (0, 1))),
    ],
)
def test_labels_that_are_no_rows_or_differ_between_ranks_are_named(name: str, given: Any, words: str) -> None:
    for forward_only in (True, False):
        with pytest.raises(ScheduleInputError, match=words):
            step(Case(name, 3, 4, given=given), forward_only=forward_only)


@pytest.mark.slow
@pytest.mark.parametrize("given", [put(-1), put(3, (0,))])
def test_a_device_stops_at_such_labels(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not read them."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    with pytest.raises(RuntimeError, match=r"outside of 0 to 10|different labels"):
        step_on_nccl(Case("vocab_1f1b", 3, 2, given=given))


def test_another_label_may_be_the_ignored_one() -> None:
    """One of the vocabulary too, as padding often is."""
    layer = SplitOutputLayer(HIDDEN, 5, 0, 1, ignore_index=0)
    layer(torch.zeros(1, 1, HIDDEN), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ScheduleInputError, match=r"not ignore_index \(0\): token 0 has label -100"):
        layer(torch.zeros(1, 1, HIDDEN), torch.full((1, 1), -100))


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_fails_ends_the_collectives_of_the_others(name: str) -> None:
    """The other ranks would otherwise wait for the failed rank forever."""

    class Failing(Stage):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 3 and isinstance(self.rank, int) and self.rank == 0:
                raise MegatronPPError("rank 0 fails")
            return super().forward(x)

    def block(case: Case, rank: int, split: bool) -> Stage:
        stage = Failing(case, rank, split)
        stage.rank = rank
        return stage

    before = threading.active_count()
    with pytest.raises(MegatronPPError, match="rank 0 fails"):
        step(Case(name, 2, 4), block=block)
    assert threading.active_count() <= before + 4
