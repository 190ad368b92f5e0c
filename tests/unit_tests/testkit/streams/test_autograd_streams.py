"""On which streams a virtual device runs the nodes of autograd, and what they wait for: torch's rules, and for each a
fault that it alone shows: without it the fault is missed, whichever other rules there are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pp.features.pairs import pair_runner
from megatron_pp.features.pairs.pair_runner import on_two_streams
from megatron_pp.testing.toy import ToyData
from megatron_pp.weight_grad import split_weight_grad
from testkit.device_runs.stream_runs import POLICIES, on_one_device, toy_step_on_streams
from testkit.mutants.older_rules import FORWARD, LEAF, PRODUCERS, without
from testkit.mutants.stream_mutants import (
    InnerGradBlock,
    LooksOnTheStreamOfTheCaller,
    MainGradBlock,
    ReadsOnTheStreamOfTheForward,
    ReadsWhatABackwardLeft,
    TwoBranchBlock,
    UsesWhatTheOtherBranchLeft,
    forwards_on_the_side,
)
from testkit.streams import StreamReport


def shown_by(rule: str, *others: str) -> pytest.MarkDecorator:
    """With all rules, without ``rule``, without each of ``others``, and without all of them."""
    cases = {(): True, (rule,): False, **{(one,): True for one in others}, others: True}
    names = [f"without {' and '.join(missing)}" if missing else "all rules" for missing in cases]
    return pytest.mark.parametrize(("missing", "shown"), cases.items(), ids=names)


def kinds(report: StreamReport) -> list[str]:
    return [race.kind for race in report.races]


def streams() -> tuple[Any, Any]:
    """The default stream and another one."""
    return torch.cuda.current_stream(), torch.cuda.Stream()


class Noted(torch.autograd.Function):
    """The identity; its backward appends the current stream to ``seen`` and calls ``then``, if any."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any], then: Any = None) -> torch.Tensor:
        ctx.of = seen, then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        seen, then = ctx.of
        seen.append(torch.cuda.current_stream())
        return grad if then is None else then(grad), None, None


def test_a_node_of_a_function_belongs_to_the_stream_of_its_call() -> None:
    """Whoever uses its result, and wherever."""

    def program() -> list[bool]:
        (current, side), seen = streams(), []
        x = torch.ones(4, requires_grad=True)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = Noted.apply(x, seen)
        current.wait_stream(side)
        Noted.apply(y, seen).sum().backward()
        return [seen[0] == current, seen[1] == side]

    report = on_one_device(program)
    assert not report.races, str(report)
    assert report.results == [[True, True]]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_parameters_gradient_is_added_where_the_first_graph_that_holds_it_was_made(is_kept: bool) -> None:
    def program() -> bool:
        (current, side), seen = streams(), []
        weight = torch.ones(4, requires_grad=True)
        weight.register_post_accumulate_grad_hook(lambda weight: seen.append(torch.cuda.current_stream()))
        side.wait_stream(current)
        with torch.cuda.stream(side):
            first = weight * 2
        current.wait_stream(side)
        if not is_kept:
            del first
        (weight * 3).sum().backward()
        return seen == [side if is_kept else current]

    assert on_one_device(program).results == [True]


@shown_by(LEAF, PRODUCERS, FORWARD)
def test_a_gradient_is_added_where_ddp_made_its_accumulator(missing: tuple[str, ...], shown: bool) -> None:
    """Megatron's DistributedDataParallel keeps the AccumulateGrad node of each parameter, with a hook that begins the
    reduction."""

    def program() -> bool:
        (current, side), seen = streams(), []
        weight = torch.ones(4, requires_grad=True)
        with torch.cuda.stream(side):
            accumulator: Any = weight.expand_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *unused: seen.append(torch.cuda.current_stream()))
        for _ in range(2):  # it lasts for more than one graph
            (weight * 3).sum().backward()
        return seen == [side if shown else current] * 2

    with without(*missing):
        assert on_one_device(program).results == [True]


@shown_by(PRODUCERS, LEAF)
def test_a_node_waits_for_its_producers_only(missing: tuple[str, ...], shown: bool) -> None:
    """One branch leaves what the other reads, a little later, on another stream."""

    def program() -> None:
        (current, side), left = streams(), []
        x, y = (torch.ones(4, requires_grad=True) for _ in range(2))
        side.wait_stream(current)
        with torch.cuda.stream(side):
            reads = Noted.apply(y, [], lambda grad: grad + left[0])
        current.wait_stream(side)
        leaves = Noted.apply(x, [], lambda grad: (left.append(grad * 2), grad)[1])
        (reads + leaves).sum().backward()

    with without(*missing):
        report = on_one_device(program)
    assert kinds(report) == ["write/read"] * shown, str(report)


def test_gradients_are_added_up_on_the_stream_of_who_takes_them() -> None:
    """Three branches on two streams; what they are made of on one, which waits for each, and then nothing races."""

    def program() -> float:
        current, side = streams()
        x = torch.ones(4, requires_grad=True)
        shared = x * 2
        side.wait_stream(current)
        with torch.cuda.stream(side):
            there = shared * 3 + shared.exp()
        here = shared * 5
        current.wait_stream(side)
        (there + here).sum().backward()
        assert x.grad is not None
        return float(x.grad.sum())

    report = on_one_device(program)
    assert not report.races, str(report)
    assert report.results == [pytest.approx(8 * (8 + float(torch.tensor(2.0).exp())))]


