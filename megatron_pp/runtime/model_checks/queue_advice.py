"""Advice on ``CUDA_DEVICE_MAX_CONNECTIONS``."""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.config.settings import StepSettings
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import ONE_WAY, Plan, PlanSpec

QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULT_QUEUES, _MOST_QUEUES = 8, 32


def queue_advice(
    streams: int, needs_one: bool, needs_more: bool = False, environ: Mapping[str, str] = os.environ
) -> str | None:
    """A sentence for the log where ``CUDA_DEVICE_MAX_CONNECTIONS`` does not suit the run; None where it does. Streams
    that share a hardware queue wait for each other's operations in the order of issue (CUDA C++ programming guide,
    environment variables).

    ``streams``: those that the pipeline uses on a rank. ``needs_one``: tensor or context parallel layers rely on one
    queue, as Megatron requires before Blackwell. ``needs_more``: experts' communication is hidden behind compute, or
    FSDP shards the model: for both Megatron wants more than one; beside layers that rely on one, the user chooses."""
    text = environ.get(QUEUES_VARIABLE)
    queues = _DEFAULT_QUEUES if not text else int(text) if text.isdecimal() else 0
    advice = f"set it to {1 if needs_one and not needs_more else _MOST_QUEUES}"
    if not 1 <= queues <= _MOST_QUEUES:
        why, advice = "no number of hardware queues", f"it must be a whole number from 1 to {_MOST_QUEUES}"
    elif needs_one and needs_more and text:
        return None  # one or more queues, as the user has chosen
    elif needs_one and needs_more:
        why = "tensor and context parallel layers overlap better with 1 before Blackwell, experts' communication and "
        why += "FSDP with more"
        advice = f"set it to 1 or to {_MOST_QUEUES}"
    elif needs_one and queues > 1:
        why = "before Blackwell, tensor and context parallel layers overlap as intended only in the order of issue"
    elif queues == 1 and needs_more:
        why = "experts' communication or FSDP's cannot overlap with compute, and a transfer can hold compute back"
    elif queues == 1 and not needs_one:
        why = "a transfer that waits for its peer can hold compute back, and nothing in this run needs one queue"
    elif 1 < queues < streams:
        why = f"the pipeline uses {streams} streams: some share a queue and wait for each other"
    elif not text:
        why = f"enough for the pipeline's {streams} streams, but not for data parallel communication as well"
    else:
        return None
    return f"{QUEUES_VARIABLE} is {text or f'not set, which means {_DEFAULT_QUEUES} hardware queues'}: {why}; {advice}"


_BLACKWELL = 10  # compute capability


def advice_on_queues(
    plan: Plan, settings: StepSettings, communicator: P2PCore, chunks: Sequence[Any] = ()
) -> str | None:
    """``queue_advice`` for a step of ``chunks`` on NCCL."""
    splits_layers = settings.tensor_model_parallel_size > 1 or settings.context_parallel_size > 1
    needs_one = splits_layers and torch.cuda.get_device_capability(communicator.device)[0] < _BLACKWELL
    needs_more = bool(settings.overlap_moe_expert_parallel_comm) or any(map(_is_sharded, chunks))
    return _kept_advice(plan.spec, plan.placement, needs_one, needs_more)


def _is_sharded(chunk: Any) -> bool:
    """Whether Megatron-FSDP has wrapped the chunk. (Stages that FSDP2 shards are known by their plan.)"""
    return bool(getattr(wrapped_attribute(chunk, "ddp_config"), "use_megatron_fsdp", False))


@lru_cache(maxsize=128)
def _kept_advice(spec: PlanSpec, placement: Placement, needs_one: bool, needs_more: bool) -> str | None:
    """The variable is read once for each spec."""
    edges = [rank for edge in placement.rank_edges for rank in edge]
    channels = 2 * max(map(edges.count, edges), default=0)  # an edge has one for activations and one for gradients
    shares_one = spec.channels != ONE_WAY or spec.grouped
    needs_more = needs_more or spec.joins or bool(dict(spec.added).get("fsdp_collectives"))
    return queue_advice(1 + (1 if shares_one else channels) + spec.joins, needs_one, needs_more)
