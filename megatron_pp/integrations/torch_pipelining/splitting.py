"""Splits the backwards of torch's stages into I and W: by ``weight_grad``, as in this engine's own stages, or by a
stage's ``dw_builder``.

No autograd graph runs twice, as it does in torch's runtime. A second run would call hooks a second time and add
twice to tensors that a custom backward adds to, and checkpoints and sparse layers fail in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from megatron_pp.common.log_once import warn_once
from megatron_pp.errors import WeightGradSplitError
from megatron_pp.plan.ir.tasks import MbPart
from megatron_pp.weight_grad import (
    SplitReport,
    WeightGradStore,
    check_sharding,
    split_weight_grad,
    store_of,
    unsplit_weight_grad,
)

Builder = Callable[[], Any] | None


class Splitting:
    """Decides for one rank how its stages split their backwards under ``schedule``, and converts them once.

    A rank whose stages cannot split runs the same schedule with whole backwards."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule
        self._whole: list[nn.Module] = []  # modules that cannot split

    def store(self, modules: Sequence[nn.Module], builders: Sequence[Builder], splits: bool) -> Any:
        """The store that the engine calls around each backward and in each W; None for whole backwards. ``splits``:
        whether the schedule has W. Modules that the caller or an earlier step has converted stay converted."""
        numbers = [chunk for chunk, builder in enumerate(builders) if builder is None]
        own = [modules[chunk] for chunk in numbers]
        store = store_of(own)
        if store is None and splits and own and not _same(own, self._whole):
            store = self._convert(own)
        if len(own) == len(modules):
            return store
        if store is not None and all(store_of([module]) is store for module in modules):
            numbers = list(range(len(modules)))  # the caller has converted those with a builder too
        return StoreWithBuilders(store, builders, numbers)

    def _convert(self, modules: list[nn.Module]) -> WeightGradStore | None:
        why = _why_whole(modules)
        if not why:
            try:
                store = split_weight_grad(modules)
            except WeightGradSplitError as error:
                why = str(error)
            else:
                if store.report.split + store.report.delayed:
                    return store
                unsplit_weight_grad(modules)
                why = "none of its layers can (the page on torch's stages lists those that can)"
        self._whole = modules
        warn_once(
            f"schedule {self.schedule} splits backwards, but the stages of this rank do not, because {why}; they run "
            "the same schedule with whole backwards, and no weight gradient fills a bubble"
        )
        return None


class StoreWithBuilders:
    """Replaces a ``WeightGradStore`` if stages have torch's ``dw_builder``. The backward of such a stage leaves weight
    gradients to the function that the builder returns, which W calls. ``store``: of the other stages; None if their
    backwards are whole. ``numbers``: the chunks of ``store``, which numbers them from 0."""

    def __init__(self, store: WeightGradStore | None, builders: Sequence[Builder], numbers: Sequence[int]) -> None:
        self.builders = builders
        self._number = {chunk: number for number, chunk in enumerate(numbers)}
        self.inner = store
        self.report = SplitReport() if store is None else store.report
        self.wrappers_known = store is None or store.wrappers_known
        self._runners: dict[tuple[int, MbPart], Any] = {}

    @contextmanager
    def step(self, last: Mapping[int, MbPart]) -> Iterator[None]:
        self._runners = {}
        try:
            known = {self._number[chunk]: mb for chunk, mb in last.items() if chunk in self._number}
            with nullcontext() if self.inner is None else self.inner.step(known):
                yield
        finally:
            self._runners = {}

    def backward(self, chunk: int, mb: MbPart, split: bool = True) -> AbstractContextManager[None]:
        """The context of the backward of (chunk, mb): of an I if ``split``, else of a whole backward."""
        builder = self.builders[chunk]
        if builder is not None:
            return self._built(builder, chunk, mb, split)
        return nullcontext() if self.inner is None else self.inner.backward(self._number[chunk], mb, split)

    @contextmanager
    def _built(self, builder: Callable[[], Any], chunk: int, mb: MbPart, split: bool) -> Iterator[None]:
        yield
        runner = builder()
        if split:
            self._runners[chunk, mb] = runner
        else:
            runner()

    def run(self, chunk: int, mb: MbPart) -> None:
        """Run W of (chunk, mb)."""
        if self.builders[chunk] is not None:
            self._runners.pop((chunk, mb))()
        elif self.inner is not None:
            self.inner.run(self._number[chunk], mb)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _why_whole(modules: Sequence[nn.Module]) -> str:
    """Why these modules are not converted; empty if they may be."""
    try:
        check_sharding(modules)
    except WeightGradSplitError as error:
        return str(error)
    for module in modules:
        for name, layer in module.named_modules():
            if _is_compiled(layer):
                return (
                    f"{name or 'a stage'} ({type(layer).__name__}) is in torch.compile, whose code computes all "
                    "gradients of a layer in one step"
                )
    return ""


def _is_compiled(layer: nn.Module) -> bool:
    """Whether ``torch.compile`` made the layer, ``layer.compile()`` was called, or the layer holds a compiled function
    as its forward or as another attribute."""
    if getattr(layer, "_compiled_call_impl", None) is not None:
        return True
    held = [*vars(layer).values(), *vars(type(layer)).values()]
    return any(hasattr(value, "_torchdynamo_orig_callable") for value in held if callable(value))