@shown_by(PRODUCERS)
@pytest.mark.parametrize("gives", [True, False])
def test_the_caller_waits_for_leaves_only(gives: bool, missing: tuple[str, ...], shown: bool) -> None:
    """A node leaves something on its stream. Where it gives a gradient, too, the leaf has waited for it."""

    def program() -> torch.Tensor:
        (current, side), left = streams(), []
        weight = torch.ones(4, requires_grad=True)
        first = weight * 1.0  # its graph has the leaf on this stream
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = Noted.apply(weight, [], lambda grad: left.append(grad * 2) or (grad if gives else None))
        current.wait_stream(side)
        (y * 1.0).sum().backward()
        del first
        return left[0] + 1

    with without(*missing):
        report = on_one_device(program)
    assert kinds(report) == ["write/read"] * (shown and not gives), str(report)


def test_requested_gradients_are_returned() -> None:
    def program() -> torch.Tensor:
        current, side = streams()
        x = torch.ones(4, requires_grad=True)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = x * 2
            z = y.tanh()
        current.wait_stream(side)
        (of_y,) = torch.autograd.grad(z.sum(), (y,))
        return of_y + 1

    report = on_one_device(program)
    assert not report.races, str(report)


def test_the_engine_is_called_by_keywords_too() -> None:
    """Megatron's ``custom_backward`` calls it so."""

    def program() -> float:
        x = torch.ones(4, requires_grad=True)
        torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
            tensors=((x * 2).sum(),),
            grad_tensors=(torch.ones(()),),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        assert x.grad is not None
        return float(x.grad.sum())

    assert on_one_device(program).results == [8.0]


def test_callbacks_run_on_the_callers_stream_when_its_leaves_are_done() -> None:
    def program() -> bool:
        (current, side), seen = streams(), []
        x = torch.ones(4, requires_grad=True)
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

        def after() -> None:
            seen.append(torch.cuda.current_stream())
            x.grad.add_(1)  # type: ignore[union-attr]

        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = Noted.apply(x, [], lambda grad: engine.queue_callback(after) or grad * 2)
        current.wait_stream(side)
        (y + 1).sum().backward()
        return seen == [current]

    report = on_one_device(program)
    assert not report.races, str(report)
    assert report.results == [True]


# -- faults of an engine, and of a hook --------------------------------------------------------------------------------

PAIRS: dict[str, Any] = {"overlapped_forward_backward": on_two_streams, **POLICIES["overlap"]}


def found(schedule: str, **more: Any) -> set[str]:
    """Kinds of races."""
    return set(kinds(toy_step_on_streams(schedule, 2, ToyData(8), **{**PAIRS, **more})[0]))


@shown_by(FORWARD, LEAF, PRODUCERS)
def test_a_hook_finds_the_stream_of_the_forward(
    missing: tuple[str, ...], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All backwards are called on one stream, and half of the forwards ran on another one."""
    pairs = {"overlapped_forward_backward": forwards_on_the_side}
    monkeypatch.setattr(pair_runner, "PairRunner", ReadsWhatABackwardLeft)
    with without(*missing):
        assert found("combined_1f1b", block=InnerGradBlock, **pairs) == set()
        faulty = found("combined_1f1b", block=LooksOnTheStreamOfTheCaller, **pairs)
    assert faulty == ({"write/read"} if shown else set())


@shown_by(PRODUCERS, LEAF)
def test_a_branch_waits_for_what_another_one_has_left(missing: tuple[str, ...], shown: bool) -> None:
    alone: dict[str, Any] = {"overlapped_forward_backward": None}
    with without(*missing):
        assert found("interleaved_1f1b", block=TwoBranchBlock, **alone) == set()
        faulty = found("interleaved_1f1b", block=UsesWhatTheOtherBranchLeft, **alone)
    assert faulty == ({"write/read"} if shown else set())


@shown_by(PRODUCERS)
@pytest.mark.parametrize("schedule", ["combined_1f1b", "dualpipe_v"])
def test_weight_gradients_wait_for_the_stream_of_a_backward(
    schedule: str, missing: tuple[str, ...], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller would wait for leaves on that stream; they are on another one."""
    with without(*missing):
        sound, difference = toy_step_on_streams(schedule, 2, ToyData(8), prepare=split_weight_grad, **PAIRS)
        monkeypatch.setattr(pair_runner, "PairRunner", ReadsWhatABackwardLeft)
        faulty = found(schedule, prepare=split_weight_grad)
    assert not sound.races, str(sound)
    assert difference == 0.0
    assert faulty == ({"write/read"} if shown else set())


@shown_by(LEAF, FORWARD, PRODUCERS)
def test_a_hook_of_a_parameter_finds_the_stream_of_accumulate_grad(missing: tuple[str, ...], shown: bool) -> None:
    with without(*missing):
        assert found("combined_1f1b", block=MainGradBlock) == set()
        faulty = found("combined_1f1b", block=ReadsOnTheStreamOfTheForward)
    assert faulty == ({"write/read"} if shown else set())
