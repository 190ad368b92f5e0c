"""``PlanSchedule``: runs torch's pipeline stages on this engine, under any of its schedules."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _Action

from megatron_pp.config.checks import whole_number
from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.errors import ScheduleInputError
from megatron_pp.faults.attach import watched
from megatron_pp.feature_table import BY_COST
from megatron_pp.integrations.torch_pipelining.agreement import Ranks, RefusedError
from megatron_pp.integrations.torch_pipelining.batch import Batch, given_batch, split_batch
from megatron_pp.integrations.torch_pipelining.edges import EdgeFinder, signature
from megatron_pp.integrations.torch_pipelining.gradients import divided_by
from megatron_pp.integrations.torch_pipelining.hops import Edge
from megatron_pp.integrations.torch_pipelining.splitting import Splitting
from megatron_pp.integrations.torch_pipelining.stage_calls import stage_call
from megatron_pp.integrations.torch_pipelining.step_call import TorchHost
from megatron_pp.plan.builder import build_plan, stage_numbers
from megatron_pp.plan.io.serialize import TORCH_CSV, format_plan
from megatron_pp.plan.ir.placement import V_SHAPE, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime.communicators import communicator_for
from megatron_pp.runtime.run_step import prepared, run_step

OUR_NAME = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "loopedbfs": "breadth_first",
    "interleavedzerobubble": "interleaved_zb",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dualpipe_v",
}
"""By torch's name in lower case, without "Schedule" at its front."""
TORCHS_WHOLE_STAGES = 3


def our_name(schedule: str) -> str:
    """This package's name for one of torch's schedules; any other name unchanged."""
    return OUR_NAME.get(schedule.lower().removeprefix("schedule"), schedule)


class _Found(NamedTuple):
    """The messages between stages, with the ``signature`` of this rank for which it was found."""

    signature: tuple[Any, ...]
    edges: list[Edge]


