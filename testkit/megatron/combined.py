"""Trains with combined 1F1B on this rank under Megatron's own schedule, under this engine with the same schedule plans,
and with the whole model alone, and compares the three.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_pp.runtime.engine.executor import PlanExecutor
from testkit.megatron import lab
from testkit.megatron.cases import Case, Model


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference. Infinite if a number is not finite."""
    return float((ours - theirs).abs().max()) if bool(torch.isfinite(ours).all()) else float("inf")


def forward_step(
    per_token: bool, data_iterator: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """A forward step as in Megatron's training script. Under combined 1F1B it returns the schedule plan."""
    return lab.forward_step(
        per_token, data_iterator, model, model.build_schedule_plan if return_schedule_plan else None
    )


class Run(lab.Run):
    """One case on this rank. With ``replicas`` a rank sees the data of that many data-parallel ranks, microbatch by
    microbatch."""

    def __init__(self, case: Case, combined: bool = True, replicas: int = 1, delay: bool = False) -> None:
        super().__init__(case)
        self.queues = delay_weight_gradients(self.chunks) if delay else []
        self.config.delay_wgrad_compute = delay
        # Set after the config's checks, which require virtual stages and half precision. Half precision could hide
        # differences.
        self.config.overlap_moe_expert_parallel_comm = combined
        self.replicas = replicas

    def data(self, step: int) -> list[torch.Tensor]:
        if self.replicas == 1:
            return lab.batches(self.case, step)
        lines = []
        for rank in range(self.replicas):
            with mock.patch.object(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank):
                lines.append(lab.batches(self.case, step))
        return [batch for together in zip(*lines, strict=True) for batch in together]

    def schedule(self, step: int, forward_only: bool, evaluation: bool = False) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        case = self.case
        data = self.data(step)
        iterators = [iter(data) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=lambda *args, **more: forward_step(case.model.per_token_loss, *args, **more),
            data_iterator=iterators if case.vp else iterators[0],
            model=self.chunks if case.vp else self.chunks[0],
            num_microbatches=len(data),
            seq_length=case.model.seq,
            micro_batch_size=case.model.micro_batch,
            forward_only=forward_only,
        )

    def step(self, step: int) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.losses += [report["loss"].reshape(-1) for report in self.schedule(step, forward_only=False)]
        if self.optimizer is not None:
            self.optimizer.step()

    def train(self) -> dict[str, Any]:
        for step in range(self.case.steps):
            self.step(step)
        return {
            "losses": self.losses,
            "gradients": {name: grad.clone() for name, grad in self.gradients().items()},
            "parameters": {name: value.clone() for name, value in self.parameters().items()},
        }


def parities(case: Case) -> dict[str, Any]:
    """Train ``case`` under Megatron's own combined 1F1B, in the way of communication that is right on every release,
    and under this engine in the ways of ``VARIANTS``. Returns the largest differences from Megatron, and from one model
    that has all layers and experts and sees the microbatches of all data-parallel ranks.
    """
    safe = dataclasses.replace(case, policy="plain", deallocate=False)
    with all_to_alls() as lines:
        theirs = whole(Run(safe).train())
    replica = parallel_state.get_data_parallel_rank()
    alone = dataclasses.replace(safe, pp=1, vp=None, ep=1, dp=case.world)
    single = Run(alone, combined=False, replicas=case.dp).train()
    single["losses"] = single["losses"][replica :: case.dp]
    facts = {
        "size": max(float(grad.abs().max()) for grad in single["gradients"].values()),
        "single": differences(theirs, single),
        "all-to-alls": len(lines),
    }
    changes: dict[str, Any] = VARIANTS if case.pp > 1 else {"alone": {}}
    for name, change in changes.items():
        delay = name == DELAYED
        variant = dataclasses.replace(case, **change)
        with lab.engine(variant), all_to_alls() as ours_lines:
            run = Run(variant, delay=delay)
            with waiting_at_sends(run.queues) as waiting:
                ours = whole(run.train())
        facts[name] = {
            "weight gradients to come at sends": max(waiting, default=0),
            "differences": differences(ours, theirs),
            "one order": all(other == ours_lines for other in gathered(ours_lines, "expert")),
            "Megatron's order": ours_lines == lines,
            "all-to-alls": len(ours_lines),
        }
    return facts


DELAYED = "delay_wgrad_compute"
RECOMPUTED = (("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"]))
VARIANTS: dict[str, dict[str, Any]] = {
    "overlap+flush": {"policy": "overlap+flush", "overlap_grad_reduce": True},
    "batched, recomputed": {"policy": "batched", "model": Model(layers=4, experts=4, extra_config=RECOMPUTED)},
    "no virtual stages": {"policy": "overlap", "vp": None},
    "dualpipe_v, split": {"policy": "overlap", "schedule": "dualpipe_v", "split_weight_grad": True},
    DELAYED: {"policy": "overlap"},
}


