"""The pipeline of a job with its costs: its plan, the layers of each stage, and their times and memory on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.errors import LayoutError, MegatronPPError, PlanError
from megatron_pp.plan.builder import verified_plan
from megatron_pp.plan.costs.communicators import Outside
from megatron_pp.plan.costs.stage_costs import Link, Network
from megatron_pp.plan.ir.spec import BATCHED, ON_NCCL, OVERLAP, Plan, PlanSpec
from megatron_pp.plan.orders import INTERLEAVED, ONE_F_ONE_B
from megatron_pp.plan.simulate.memory import FULL
from megatron_pp.planner.timing import kept_states
from megatron_pp.tools.advise.evaluate import tensors_of
from megatron_pp.tools.advise.fit import Fitted, Room, fitted, with_recomputed
from megatron_pp.tools.advise.layers.gpus import GB, Gpu
from megatron_pp.tools.advise.megatron_args import transformer_of
from megatron_pp.tools.advise.model import EMBEDDING, LOSS, MTP, Layer, Model
from megatron_pp.tools.advise.transformer import Transformer
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.sizes import vocabulary_of
from megatron_pp.tools.check.stages import NotGivenError, Stage, chunks_of, microbatches_of, pipeline_size, stages_of

LATENCY = 0.01  # latency of a message between GPUs, in ms
_MOST_STAGES = 2048  # more than any model has layers
_OWN_WORDS = ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq", "window_size")


def spec_of(job: Job, schedule: str = "", most: int | None = None) -> PlanSpec:
    """The plan that this engine runs for the job, with Megatron's schedule or the given one. It has at most ``most``
    microbatches, rounded down to whole groups. Raises PlanError and LayoutError."""
    size = pipeline_size(job)
    chunks = chunks_of(job)
    if size * chunks > _MOST_STAGES:
        raise PlanError(f"the pipeline has {size * chunks} stages; check takes at most {_MOST_STAGES}")
    group = int(job.get("microbatch_group_size_per_vp_stage") or size) if chunks > 1 else 0
    count = microbatches_of(job)
    if most is not None and count > most:
        count = max(most // max(group, 1), 1) * max(group, 1)
    policy = OVERLAP if job.get("overlap_p2p_comm", False) else BATCHED
    name = schedule or (INTERLEAVED if chunks > 1 else ONE_F_ONE_B)
    group = group if group not in (0, size) and not schedule else 0
    return PlanSpec(name, size, chunks, count, group, policy, device=ON_NCCL)


@dataclass(frozen=True)
class Priced:
    """A job's plan, model and costs.

    cut      the stages with their layers, recomputation and costs, and the peak memory of the ranks
    outside  GB of each rank for communicators and the CUDA context
    fixed    ``outside`` and the GB of tensors between stages
    """

    plan: Plan
    transformer: Transformer
    model: Model
    cut: Fitted
    outside: tuple[float, ...]
    fixed: tuple[float, ...]

    def network(self, gpu: Gpu) -> Network:
        """The links between neighbours of the pipeline. Tensor and context parallelism fill a node before the pipeline
        does."""
        shape = self.transformer.shape
        crosses = shape.tensor_parallel * shape.context_parallel * self.plan.spec.pipeline_size > gpu.domain
        bandwidth = (gpu.network if crosses else gpu.link) / GB / 1000
        return Network(self.model.message, link=Link(LATENCY, bandwidth))


def priced(job: Job, gpu: Gpu, schedule: str = "", most: int | None = None) -> Priced:
    """The job on ``gpu``. Raises PlanError and LayoutError if sizes are missing or do not fit together."""
    # Both may raise, so they come before the plan, which takes longer.
    spec = spec_of(job, schedule, most)
    placed = stages_of(job)
    plan, verdict = verified_plan(spec)
    transformer = transformer_of_job(job)
    model = transformer.model(gpu)
    stages = layers_of(model, placed)
    outside = tuple(nbytes / GB for nbytes in Outside().nbytes(plan.placement, plan.spec.policy))
    tensors = tensors_of(verdict)
    fixed = tuple(gb + count * model.message for gb, count in zip(outside, tensors, strict=True))
    states = [kept_states(line, plan.spec.num_chunks) for line in plan.orders]
    room = Room(plan.placement, states, 1, gpu.memory, fixed)
    cut = with_recomputed(fitted(stages, room, model, False), [_recomputed_layers(job)] * len(stages))
    kept = [room.kept(rank, cut.activation, cut.late) for rank in range(plan.spec.pipeline_size)]
    peaks = tuple(sum(parts) for parts in zip(cut.static, fixed, kept, strict=True))
    return Priced(plan, transformer, model, replace(cut, peaks=peaks), outside, fixed)


def why_not_priced(error: MegatronPPError) -> str:
    """The line of a section for which ``priced`` has raised ``error``."""
    if isinstance(error, LayoutError) and not isinstance(error, NotGivenError):
        return "not estimated: see Start"
    return f"not estimated: {error}" if isinstance(error, NotGivenError) else f"cannot be estimated: {error}"


def transformer_of_job(job: Job) -> Transformer:
    """The transformer of the job's settings. Raises PlanError if sizes are missing."""
    words = dict(_words({**job.args, "padded_vocab_size": vocabulary_of(job.args) or None}))
    if not job.get("group_query_attention"):
        words.pop("num_query_groups", None)
    if _recomputed_layers(job):
        words.pop("recompute_granularity", None)
    elif words.get("recompute_granularity") == FULL:
        words.pop("recompute_num_layers", None)  # uniform: every layer
    if not words.get("num_experts"):
        words.pop("expert_model_parallel_size", None)
    return transformer_of(words, int(job.get("data_parallel_size", 1)))


def _recomputed_layers(job: Job) -> int:
    """The number of recomputed layers of each stage, if the job gives Megatron a number; otherwise 0."""
    by_number = job.get("recompute_granularity") == FULL and job.get("recompute_method") == "block"
    return int(job.get("recompute_num_layers", 0)) if by_number else 0


def _words(args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings as a command line would give them, without switches that are off and settings that are not set."""
    for name, value in args.items():
        if value is None or value is False or value in ([], ()):
            continue
        if isinstance(value, (list, tuple)):
            yield name, str(list(value)) if name in _OWN_WORDS else " ".join(map(str, value))
        else:
            yield name, value


def layers_of(model: Model, stages: tuple[Stage, ...]) -> list[tuple[Layer, ...]]:
    """The layers of each stage. Raises PlanError if the stages have more layers than the model."""
    by_kind = {kind: [one for one in model.layers if one.kind == kind] for kind in (EMBEDDING, MTP, LOSS)}
    main = iter([one for one in model.layers if one.kind not in by_kind])
    found = []
    for stage in stages:
        layers = by_kind[EMBEDDING][:1] if stage.embedding else []
        try:
            layers = [*layers, *(next(main) for _ in stage.layers)]
        except RuntimeError as error:
            raise PlanError("the stages have more layers than the model") from error
        layers += by_kind[MTP][: stage.mtp] + (by_kind[LOSS][:1] if stage.loss else [])
        found.append(tuple(layers))
    return found