class PlanSchedule:
    """Replaces one of torch's schedules: takes its arguments, and has its ``step`` and ``eval``.

    stages              this rank's stages of torch, made by hand or by ``pipeline()``: a list, or a single stage
    n_microbatches      M >= 1
    loss_fn             (output, target) -> the loss of a microbatch, a tensor of one element; None: forwards only
    schedule            a name on docs/schedules.md, one of torch's names, or the path of a schedule file; default 1f1b
    scale_grads         divide the gradients of a step by M at its end, for losses that are means
    args_chunk_spec, kwargs_chunk_spec, output_merge_spec    torch's: how a batch is cut, and outputs are put together
    backward_requires_autograd    torch's, without effect: a training step always needs gradients enabled
    config              further settings of this package; its schedule and sizes are set here

    Raises ScheduleInputError before any communication if the schedule places other stages on this rank, and PlanError
    for an unknown schedule."""

    default_schedule = "1f1b"

    def __init__(
        self,
        stages: Any,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        *,
        schedule: str | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        config: ModelParallelConfig | None = None,
    ) -> None:
        given = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        if not given:
            raise ScheduleInputError("stages is an empty list; it must hold this rank's stages")
        self.n_microbatches = whole_number("n_microbatches", n_microbatches, error=ScheduleInputError)
        self.loss_fn = loss_fn
        self.schedule = our_name(schedule or self.default_schedule)
        self.scale_grads = scale_grads
        group: Any = dist.group.WORLD if given[0].group is None else given[0].group
        self.group = group
        self.placement = Placement(find_family(self.schedule).placement, self.group.size(), len(given))
        self.calls = [stage_call(stage) for stage in _in_order(given, self.schedule, self.placement, self.group.rank())]
        self.config = self._config_of(config)
        self._specs = args_chunk_spec, kwargs_chunk_spec
        self.merge_spec = output_merge_spec
        self.ranks = Ranks(self.group, self.calls[0].stage.device)
        self._found: dict[bool, _Found] = {}  # for training, and for evaluation
        self.splitting = Splitting(self.schedule)

    def _config_of(self, given: ModelParallelConfig | None) -> ModelParallelConfig:
        size = self.placement.pipeline_size
        chunks = self.placement.num_chunks
        config = ModelParallelConfig(overlap_p2p_comm=True) if given is None else given
        return config.replace(
            pipeline_schedule=self.schedule,
            pipeline_model_parallel_size=size,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_dtype=config.pipeline_dtype or torch.float32,  # tensors between stages have their own
        )

    @property
    def pipeline_order(self) -> dict[int, list[Any]]:
        """Each rank's compute order as torch's actions; None for an idle slot. torch's ``_PipelineScheduleRuntime``
        takes it."""
        shape = self.placement.pipeline_size, self.placement.num_chunks, self.n_microbatches
        group_size = self.config.microbatch_group_size_per_vp_stage or 0
        plan = build_plan(PlanSpec(self.schedule, *shape, group_size=group_size))
        rows = csv.reader(format_plan(plan, TORCH_CSV).splitlines())
        return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Train on one batch: whole, which is cut in M along the first dimension, or already cut (``arg_mbs``,
        ``kwarg_mbs``, ``target_mbs``: M entries each). ``args`` are for the first stage, ``kwargs`` for the stages of
        the rank that gives them, ``target`` for the loss. Called by all ranks of the pipeline together.

        On the rank of the last stage ``losses`` is filled with the loss of each microbatch, and the merged outputs are
        returned unless ``return_outputs`` is False. Other ranks return None. ``finalize_gradients`` is only for sharded
        parameters. Raises RuntimeError under ``torch.no_grad()``, ScheduleInputError and TypeError for inputs that are
        no batch of M."""
        given = args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs
        return self._run(given, losses, return_outputs, forward_only=self.loss_fn is None)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run only the forwards of ``step``; gradients do not change. Without a target no loss is computed."""
        given = args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs
        return self._run(given, losses, return_outputs, forward_only=True)

    def _batch(
        self, args: Any, kwargs: Any, target: Any, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, loss_kwargs: Any
    ) -> Batch:
        count = self.n_microbatches
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            batch = split_batch(count, args, kwargs, target, *self._specs)
        else:
            whole = {"a positional argument": args or None, "target": target, **kwargs}
            batch = given_batch(count, arg_mbs, kwarg_mbs, target_mbs, whole)
        batch.loss_kwargs = loss_kwargs or {}
        return batch

    def _run(self, given: tuple[Any, ...], losses: list[Any] | None, return_outputs: bool, forward_only: bool) -> Any:
        config = self.config_of_step()
        refused: Exception | None = None
        with self._watched(config):
            try:
                batch, edges = self._agreed(given, losses, not forward_only)
            except RefusedError as error:
                refused = error.error
        if refused is not None:
            raise refused
        host = TorchHost(self, config, batch, edges, forward_only, return_outputs)
        with divided_by(self.n_microbatches if self.scale_grads and not forward_only else 1, self.parameters):
            found = run_step(prepared(host), host)
        if losses is not None and any(one.is_last for one in self.calls):
            losses[:] = found
        return host.merged

    def _watched(self, config: ModelParallelConfig) -> AbstractContextManager[Any]:
        """A context for the ranks' agreement before a step, under the fault guard of the step's communicator."""
        if self.ranks.size == 1:
            return nullcontext()
        return watched(communicator_for(self.group, config), config, "the agreement of the ranks before the step")

    def _agreed(self, given: tuple[Any, ...], losses: list[Any] | None, trains: bool) -> tuple[Batch, list[Edge]]:
        """The batch, and what stages pass to each other. If a rank refuses its input, all ranks raise, in each step:
        the others would wait for its messages. If one rank has to find shapes anew, all do."""
        problem: Exception | None = None
        known: _Found | None = self._found.get(trains)
        signed: tuple[Any, ...] = ()
        try:
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses must be a list but got a {type(losses)}")
            batch = self._batch(*given)
            if trains:
                self._check_training(batch)
            signed = signature(self.calls, batch, trains, self.config.variable_seq_lengths)
        except Exception as error:
            problem = error
        refused, differs = self.ranks.any_of([problem is not None, known is None or known.signature != signed])
        if refused:
            self.ranks.refuse(problem)
        if differs or known is None:
            finder = EdgeFinder(self.calls, self.placement, self.ranks, trains)
            known = self._found[trains] = _Found(signed, finder.find(batch.args[0], batch.kwargs[0]))
        return batch, known.edges

    def parameters(self) -> list[Tensor]:
        """The parameters of this rank's stages. For sharded parameters these are the shards, which have gradients."""
        for module in self._modules(FSDPModule):
            module.reshard()
        return list({parameter: None for call in self.calls for parameter in call.stage.submod.parameters()})

    def _check_training(self, batch: Batch) -> None:
        if not torch.is_grad_enabled():
            raise RuntimeError("step() was called under torch.no_grad(), where no gradient is computed; call eval()")
        if batch.targets is None and any(call.is_last for call in self.calls):
            raise ScheduleInputError("this rank has the last stage, and step() was given no target for the loss")

    def _modules(self, kind: type) -> list[Any]:
        return [one for call in self.calls for one in call.stage.submod.modules() if isinstance(one, kind)]

    def config_of_step(self) -> ModelParallelConfig:
        """``config``. If stages are sharded and it does not say when they are gathered, the plan keeps as many stages
        whole as torch's runtime does, with the fewest collectives."""
        if self.config.fsdp_collectives or not self._modules(FSDPModule):
            return self.config
        most = min(TORCHS_WHOLE_STAGES, self.placement.num_chunks)
        return self.config.replace(fsdp_collectives=BY_COST, fsdp_max_active_stages=most)


def _in_order(stages: Sequence[Any], schedule: str, placement: Placement, rank: int) -> list[Any]:
    """The stages by chunk. Raises ScheduleInputError if they are not those of ``rank``."""
    size = placement.pipeline_size
    chunks = placement.num_chunks
    count = stages[0].num_stages
    here = f"{schedule} on {size} ranks with {chunks} stage(s) each"
    if count != placement.num_stages:
        raise ScheduleInputError(
            f"rank {rank} has {chunks} of {count} stages; {here} has {placement.num_stages}: every rank holds as many "
            "stages as any other"
        )
    wanted = stage_numbers(schedule, size, chunks)[rank]
    by_index = {stage.stage_index: stage for stage in stages}
    if sorted(by_index) != sorted(wanted) or len(by_index) != len(stages):
        given = ", ".join(str(stage.stage_index) for stage in stages)
        kind = "in a V" if placement.kind == V_SHAPE else "in a loop"
        raise ScheduleInputError(
            f"rank {rank} has the stages {given}; {here} places stages {kind}, here {', '.join(map(str, wanted))} "
            f"(megatron_pp.stage_numbers({schedule!r}, {size}, {chunks})[rank])"
        )
    return [by_index[index] for index in wanted]
