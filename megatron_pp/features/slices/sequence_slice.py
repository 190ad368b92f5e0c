"""The slice of a sequence that a model gets, and the keys and values that its attention keeps from slice to slice.

With ``config.sequence_slices`` the engine calls ``forward_step_func`` once for each slice of a microbatch.
``sequence_slice()`` returns the current slice. A layer that looks back, as causal attention does, gives its keys and
values to ``SequenceSlice.extend`` and gets those of all slices so far. Their gradients come back through it. Backwards
run from the last slice to the first, so the gradients of all later slices are there when a slice's backward runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.slices.key_values import key_values_change
from megatron_pp.features.slices.lengths import cut
from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.compute import Shapes
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from megatron_pp.runtime.engine.model_steps import ModelSteps
from megatron_pp.runtime.step_hooks import FeatureRun, StepHooks


class _Grown:
    """One tensor of a whole sequence, which slices fill one after the other, and the gradients from later slices."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.grads: Tensor | None = None
        self.filled = 0  # tokens

    def append(self, new: Tensor, part: SequenceSlice, dim: int) -> Tensor:
        """Put ``new`` into its place. Returns all tokens up to its end."""
        if self.whole is None:
            shape = list(new.shape)
            shape[dim] = part.length
            self.whole = new.new_empty(shape)
        part.of(self.whole, dim).copy_(new)
        self.filled = max(self.filled, part.stop)
        # .data, which bumps no version: earlier slices saved the returned tensor, and appending does not change it.
        return self.whole.narrow(dim, 0, part.stop).data

    def collect(self, grad: Tensor, part: SequenceSlice, dim: int) -> Tensor:
        """The gradient of the part's own tokens, with those from later slices. The rest of ``grad`` is kept for earlier
        slices."""
        mine = part.of(grad, dim)
        before = grad.narrow(dim, 0, part.start)
        if self.grads is None:
            self.grads = before.clone()
            return mine
        mine = mine + part.of(self.grads, dim)
        self.grads.narrow(dim, 0, part.start).add_(before)
        return mine


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, grown: _Grown, part: SequenceSlice, dim: int) -> Tensor:
        ctx.of = grown, part, dim
        return grown.append(new, part, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grown, part, dim = ctx.of
        return grown.collect(grad, part, dim), None, None, None


@dataclass(eq=False)
class SequenceSlice:
    """The slice that is being computed.

    index, count  its number, from 0, and the number of slices
    start, stop   its tokens, in the sequence of a whole microbatch, which has ``length`` tokens
    microbatch    its microbatch in the step, from 0"""

    index: int
    count: int
    start: int
    stop: int
    length: int
    microbatch: int
    _kept: dict[Hashable, _Grown] = field(default_factory=dict, repr=False)

    @property
    def share(self) -> float:
        """The slice's share of the sequence's tokens."""
        return (self.stop - self.start) / self.length

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """The slice's part of a tensor of the whole sequence, which is dimension ``dim``; a view."""
        return tensor.narrow(dim, self.start, self.stop - self.start)

    def extend(self, owner: Hashable, *tensors: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Append each of ``tensors`` to those that ``owner`` gave for the slices before, along dimension ``dim``.

        ``owner`` is the caller, such as an attention layer. Tensors are distinguished by their place. Each has the
        slice's tokens in ``dim``; the returned tensors have all tokens up to ``stop``. They share memory from slice to
        slice, so they must not be written to. Gradients flow to the slices that gave the parts. The tensors must be
        used in the slice's own output, as attention uses the keys and values of its own tokens.

        Raises ScheduleInputError if an owner gives a slice twice, leaves one out, or changes the shape."""
        extended = []
        for place, tensor in enumerate(tensors):
            if tensor.shape[dim] != self.stop - self.start:
                raise ScheduleInputError(
                    f"a tensor of shape {list(tensor.shape)} has {tensor.shape[dim]} tokens in dimension {dim}; slice "
                    f"{self.index} has {self.stop - self.start}"
                )
            grown = self._kept.setdefault((owner, place), _Grown())
            if grown.filled != self.start and not _in_backward():  # in a backward, recomputation gives the same again
                raise ScheduleInputError(
                    f"an owner of type {type(owner).__name__} has given {grown.filled} tokens of tensor {place}, and "
                    f"gives slice {self.index}, tokens {self.start} to {self.stop}: an owner gives every slice once, "
                    "in turn; a layer that a stage uses several times needs an owner for each use, as in (self, use)"
                )
            if grown.whole is not None and self.of(grown.whole, dim).shape != tensor.shape:  # copies would broadcast
                raise ScheduleInputError(
                    f"a tensor of shape {list(tensor.shape)} follows those of slices before; the whole has "
                    f"shape {list(grown.whole.shape)}: they may differ only in dimension {dim}"
                )
            extended.append(_Extended.apply(tensor, grown, self, dim % tensor.dim()))
        return tuple(extended)


_CURRENT = threading.local()  # a thread runs a rank; torch.compile traces it
_RUNNING: dict[int, SequenceSlice] = {}  # thread -> the slice that its rank computes


def _in_backward() -> bool:
    """Whether autograd runs in this thread. It may be another one than the caller's: each CUDA device has its own."""
    return torch._C._current_graph_task_id() != -1


def sequence_slice() -> SequenceSlice | None:
    """The slice that the rank is computing, in a forward or backward of a plan with slices; else None. Recomputed
    layers call it in a thread of autograd, which computes for the one rank of the process. There it raises
    ScheduleInputError if several ranks are threads of the process."""
    part: SequenceSlice | None = getattr(_CURRENT, "part", None)
    if part is not None or not _RUNNING or not _in_backward():
        return part
    running = list(_RUNNING.values())
    if len(running) > 1:
        raise ScheduleInputError(
            f"sequence_slice() was called in a thread of autograd, where it is not known which of {len(running)} ranks "
            "of this process calls it: run each rank in a process of its own, or give layers the slice of their forward"
        )
    return running[0] if running else None


@contextmanager
def _computing(part: SequenceSlice) -> Iterator[None]:
    """A context in which this thread's rank computes ``part``. Within it the other half of a pair may compute another
    slice."""
    thread = threading.get_ident()
    before = getattr(_CURRENT, "part", None)
    _CURRENT.part = _RUNNING[thread] = part
    try:
        yield
    finally:
        _CURRENT.part = before
        if before is None:
            del _RUNNING[thread]
        else:
            _RUNNING[thread] = before


@dataclass(eq=False)
class SliceRunner:
    """Runs each forward and backward of a rank with its slice set.

    lengths  of the slices, in tokens
    kept     keys and values, by stage and microbatch, from the forward of the first slice until the last operation that
             reads them"""

    plan: Plan
    lengths: Sequence[int]
    kept: dict[tuple[int, int], dict[Hashable, _Grown]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.tables = {"keys and values": self.kept}
        self.bounds = list(pairwise(accumulate(self.lengths, initial=0)))
        self.length = sum(self.lengths)

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        """Make forwards and backwards run with the slice that their instruction names."""
        for op in (FORWARD, *BACKWARD_OPS):
            handlers[op] = partial(self.run, handlers[op])

    def shared(self, at: Task) -> list[Tensor]:
        """The keys and values that are kept for the microbatch of ``at``."""
        return [grown.whole for grown in self.kept[(at.stage, at.mb)].values() if grown.whole is not None]

    def run(self, handler: Callable[[Task], None], at: Task) -> None:
        """``handler`` of ``at``, with ``sequence_slice()`` set."""
        count = len(self.lengths)
        cell = (at.stage, at.mb)
        change = key_values_change(at.op, at.part, count, self.plan.spec.forward_only)
        if change > 0:
            self.kept[cell] = {}
        start, stop = self.bounds[at.part]
        with _computing(SequenceSlice(at.part, count, start, stop, self.length, at.mb, self.kept[cell])):
            handler(at)
        if change < 0:
            del self.kept[cell]


def current_slice() -> SequenceSlice:
    part = sequence_slice()
    assert part is not None, "a plan with slices runs each operation in one"
    return part


class _EachSlice:
    """An iterator that gives the items of a microbatch again to each of its slices."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items
        self.drawn: list[Any] = []
        self.slice = -1
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        part = current_slice()
        if part.index != self.slice:
            self.slice = part.index
            self.next = 0
            if part.index == 0:
                self.drawn = []
        if self.next == len(self.drawn):
            self.drawn.append(next(self.items))
        self.next += 1
        return self.drawn[self.next - 1]


class _DividedLater(torch.autograd.Function):
    """A sum over a slice's tokens, whose gradient is divided by the tokens of the whole microbatch: they are known when
    the first backward of the last stage runs, after all forwards of its slices."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, tokens: list[Any]) -> Tensor:
        ctx.tokens = tokens
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = sum(ctx.tokens)
        return grad / (total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)), None


class _Step(StepHooks):
    def why_not_in_megatron(self, settings: StepSettings) -> str:
        return (
            f"config.sequence_slices is {settings.sequence_slices}, and Megatron's layers run sequences whole: "
            "their attention keeps no keys and values from slice to slice, and positions, masks and losses are of "
            "whole sequences; leave it out, or train a model that calls megatron_pp.sequence_slice() without "
            "install()"
        )

    def cut(
        self, inputs: StepInputs, settings: StepSettings, tp_size: int, cp_size: int, shapes: Shapes
    ) -> tuple[tuple[int, ...], tuple[Shapes, ...]]:
        return cut(inputs, settings, tp_size, cp_size, shapes)

    def steps(self) -> type[ModelSteps]:
        return SlicedSteps

    def runner(self, run: FeatureRun) -> SliceRunner | None:
        return SliceRunner(run.plan, run.lengths) if run.lengths else None


STEP = _Step()


class SlicedSteps(ModelSteps):
    """``ModelSteps`` of a plan with slices. Of each slice the loss function gets the output and reports; a mean counts
    by the slice's share of the tokens, a sum and its tokens as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data_iterators = [
            _EachSlice(items) if hasattr(items, "__next__") else items for items in self.data_iterators
        ]
        self._mark_first = [None if mark is None else partial(_in_first_slice, mark) for mark in self._mark_first]
        self._tokens: list[Any] = []  # of each slice so far of the microbatch that the last stage runs forward

    def _call(self, chunk: int, mb: int) -> tuple[Any, Any]:
        output, loss_func = super()._call(chunk, mb)
        return output, None if loss_func is None else partial(self._loss, loss_func)

    def _loss(self, loss_func: Callable[..., Any], output: Any, **options: Any) -> Any:
        returned = loss_func(output, **options)
        part = current_slice()
        if options or not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
            return returned  # no loss, or refused by the caller
        if len(returned) == 2:
            return returned[0] * part.share, returned[1]
        if self.settings.calculate_per_token_loss:
            return returned
        loss, tokens, report = returned
        self.record.num_tokens += tokens
        self._tokens = [] if part.index == 0 else self._tokens
        self._tokens.append(tokens)
        return _DividedLater.apply(loss, self._tokens), report


def _in_first_slice(mark: Callable[[], Any]) -> None:
    if current_slice().index == 0:
        mark()