class _Delayed(torch.autograd.Function):
    """A linear layer that queues its weight gradient, as Transformer Engine's layers do under delay_wgrad_compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, queue: deque[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.queue.append((weight, grad.flatten(0, -2), x.flatten(0, -2)))
        return grad @ weight, None, None


def delay_weight_gradients(chunks: list[Any]) -> list[deque[Any]]:
    """Give Megatron's own linear layers a ``backward_dw`` that computes queued weight gradients. Returns their
    queues."""
    queues = []
    for name, module in (named for chunk in chunks for named in chunk.named_modules()):
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and ".layers." in name:
            queue: deque[Any] = deque()
            queues.append(queue)

            def forward_impl(input: Any, weight: Any, *, _queue: Any = queue, **unused: Any) -> Any:
                return _Delayed.apply(input, weight, _queue)

            def backward_dw(_queue: Any = queue) -> None:
                weight, grad, x = _queue.popleft()
                with torch.no_grad():
                    weight.main_grad.add_(grad.t() @ x)

            module._forward_impl, module.backward_dw = forward_impl, backward_dw
    return queues


@contextlib.contextmanager
def waiting_at_sends(queues: list[deque[Any]]) -> Iterator[list[int]]:
    """A context with a list: the number of queued weight gradients at each send of an input gradient."""
    counts: list[int] = []
    send = PlanExecutor._send_b

    def counted(executor: Any, at: Any) -> None:
        counts.append(sum(map(len, queues)))
        send(executor, at)

    with mock.patch.object(PlanExecutor, "_send_b", counted):
        yield counts


def gathered(mine: Any, group: str) -> list[Any]:
    """The values of ``mine`` on all ranks of this rank's pipeline or expert-parallel group."""
    state = parallel_state
    of = state.get_pipeline_model_parallel_group if group == "pipeline" else state.get_expert_model_parallel_group
    parts: list[Any] = [None] * of().size()
    dist.all_gather_object(parts, mine, group=of())
    return parts


def whole(result: dict[str, Any]) -> dict[str, Any]:
    """The results of all ranks of the pipeline, as one."""
    parts = gathered(result, "pipeline")
    return {
        "losses": next(part["losses"] for part in parts if part["losses"]),
        **{kind: {n: t for part in parts for n, t in part[kind].items()} for kind in ("gradients", "parameters")},
    }


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[float]:
    """The largest differences of losses, gradients and parameters."""
    losses = [difference(a, b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    both = [
        max(difference(value, theirs[kind][name]) for name, value in ours[kind].items())
        for kind in ("gradients", "parameters")
    ]
    return [max(losses), *both]


@contextlib.contextmanager
def all_to_alls() -> Iterator[list[str]]:
    """A context with a list: the all-to-alls of experts that schedule plans run, in order, as text."""
    from megatron.core.models.common import model_chunk_schedule_plan as plans
    from megatron.core.pipeline_parallel import utils

    lines: list[str] = []
    tagged = plans.TransformerLayerSchedulePlan.__init__

    def init(plan: Any, layer: Any, *args: Any, **more: Any) -> None:
        tagged(plan, layer, *args, **more)
        for name in ("moe_dispatch", "moe_combine"):
            node = getattr(plan, name)
            node.tag = f"{name} of layer {layer.layer_number}, microbatch {layer.current_microbatch}"

    def noted(direction: str) -> Any:
        original = getattr(utils.ScheduleNode, direction)

        def function(node: Any, *args: Any, **more: Any) -> Any:
            if hasattr(node, "tag"):
                lines.append(f"{direction} {node.tag}")
            return original(node, *args, **more)

        return mock.patch.object(utils.ScheduleNode, direction, function)

    with noted("forward"), noted("backward"), mock.patch.object(plans.TransformerLayerSchedulePlan, "__init__", init):
        yield lines
