"""Runs any plan, mutated or not, with any engine over any network, on a model whose arithmetic is exact.

Numbers are small integers in float64, and counts are powers of two, so no sum depends on its order. So a plan that only
reorders additions gives equal bits, and any difference is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.config.settings import StepSettings
from megatron_pp.features.skip_tensors.routes import SkipTensor
from megatron_pp.plan.ir.spec import EXPLICIT, ONE_WAY, Plan, PlanSpec
from megatron_pp.plan.lower.syncs import last_reentry, prepares_in_forward
from megatron_pp.runtime.engine.compute import Shapes
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.engine.gradient_hooks import SyncHooks
from megatron_pp.runtime.engine.model_steps import ModelSteps, StepOptions
from megatron_pp.runtime.engine.split_backwards import SplitBackwards
from megatron_pp.runtime.own_host import kind_of_steps
from megatron_pp.runtime.step_features import hooks_of
from megatron_pp.runtime.step_hooks import runners
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import (
    HIDDEN,
    ToyData,
    ToyResult,
    current_slice,
    gradients_of,
    merged,
    toy_chunks,
    toy_config,
    toy_forward_step,
)


class DeferredWeights:
    """Weight gradients that W computes, for ``ExactBlock``: the interface of the engine's ``weights``."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.collecting: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def step(self, last: dict[int, int]) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def backward(self, chunk: int, mb: int, split: bool = True) -> Iterator[None]:
        self.collecting = self.queues.setdefault((chunk, mb), []) if split else None
        try:
            yield
        finally:
            self.collecting = None

    def run(self, chunk: int, mb: int) -> None:
        for parameter, grad in self.queues.pop((chunk, mb)):
            parameter.backward(grad)


class _ExactStage(torch.autograd.Function):
    """y = (x with neighbours exchanged) * sign + shift. Its weight gradients can be deferred."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sign: torch.Tensor, shift: torch.Tensor, block: Any) -> torch.Tensor:
        rolled = x.roll(1, -1)
        ctx.save_for_backward(rolled, sign)
        ctx.block = block
        return rolled * sign + shift

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        rolled, sign = ctx.saved_tensors
        block = ctx.block
        for_input = (grad * sign).roll(-1, -1)
        for_sign, for_shift = (rolled * grad).sum((0, 1)), grad.sum((0, 1))
        later = None if block.weights is None else block.weights.collecting
        if later is None:
            return for_input, for_sign, for_shift, None
        later += [(block.sign, for_sign), (block.shift, for_shift)]
        return for_input, None, None, None


class ExactBlock(torch.nn.Module):
    """One stage: neighbouring features are exchanged, signs are flipped, and an integer is added."""

    weights: DeferredWeights | None = None

    def __init__(self, stage: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        signs = torch.randint(0, 2, (HIDDEN,), generator=generator) * 2 - 1
        self.sign = torch.nn.Parameter(signs.double())
        self.shift = torch.nn.Parameter(torch.randint(-3, 4, (HIDDEN,), generator=generator).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ExactStage.apply(x, self.sign, self.shift, self)


class ExactCausalBlock(ExactBlock):
    """``ExactBlock`` on sums of all tokens so far. A slice passes its sums to the next one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (part := current_slice()) is None:
            return super().forward(x.cumsum(0))
        (seen,) = part.extend(self, x, dim=0)
        return super().forward(seen.cumsum(0)[part.start :])


class ExactSkipBlock(ExactBlock):
    """``ExactBlock`` on the input and the named tensors that the stage uses. The named tensors that it makes are whole
    numbers too."""

    def __init__(self, stage: int, tensors: tuple[SkipTensor, ...]) -> None:
        super().__init__(stage)
        self.uses = [one.name for one in tensors if stage in one.users]
        self.makes = [one for one in tensors if one.source == stage]

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        assert list(named) == self.uses
        for count, tensor in enumerate(named.values(), 1):
            x = x + tensor * count
        output = super().forward(x)
        made = {one.name: (output - x if one.gradient else x.detach() + 1) for one in self.makes}
        return (output, made) if made else output


