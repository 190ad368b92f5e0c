"""Runs a plan's collectives on stages that ``torch.distributed.fsdp.fully_shard`` (FSDP2) has sharded, by the public
calls of ``FSDPModule``.

While a step runs, FSDP2's own hooks neither gather nor reduce: parameters are whole from WAIT_UNSHARD to RESHARD, and
gradients add up in the whole parameters until REDUCE_GRAD. FSDP2 reduces in the backward of a forward that it has seen.
To make it reduce where the plan says, each root module gets a further forward method, which passes a scalar on. The
backward of this method reduces the gradients that the stage's own backwards have left, or waits for the reduction.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, UnshardHandle, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import LAYER_GRAPHS, StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.fsdp import fsdp_instructions as fsdp
from megatron_pp.features.fsdp.hook_settings import HookSettings
from megatron_pp.plan.builder import settings_of
from megatron_pp.plan.ir.instruction import format_program
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from megatron_pp.runtime.step_hooks import FeatureRun, StepHooks

_METHOD = "_megatron_pp_pass_on"
_LAST = {fsdp.RESHARD, fsdp.WAIT_REDUCE_GRAD}  # the last collective of a chunk is one of them
_AGREED: ObjectTable[set[str]] = ObjectTable()  # root module -> programs on which its replicas agree


class _Running(NamedTuple):
    """A root module in a step."""

    settings: HookSettings
    whole: list[torch.nn.Parameter]  # the whole parameters, once they exist


_RUNNING: ObjectTable[_Running] = ObjectTable()


def check_fsdp(spec: PlanSpec, inputs: StepInputs, settings: StepSettings) -> None:
    """Raises ScheduleInputError if a chunk is not sharded, or if the step asks for something that collectives
    exclude."""
    for number, chunk in enumerate(inputs.chunks):
        if not _sharded(chunk):
            raise ScheduleInputError(f"model chunk {number} ({type(chunk).__name__}) {_why_not(chunk)}")
    for asked, what in (
        (spec.joins and spec.fsdp_max_active_stages == 1, "pairs, which may use two stages at a time"),
        (
            settings_of(spec).get("offload_chunks"),
            "offloading (offload_chunks), which would take whole parameters for activations",
        ),
        (settings.cuda_graph_impl in LAYER_GRAPHS, "CUDA graphs of layers, whose parameters stay where they are"),
        (settings.microbatch_costs is not None, "microbatch_costs, with which replicas may choose different plans"),
    ):
        if asked:
            raise ScheduleInputError(f"config.fsdp_collectives does not go with {what}; leave one of them out")


def _why_not(chunk: Any) -> str:
    modules = chunk.modules() if isinstance(chunk, torch.nn.Module) else ()
    if any(hasattr(module, "_replace_param_with_raw_if_needed") for module in modules):
        return (
            "is sharded by Megatron-FSDP, which gathers and reduces layer by layer in hooks of its own and cannot be "
            "told when a stage is whole; leave config.fsdp_collectives out, or shard the stages with fully_shard"
        )
    return (
        "has no module that torch.distributed.fsdp.fully_shard (FSDP2) shards, and config.fsdp_collectives is for such "
        "stages; shard it, or leave the setting out"
    )


def _sharded(chunk: Any) -> list[FSDPModule]:
    """The sharded modules of a chunk, an outer one before those within it."""
    modules = chunk.modules() if isinstance(chunk, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, FSDPModule)]


class _Stage:
    """The sharded modules of one chunk. ``mark`` is the scalar that the roots pass on, from a step's first unshard
    on."""

    def __init__(self, chunk: Any) -> None:
        self.modules = _sharded(chunk)
        inner = {id(one) for outer in self.modules for one in _sharded(outer) if one is not outer}
        self.roots = [module for module in self.modules if id(module) not in inner]
        self.marks: list[Tensor] = []

    def begin(self, trains: bool) -> None:
        """Turn FSDP2's own gathers and reductions off."""
        for root in self.roots:
            left = _RUNNING.get(root)
            if left is not None:  # a step that failed has left it
                root.reset_iter_state()
                for parameter in left.whole:
                    parameter.grad = None
            _RUNNING[root] = _Running(HookSettings(_sharded(root)) if left is None else left.settings, [])
            root.set_reshard_after_forward(False)
        for module in self.modules:
            module.reshard()
        if trains:
            self._take_hooks()

    def end(self) -> None:
        """Restore the modules' own settings."""
        self.marks.clear()
        for root in self.roots:
            root.set_is_last_backward(True)
            _RUNNING.pop(root).settings.give_back()

    def _take_hooks(self) -> None:
        for root in self.roots:
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(False)
            root.set_requires_gradient_sync(False)
        for module in self.modules:
            module.set_unshard_in_backward(False)
            # With one named, FSDP2 does not look for others; itself is whole already.
            module.set_modules_to_backward_prefetch([module])

    def make_marks(self) -> None:
        """Make the marks. Called while the stage is whole, because a forward method gathers it."""
        for root in self.roots:
            module = cast(torch.nn.Module, root)
            if not hasattr(module, _METHOD):
                setattr(module, _METHOD, _pass_on)
                register_fsdp_forward_method(module, _METHOD)
            whole = list(module.parameters())
            cast(_Running, _RUNNING.get(root)).whole[:] = whole
            self.marks.append(getattr(module, _METHOD)(torch.zeros((), device=whole[0].device, requires_grad=True)))

    def backward_with(self, switch: Callable[[FSDPModule, bool], None]) -> None:
        """Run FSDP2's hooks of a backward while ``switch`` is on, without a backward of the stage."""
        for root in self.roots:
            switch(root, True)
        for mark in self.marks:
            torch.autograd.backward((mark,), (torch.zeros_like(mark),), retain_graph=True)
        for root in self.roots:
            switch(root, False)


