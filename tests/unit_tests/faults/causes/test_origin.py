"""Exceptions of user code, of any kind and from any place: their owner gets its own exception object, the others the
rank and the class; and what a collective raises is known by where it was raised."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_pp.errors import (
    CommunicatorClosedError,
    P2PError,
    P2PTimeoutError,
    P2PTransferError,
    PipelinePeerError,
    SendBufferError,
)
from megatron_pp.faults.attach import close_guard, watched
from megatron_pp.faults.causes.diagnosis import is_consequence, tail_of, text_of, type_name
from megatron_pp.faults.store.records import MAX_TEXT
from megatron_pp.testing.toy import ToyData, toy_forward_step
from testkit.thread_runs.step_runs import Rank, pipeline

SIZE, DATA = 2, ToyData(3)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:11186"
TEXTS_OF_TRANSPORTS = (
    GLOO,
    f"RuntimeError: {GLOO}",
    "Connection closed by peer",
    "Application timeout caused pair closure",
    "NCCL error in: x.cpp:1, unhandled system error",
    "Broken pipe",
    "Timed out waiting 1800000ms for recv operation to complete",
)


def hostile(attribute: str, behaviour: Callable[[Any], Any], as_property: bool = False) -> type[Exception]:
    """A class of exceptions with an ``attribute`` that fails, or lies."""
    return type("HostileError", (Exception,), {attribute: property(behaviour) if as_property else behaviour})


def raises(kind: type[BaseException]) -> Callable[[Any], Any]:
    def fail(self: Any) -> Any:
        raise kind("no answer")

    return fail


HostileStrError = hostile("__str__", raises(ValueError))
HostileReprError = hostile("__repr__", raises(ValueError))


class OddText(str):
    def splitlines(self, keepends: bool = False) -> Any:
        raise ValueError("no lines")

    __format__ = partition = __len__ = splitlines  # type: ignore[assignment]


class TwoArgumentsError(Exception):
    def __init__(self, one: int, *, other: Any) -> None:
        self.other = other


class OwnBaseError(BaseException):
    pass


class DistBackendError(RuntimeError):
    """An error class of the user with the name of one of torch's."""


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "str raises": HostileStrError,
    "str raises SystemExit": hostile("__str__", raises(SystemExit)),
    "repr raises": lambda: HostileReprError(HostileReprError()),
    "str returns a number": hostile("__str__", lambda self: 7),
    "class raises": hostile("__class__", raises(ValueError), as_property=True),
    "class lies": hostile("__class__", lambda self: P2PTimeoutError, as_property=True),
    "notes raise": hostile("__notes__", raises(ValueError), as_property=True),
    "text of an odd class": hostile("__str__", lambda self: OddText("odd")),
    "no module": type("NamelessError", (Exception,), {"__module__": None}),
    "arguments that do not pickle": lambda: TwoArgumentsError(1, other=lambda: None),
    "long text": lambda: ValueError("x\n" * 50_000),
    "lone surrogate, zero and ends of lines": lambda: ValueError("\ud800\0\x0c\u2028\n"),
    "empty text": RuntimeError,
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(HostileStrError()),
    "generator's end": GeneratorExit,
    "base": lambda: OwnBaseError("own"),
    "name of torch's": lambda: DistBackendError("NCCL error"),
    "torch's own": lambda: dist.DistNetworkError("Connection reset by peer"),
    "of this package": lambda: P2PError("by the user"),
    "watch on memory": lambda: SendBufferError("freed"),
    **{f"text {text[:25]}": lambda text=text: RuntimeError(text) for text in TEXTS_OF_TRANSPORTS},  # type: ignore[misc]
}
if sys.version_info >= (3, 11):
    EXCEPTIONS["group"] = lambda: BaseExceptionGroup("several", [HostileStrError(), OwnBaseError("own")])  # noqa: F821 (3.11)
PLACES = ("data", "forward", "loss", "backward hook", "grad sync", "finalize", "optimizer")


class Bomb:
    """Raises ``error`` at ``place``, once that has been reached for the second time."""

    def __init__(self, place: str, error: BaseException | None) -> None:
        self.place = place
        self.error = error
        self.left = 2

    def at(self, place: str, *_: Any) -> None:
        if self.error is not None and place == self.place:
            self.left -= 1
            if self.left == 0:
                raise self.error

    def forward_step(self, iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[[Any], Any]]:
        self.at("forward")
        output, loss = toy_forward_step(iterator, model)
        output.register_hook(lambda grad: self.at("backward hook"))

        def loss_func(output: torch.Tensor) -> Any:
            self.at("loss")
            return loss(output)

        return output, loss_func

    def data(self) -> Iterator[Any]:
        for item in DATA.iterator():
            self.at("data")
            yield item


