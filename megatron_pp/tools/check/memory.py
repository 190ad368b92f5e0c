"""The section "memory": each pipeline rank's peak memory, the card's memory, and a change if the job does not fit.

All numbers are estimated from sizes, except those of communicators. The workspace of kernels, fragmentation, and the
communicators of tensor, data and expert parallelism are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.errors import MegatronPPError
from megatron_pp.plan.costs.communicators import measured_at_most
from megatron_pp.tools.advise.layers.gpus import GB, Gpu
from megatron_pp.tools.check.findings import RISK, Finding, Section
from megatron_pp.tools.check.jobs.job import TORCHTITAN, Job
from megatron_pp.tools.check.jobs.sizes import vocabulary_of
from megatron_pp.tools.check.priced import Priced, layers_of, priced, why_not_priced
from megatron_pp.tools.check.stages import pipeline_size, stages_of

MOST = 64
"""Most microbatches of the plan whose memory is estimated. A longer step does not need more memory."""
TOO_LOW = 0.23
TOO_HIGH = 0.09
"""Estimates were at most so much lower and higher than measured memory (`scripts/check_memory.py`)."""
_CLOSE = 0.9  # above this share of the card's memory the job may not fit, as estimates are not exact
_REPLICAS = 2**40  # so many replicas that the optimizer's share of one is nothing
_SHOWN = 6
_MORE_ROOM: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    # (the setting that the user writes, the settings that it changes, its value)
    ("use_distributed_optimizer", {"use_distributed_optimizer": True}, ""),
    ("recompute_granularity", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, "selective"),
    (
        "recompute_granularity",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "full --recompute-method uniform --recompute-num-layers 1",
    ),
)


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank in GB."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    tensors: float
    communicators: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.tensors + self.communicators


def section(job: Job, gpu: Gpu | None) -> Section:
    if gpu is None:
        return Section("memory", ("not estimated; name the card of the job by --gpu NAME",))
    try:
        found = priced(job, gpu, most=MOST)
    except MegatronPPError as error:
        return Section("memory", (why_not_priced(error),))
    ranks = memory_of(job, gpu, found)
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    lines = [*_table(ranks, fullest), "", *_set_by(job), _estimated(ranks[fullest], gpu)]
    lines += [*without_vocabulary(job), *_sharded(job)]
    data = {
        "ranks": [{**vars(one), "total": one.total} for one in ranks],
        "device": gpu.memory,
        "fullest": fullest,
        "communicators_at_most": measured_at_most(ranks[fullest].communicators * GB) / GB,
    }
    return Section("memory", tuple(lines), tuple(_findings(job, gpu, ranks[fullest].total, fullest)), data)


def memory_of(job: Job, gpu: Gpu, found: Priced) -> list[RankMemory]:
    """The memory of each rank.

    A rank's static memory has weights, their gradients and the optimizer's states. The part that would remain with
    very many replicas of a distributed optimizer is weights and gradients; the rest is the optimizer's.
    """
    shape = found.transformer.shape
    shared = replace(found.transformer, shape=replace(shape, data_parallel=_REPLICAS)).model(gpu)
    kept = [sum(one.static for one in layers) for layers in layers_of(shared, stages_of(job))]
    weights = shape.element_bytes / (shape.element_bytes + shape.gradient_bytes)
    ranks = []
    for rank, row in enumerate(found.plan.placement.stages):
        own = sum(kept[stage] for stage in row)
        static = found.cut.static[rank]
        outside = found.outside[rank]
        activations = found.cut.peaks[rank] - static - found.fixed[rank]
        sizes = own * weights, own * (1 - weights), static - own, activations, found.fixed[rank] - outside, outside
        ranks.append(RankMemory(*sizes))
    return ranks


def _table(ranks: list[RankMemory], fullest: int) -> Iterator[str]:
    names = ("parameters", "gradients", "optimizer", "activations", "tensors", "NCCL, CUDA", "together")
    yield "GB    " + "  ".join(names)
    last = len(ranks) - 1
    shown = range(len(ranks)) if len(ranks) <= _SHOWN else sorted({0, 1, fullest, last - 1, last})
    for place, rank in enumerate(shown):
        if place and rank != shown[place - 1] + 1:
            yield "..."
        one = ranks[rank]
        sizes = (*vars(one).values(), one.total)
        cells = (f"{size:.3g}".rjust(len(name)) for size, name in zip(sizes, names, strict=True))
        yield f"{rank:<5} " + "  ".join(cells) + ("  (fullest)" if rank == fullest else "")


def _set_by(job: Job) -> Iterator[str]:
    """Lines that name the settings which change a column of the table."""
    weights = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    weights += ["expert_model_parallel_size"] if job.get("num_experts") else []
    kept = ("recompute_granularity", "micro_batch_size", "context_parallel_size", "sequence_parallel")
    reduced = f"; gradients in 16 bits: {job.spell('grad_reduce_in_bf16')}" if job.get("grad_reduce_in_bf16") else ""
    states = job.spell("use_distributed_optimizer")
    yield f"parameters and gradients: {', '.join(map(job.spell, weights))}{reduced}; optimizer: also {states}"
    yield f"activations: {', '.join(map(job.spell, kept))}"


def _estimated(one: RankMemory, gpu: Gpu) -> str:
    share = (one.total - one.communicators) / one.total
    return (
        f"the card has {gpu.memory:g} GB. {share:.0%} is estimated from sizes; kernels' workspace, fragmentation and "
        "the communicators of other groups are not included. Estimates were up to "
        f"{TOO_LOW:.0%} lower and {TOO_HIGH:.0%} higher than in measured runs. NCCL and CUDA take an estimated "
        f"{one.communicators:.2g} GB over NVLink; over sockets, up to "
        f"{measured_at_most(one.communicators * GB) / GB:.2g} GB were measured"
    )


def _sharded(job: Job) -> Iterator[str]:
    names = ("use_torch_fsdp2", "use_megatron_fsdp")
    if int(job.get("data_parallel_size", 1)) > 1 and (job.framework == TORCHTITAN or any(map(job.get, names))):
        yield "too high: the estimate ignores that FSDP splits parameters, gradients and states over replicas"


def without_vocabulary(job: Job) -> Iterator[str]:
    """A line if the number of words is not known. The embedding and the output layer, which can be as large as several
    layers, are then estimated as 0."""
    if not vocabulary_of(job.args):
        yield f"without embedding, output layer and logits, because {job.spell('vocab_size')} is not known: add it"


def _findings(job: Job, gpu: Gpu, total: float, rank: int) -> Iterator[Finding]:
    if total <= gpu.memory * _CLOSE:
        return
    settings = ("micro_batch_size", "recompute_granularity", "pipeline_model_parallel_size")
    if total <= gpu.memory:
        text = f"rank {rank} needs an estimated {total:.3g} of {gpu.memory:g} GB; parts not counted may not fit"
        yield Finding("memory-is-close", RISK, text, _first_change(job, gpu), settings)
    else:
        text = f"rank {rank} needs an estimated {total:.3g} GB, but the card has {gpu.memory:g}"
        yield Finding("does-not-fit", RISK, text, _first_change(job, gpu), settings)


def _first_change(job: Job, gpu: Gpu) -> str:
    """The first change with which the job fits; if it fits with none, the change that saves most."""
    tried = []
    for setting, change, value in _changes(job):
        if job.framework == TORCHTITAN and setting not in job.spelling:
            continue  # torchtitan does not have this flag of Megatron
        try:
            peak = max(priced(replace(job, args={**job.args, **change}), gpu, most=MOST).cut.peaks)
        except MegatronPPError:
            continue
        words = f"{job.spell(setting)} {value}".strip()
        if peak <= gpu.memory * _CLOSE:
            return f"{words} ({peak:.3g} GB)"
        tried.append((peak, words))
    peak, words = min(tried, default=(0.0, ""))
    return f"{words} leaves {peak:.3g} GB, still too much; more ranks are needed" if words else ""


def _changes(job: Job) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    yield from (one for one in _MORE_ROOM if any(job.args.get(name) != value for name, value in one[1].items()))
    micro = job.get("micro_batch_size", 1)
    if isinstance(micro, int) and micro > 1 and micro % 2 == 0:
        yield "micro_batch_size", {"micro_batch_size": micro // 2}, str(micro // 2)
    size = pipeline_size(job)
    if job.gpus % (2 * size) == 0 and int(job.get("data_parallel_size", 1)) % 2 == 0:
        halved = {"pipeline_model_parallel_size": 2 * size, "data_parallel_size": job.args["data_parallel_size"] // 2}
        yield "pipeline_model_parallel_size", halved, str(2 * size)