def exact_block(spec: PlanSpec) -> Callable[[int], ExactBlock]:
    if spec.skip_tensors:
        return partial(ExactSkipBlock, tensors=spec.skip_tensors)
    return ExactBlock if spec.num_parts == 1 else ExactCausalBlock


class ExactData(ToyData):
    """Small whole numbers in float64. Use a number of microbatches that is a power of two."""

    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(7 + mb)
        length = self.seq_length + (self.seq_length * (mb % 2) if self.variable else 0)
        shape = (length, self.micro_batch_size, self.hidden)
        x, target = (torch.randint(-64, 65, shape, generator=generator).double() for _ in range(2))
        return x, target


def exact_data(num_microbatches: int, variable: bool = False) -> ExactData:
    return ExactData(num_microbatches, seq_length=2, micro_batch_size=1, variable=variable)


@dataclass
class PlanRun:
    """The result of a run. ``complaints``: faults other than wrong numbers."""

    result: ToyResult
    complaints: list[str] = field(default_factory=list)


def run_plan(
    plan: Plan,
    data: ToyData,
    network: MemoryNetwork,
    *,
    executor: Callable[..., PlanExecutor] = PlanExecutor,
    core: Callable[..., P2PCore] = P2PCore,
    block: Callable[[int], torch.nn.Module] | None = None,
    timeout: float = 60.0,
    **fields: Any,
) -> PlanRun:
    """Run one step of ``plan`` with a thread per rank. Raises the error of a rank."""
    spec = plan.spec
    fields = {"pipeline_dtype": data.microbatch(0)[0].dtype, "variable_seq_lengths": spec.variable_shapes, **fields}

    def rank_main(rank: int) -> PlanRun:
        run = _RankRun(plan, rank, data, block or exact_block(spec), fields)
        with network.running(rank):
            run.execute(executor, core(network.transport(rank), run.config))
        return run.outcome()

    runs = run_ranks(spec.pipeline_size, rank_main, network.abort, timeout)
    return PlanRun(merged([run.result for run in runs]), [text for run in runs for text in run.complaints])