def _pass_on(scalar: Tensor) -> Tensor:
    return scalar.clone()


class _Step(StepHooks):
    def check_draft(self, draft: PlanSpec, inputs: StepInputs, settings: StepSettings) -> None:
        check_fsdp(draft, inputs, settings)

    def runner(self, run: FeatureRun) -> FsdpRunner | None:
        return FsdpRunner(run.plan, run.communicator.rank, run.chunks) if run.plan.spec.fsdp_collectives else None


STEP = _Step()


class FsdpRunner:
    """Runs the collectives of ``rank``'s ``chunks``. Raises ScheduleInputError if a replica runs another program."""

    def __init__(self, plan: Plan, rank: int, chunks: Sequence[Any]) -> None:
        self.trains = not plan.spec.forward_only
        self.stages = [_Stage(chunk) for chunk in chunks]
        self.unshards: dict[int, list[UnshardHandle]] = {}  # chunk -> its handles
        self.reductions: dict[int, bool] = {}
        self.program = plan.programs[rank]
        self.left = {task.chunk: position for position, task in enumerate(plan.tasks(rank)) if task.op in _LAST}
        self._agree()

    @property
    def tables(self) -> Mapping[str, Mapping[Any, Any]]:
        return {"unshards": self.unshards, "gradient reductions": self.reductions}

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        """Add the handlers. The step begins with all stages resharded."""
        for stage in self.stages:
            stage.begin(self.trains)
        self.engine = weakref.proxy(engine)
        handlers |= {
            fsdp.UNSHARD: self._unshard,
            fsdp.WAIT_UNSHARD: self._wait_unshard,
            fsdp.RESHARD: self._reshard,
            fsdp.REDUCE_GRAD: self._reduce_grad,
            fsdp.WAIT_REDUCE_GRAD: self._wait_reduce_grad,
        }

    def _unshard(self, at: Task) -> None:
        handles = [module.unshard(async_op=True) for module in self.stages[at.chunk].modules]
        self.unshards[at.chunk] = [handle for handle in handles if handle is not None]

    def _wait_unshard(self, at: Task) -> None:
        for handle in self.unshards.pop(at.chunk):
            handle.wait()
        if self.trains and not self.stages[at.chunk].marks:
            self.stages[at.chunk].make_marks()

    def _reshard(self, at: Task) -> None:
        for module in self.stages[at.chunk].modules:
            module.reshard()
        self._end(at)

    def _reduce_grad(self, at: Task) -> None:
        self.stages[at.chunk].backward_with(FSDPModule.set_requires_gradient_sync)
        self.reductions[at.chunk] = True

    def _wait_reduce_grad(self, at: Task) -> None:
        self.stages[at.chunk].backward_with(FSDPModule.set_is_last_backward)
        del self.reductions[at.chunk]
        self._end(at)

    def _end(self, at: Task) -> None:
        """After a chunk's last collective, give FSDP2 its hooks back."""
        if self.engine.position == self.left[at.chunk]:
            self.stages[at.chunk].end()

    def _agree(self) -> None:
        """Compare the program with those of data-parallel replicas, once per program and model. Raises
        ScheduleInputError if a replica runs another one."""
        digest = hashlib.sha256(format_program(self.program).encode()).hexdigest()
        for root in (root for stage in self.stages for root in stage.roots):
            root.reshard()  # only sharded parameters have their mesh
            if digest in (_AGREED.get(root) or ()):
                continue
            for group in _groups(cast(torch.nn.Module, root).parameters()):
                found: list[Any] = [None] * group.size()
                dist.all_gather_object(found, digest, group=group)
                if any(one != digest for one in found):
                    raise ScheduleInputError(
                        "data-parallel replicas run different plans, whose collectives would not match; give all the "
                        "same schedule, sizes, fsdp_collectives and fsdp_max_active_stages"
                    )
            _AGREED[root] = {*(_AGREED.get(root) or ()), digest}


def _groups(parameters: Iterable[Any]) -> list[Any]:
    """The data-parallel groups of sharded parameters, one for each dimension of their mesh."""
    meshes = (parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor))
    mesh = next(meshes, None)
    return [] if mesh is None else [group for group in mesh.get_all_groups() if group.size() > 1]