def outcome(place: str, error: BaseException) -> list[BaseException | None]:
    """Two steps on two ranks; the last rank raises ``error``."""

    def train(rank: Rank) -> BaseException | None:
        bomb = Bomb(place, error if rank.rank == SIZE - 1 else None)
        rank.config.grad_sync_func = lambda *_: bomb.at("grad sync")
        rank.config.finalize_model_grads_func = lambda *_, **__: bomb.at("finalize")
        stages = rank.model()
        try:
            for _ in range(3):
                rank.step(stages, forward_step_func=bomb.forward_step, iterators=[bomb.data()])
                with watched(rank.communicator, rank.config, "the optimizer's step"):
                    bomb.at("optimizer")
        except BaseException as raised:
            return raised
        finally:
            close_guard(rank.communicator)
        return None

    return pipeline(SIZE, 1, DATA.num_microbatches, train, guarded=True, timeout=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(sorted(EXCEPTIONS)))
def test_any_exception_from_any_place(place: str, kind: str) -> None:
    error = EXCEPTIONS[kind]()
    raised = outcome(place, error)
    assert raised[SIZE - 1] is error
    reported = raised[0]
    assert type(reported) is PipelinePeerError
    assert reported.rank == SIZE - 1
    assert reported.exception_type.rpartition(".")[2] == type(error).__name__
    assert len(str(reported)) < 3 * MAX_TEXT


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_any_exception_is_put_into_words(kind: str) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (any)
        raise EXCEPTIONS[kind]()
    error = caught.value
    assert not is_consequence(error)
    for text in (type_name(error), text_of(error), tail_of(error)):
        assert type(text) is str
        assert len(text) <= MAX_TEXT + 10


@pytest.mark.parametrize("text", TEXTS_OF_TRANSPORTS)
def test_an_error_text_is_classified_by_the_code_that_raised_it(text: str) -> None:
    """torch's C++ code raises what gloo raised, as a RuntimeError; a model may raise one of the same text."""
    with pytest.raises(RuntimeError) as of_torch:
        torch._assert_async(torch.tensor(False), text)
    with pytest.raises(RuntimeError) as of_user:
        raise RuntimeError(text)
    assert is_consequence(of_torch.value) == ("gloo/" in text or text.startswith("Application timeout"))
    assert not is_consequence(of_user.value)
    with pytest.raises(RuntimeError) as again:  # passed on, and not a failure of the user's own
        raise of_torch.value
    assert is_consequence(again.value) == is_consequence(of_torch.value)


def test_failures_of_the_transport_are_consequences() -> None:
    for kind in (P2PTransferError, P2PTimeoutError):
        assert is_consequence(kind("the cable"))


def test_an_exception_before_the_first_instruction_is_reported_before_it() -> None:
    """Not in RECV_F0.0, which the rank has not come to."""

    def train(rank: Rank) -> BaseException | None:
        if rank.rank == SIZE - 1:
            rank.config.no_sync_func = refuse
        try:
            rank.step(rank.model())
        except Exception as raised:
            return raised
        finally:
            close_guard(rank.communicator)
        return None

    def refuse() -> Any:
        raise ValueError("no such thing")

    raised = pipeline(SIZE, 1, DATA.num_microbatches, train, guarded=True, timeout=30.0)
    error = raised[0]
    assert isinstance(error, PipelinePeerError)
    assert error.instruction == ""
    assert "raised ValueError in the beginning of the step, before its first instruction" in str(error)


@pytest.mark.slow
def test_closing_a_communicator_within_its_step_raises_a_described_error() -> None:
    def train(rank: Rank) -> BaseException | None:
        def closing(iterator: Iterator[Any], model: Any) -> Any:
            close_guard(rank.communicator)
            raise P2PTransferError("the cable")

        try:
            rank.step(rank.model(), **({"forward_step_func": closing} if rank.rank else {}))
        except Exception as raised:
            return raised
        finally:
            rank.communicator.transport.abort()
        return None

    raised = pipeline(2, 1, DATA.num_microbatches, train, guarded=True, timeout=60.0)
    assert isinstance(raised[1], CommunicatorClosedError)
    assert "was closed within its step" in str(raised[1])


def test_an_iterator_of_the_models_own_that_ends_is_placed() -> None:
    def train(rank: Rank) -> BaseException | None:
        def ends(iterator: Iterator[Any], model: Any) -> Any:
            return next(iter(()))

        try:
            rank.step(rank.model(), forward_step_func=ends)
        except Exception as raised:
            return raised
        return None

    (first, *_) = pipeline(1, 1, DATA.num_microbatches, train)
    assert f"StopIteration was raised in ends, {__file__}" in str(first)