class _RankRun:
    """One rank of ``run_plan``: a model, hooks that check the data-parallel synchronisation, and an executor."""

    def __init__(
        self, plan: Plan, rank: int, data: ToyData, block: Callable[[int], torch.nn.Module], fields: dict[str, Any]
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.data = data
        self.config = toy_config(**fields)
        self.chunks = toy_chunks(plan.placement, rank, self.config, block)
        self.watch = SyncWatch(plan, rank, self.chunks, self.config)
        self.reports: list[Any] = []
        self.left: list[str] = []

    def execute(self, executor: Callable[..., PlanExecutor], core: P2PCore) -> None:
        placement = self.plan.placement
        data = self.data
        options = StepOptions(
            num_microbatches=data.num_microbatches,
            is_last_stage=[placement.is_last_stage(self.rank, c) for c in range(placement.num_chunks)],
            forward_only=self.plan.spec.forward_only,
        )
        iterators = [data.iterator() for _ in self.chunks]
        slices = self.plan.spec.num_parts
        kind = ModelSteps if slices == 1 else kind_of_steps(self.plan)
        settings = StepSettings.from_config(self.config)
        steps = kind(toy_forward_step, iterators, self.chunks, settings, options)
        shape = None if data.variable else (data.seq_length // slices, data.micro_batch_size, data.hidden)
        weights = DeferredWeights()
        shapes = [Shapes(shape, shape)] * slices
        lengths = (data.seq_length // slices,) * slices if slices > 1 else ()
        for chunk in self.chunks:
            chunk.inner.weights = weights
        self.watch.weights = weights
        given = not prepares_in_forward(self.plan, self.rank), last_reentry(self.plan, self.rank)
        hooks = SyncHooks(settings, self.chunks, *given)
        others = runners(
            self.plan,
            hooks_of(self.plan),
            communicator=core,
            chunks=self.chunks,
            steps=steps,
            shapes=shapes,
            lengths=lengths,
            graphs=False,
            settings=settings,
        )
        split = [] if self.plan.spec.forward_only else [SplitBackwards(weights)]  # type: ignore[arg-type]
        executor(
            self.plan,
            core,
            steps,
            hooks,
            shapes,
            features=[*split, *others],
        ).run()
        self.reports = steps.record.data
        if core.pending:
            self.left = [f"rank {self.rank}: {handle.what} was never waited" for handle in core.pending]

    def outcome(self) -> PlanRun:
        stages = dict(zip(self.plan.placement.stages[self.rank], self.chunks, strict=True))
        losses = [float(r["loss"]) for r in self.reports]
        slices = self.plan.spec.num_parts
        means = [sum(losses[k : k + slices]) / slices for k in range(0, len(losses), slices)]
        result = ToyResult(means, gradients_of(stages))
        return PlanRun(result, [*self.left, *self.watch.complaints()])


class SyncWatch:
    """Acts as a data-parallel wrapper. Every parameter's gradient must be synchronised once, when it is complete. If
    the plan gathers parameters explicitly, they must be there before the chunk's first forward."""

    def __init__(self, plan: Plan, rank: int, chunks: list[Any], config: SimpleNamespace) -> None:
        self.rank = rank
        self.forward_only = plan.spec.forward_only
        self.names = {p: f"chunk {c}, {name}" for c, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
        self.syncs: dict[torch.nn.Parameter, list[torch.Tensor]] = {p: [] for p in self.names}
        self.gathered: dict[torch.nn.Parameter, int] = dict.fromkeys(self.names, 0)
        self.explicit = plan.spec.grad_sync == EXPLICIT
        self.open = True
        self.faults: list[str] = []
        self.weights: DeferredWeights | None = None
        config.no_sync_func = self._no_sync
        if self.explicit:
            config.grad_sync_func = self._sync_now
        if plan.spec.param_sync and plan.spec.num_chunks > 1:
            config.param_sync_func = self._gather
            for chunk in chunks:
                chunk.register_forward_pre_hook(self._check_gathered)
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        self.open = False
        try:
            yield
        finally:
            self.open = True

    def _accumulated(self, parameter: Any) -> None:
        # torch also fires the hook if a backward gave this parameter no gradient, as a backward with deferred weight
        # gradients does. The layers of ``megatron_pp.weight_grad`` keep their parameters out of that backward.
        nothing_yet = self.weights is not None and self.weights.collecting is not None
        if self.open and not nothing_yet:
            self._sync(parameter)

    def _sync_now(self, parameters: Iterator[Any]) -> None:
        for parameter in parameters:
            self._sync(parameter)

    def _sync(self, parameter: Any) -> None:
        self.syncs[parameter].append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())

    def _gather(self, parameters: Iterator[Any]) -> None:
        for parameter in parameters:
            self.gathered[parameter] += 1

    def _check_gathered(self, chunk: Any, args: Any) -> None:
        if any(self.gathered[p] != 1 for p in chunk.parameters()):
            self.faults.append(
                f"rank {self.rank}: a forward ran before the parameters were gathered, or they were gathered twice"
            )

    def complaints(self) -> list[str]:
        found = list(self.faults)
        for parameter, name in self.names.items():
            synced = self.syncs[parameter]
            if self.forward_only:
                if synced:
                    found.append(f"rank {self.rank}: {name} was synchronised without a backward")
            elif len(synced) != 1:
                found.append(f"rank {self.rank}: {name} was synchronised {len(synced)} times")
            elif not torch.equal(synced[0], parameter.grad):  # type: ignore[arg-type]
                found.append(f"rank {self.rank}: {name} was synchronised before its gradient was complete")
        return found


def network_for(plan: Plan, kind: type[MemoryNetwork], **more: Any) -> MemoryNetwork:
    return kind(plan.spec.pipeline_size, plan.spec.channels == ONE_WAY, **more)
