"""Rules of where layers, embedding, loss and multi-token prediction are in the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_pp.config.hybrid_pattern import HybridPattern
from megatron_pp.errors import MegatronPPError
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.rules.rule import MODEL_PARALLEL, Rule, nearest, set_to, unchecked, whole, without
from megatron_pp.tools.check.stages import Stage, chunks_of, pipeline_size, stages_of

_LAYOUT = "pipeline_model_parallel_layout"
_HYBRID = "hybrid_layer_pattern"
_STAGE_LAYERS = "num_layers_per_virtual_pipeline_stage"
_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def _world(job: Job) -> Iterator[tuple[str, str]]:
    tensor, pipeline, context = (whole(job, name) for name in MODEL_PARALLEL)
    dense = tensor * pipeline * context
    if job.gpus % dense:
        given = " x ".join(f"{job.spell(name)} {whole(job, name)}" for name in MODEL_PARALLEL)
        yield f"{job.gpus} GPUs cannot be divided by {given} = {dense}", f"{nearest(job.gpus, dense)} GPUs"


def _layers(job: Job) -> Iterator[tuple[str, str]]:
    if not whole(job, "num_layers", 0) and not job.get("hybrid_layer_pattern"):
        return
    try:
        stages = stages_of(job)
    except MegatronPPError as error:
        stages_wanted = pipeline_size(job) * chunks_of(job)
        explicit = job.get(_LAYOUT) or HybridPattern.read(job.get(_HYBRID)).names_stages
        ends = any(map(job.get, _ENDS)) and not explicit
        change = _with_other_ends(job) if ends else "" if explicit else _with_other_layers(job, stages_wanted)
        yield str(error), change
        return
    yield from _letters(job, stages)


def _with_other_ends(job: Job) -> str:
    """A change of the sizes of the first and last stage. Without a pipeline they are left out. On two ranks, if both
    are given, they must add up to all layers. Otherwise there is no change to suggest: other ranks share the rest."""
    given = [name for name in _ENDS if job.get(name)]
    if pipeline_size(job) == 1:
        return f"leave {' and '.join(map(job.spell, given))} out"
    rest = whole(job, "num_layers") - whole(job, given[0], 0)
    return set_to(job, given[1], [rest]) if len(given) == pipeline_size(job) == 2 and rest > 0 else ""


def _with_other_layers(job: Job, stages: int) -> str:
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    counted = whole(job, "num_layers") + sum(bool(job.get(name)) for name in names)
    left = counted % stages
    if stages - left == 2 and not any(map(job.get, names)):
        return f"{job.spell(names[0])} {job.spell(names[1])}"
    return set_to(job, "num_layers", nearest(whole(job, "num_layers"), stages)) if not any(map(job.get, names)) else ""


def _letters(job: Job, stages: Sequence[Stage]) -> Iterator[tuple[str, str]]:
    """The layout must have the same layers as the model, and the embedding and the loss at its ends."""
    if not isinstance(job.get("pipeline_model_parallel_layout"), (str, list)):
        return
    spelled = job.spell("pipeline_model_parallel_layout")
    layers = sum(len(one.layers) for one in stages)
    mtp = sum(one.mtp for one in stages)
    if layers != whole(job, "num_layers", 0):
        text = f"{spelled} has {layers} layers (t), but {job.spell('num_layers')} is {whole(job, 'num_layers', 0)}"
        yield text, set_to(job, "num_layers", [layers])
    if mtp != whole(job, "mtp_num_layers", 0):
        text = f"{spelled} has {mtp} layers for multi-token prediction (m), but {job.spell('mtp_num_layers')} is "
        yield text + f"{whole(job, 'mtp_num_layers', 0)}", set_to(job, "mtp_num_layers", [mtp])
    if [one.embedding for one in stages] != [True] + [False] * (len(stages) - 1):
        yield f"{spelled} must have the embedding (E) in its first stage, and nowhere else", ""
    if [one.loss for one in stages] != [False] * (len(stages) - 1) + [True]:
        yield f"{spelled} must have the loss (L) in its last stage, and nowhere else", ""
    yield from _prediction(job, stages)


def _prediction(job: Job, stages: Sequence[Stage]) -> Iterator[tuple[str, str]]:
    """The stages on which Megatron accepts multi-token prediction
    (`PipelineParallelLayerLayout.validate_layer_layout`)."""
    spelled = job.spell(_LAYOUT)
    holding = [number for number, stage in enumerate(stages) if stage.mtp]
    if not holding:
        return
    if len(holding) > 1:
        numbers = ", ".join(map(str, holding))
        yield f"{spelled} has multi-token prediction (m) on stages {numbers}; Megatron accepts one stage", ""
    elif any(stage.layers for stage in stages[holding[0] + 1 :]):
        yield f"{spelled} has layers (t) after multi-token prediction (m); Megatron needs all layers before it", ""
    elif stages[holding[0]].chunk != chunks_of(job) - 1:
        text = f"{spelled} has multi-token prediction (m) on stage {holding[0]}, which is chunk "
        text += f"{stages[holding[0]].chunk} of its rank; Megatron accepts only a rank's last chunk"
        yield text, f"m on one of the last {pipeline_size(job)} stages"


def _one_way(job: Job) -> Iterator[tuple[str, str]]:
    """Pairs of settings that both say how layers are placed. ``_layers`` reports some other pairs, as `place_layers`
    refuses them."""
    ways = [name for name in (_LAYOUT, _STAGE_LAYERS, _CHUNKS) if job.given.get(name)]
    if len(ways) > 1 and unchecked(job):
        yield f"{' and '.join(map(job.spell, ways))} are set; Megatron accepts one of them", without(job, ways[-1])
    beside = [name for name in (*_ENDS, *_COUNTED) if job.get(name)]
    if job.get(_LAYOUT) and beside:
        spelled = " and ".join(map(job.spell, beside))
        yield f"Megatron refuses {spelled} together with {job.spell(_LAYOUT)}", f"leave {spelled} out"
    ends = [name for name in _ENDS if job.get(name)]
    if unchecked(job) and ends and job.given.get(_STAGE_LAYERS) and not job.get(_LAYOUT):
        text = f"{job.spell(_STAGE_LAYERS)} needs ranks with the same number of layers, but "
        yield text + f"{job.spell(ends[0])} is set", set_to(job, _CHUNKS, [chunks_of(job)])
    pattern = [name for name in (_LAYOUT, _STAGE_LAYERS, _CHUNKS, *_COUNTED) if job.given.get(name)]
    if job.get(_HYBRID) and pattern:
        spelled = " and ".join(map(job.spell, pattern))
        yield (
            f"Megatron refuses {spelled} together with {job.spell(_HYBRID)}: its | separate the stages",
            (f"leave {spelled} out"),
        )


def _chunks_without_pipeline(job: Job) -> Iterator[tuple[str, str]]:
    if pipeline_size(job) == 1 and chunks_of(job) > 1:
        asked = [name for name in (_LAYOUT, _STAGE_LAYERS, _CHUNKS) if job.get(name)]
        named = asked[0] if asked else "virtual_pipeline_model_parallel_size"
        text = f"{job.spell(named)} gives {chunks_of(job)} chunks a rank, but there is one pipeline rank; "
        yield text + "Megatron refuses chunks without a pipeline", without(job, named)


PLACED = (
    *("num_layers", "pipeline_model_parallel_size", _LAYOUT, "mtp_num_layers", _CHUNKS, _STAGE_LAYERS),
    *(*_ENDS, *_COUNTED, _HYBRID),
)
PLACING = (
    Rule("gpus-of-the-layout", (*MODEL_PARALLEL, "world_size"), _world),
    Rule("layers-on-stages", PLACED, _layers),
    Rule("layers-placed-in-two-ways", (_LAYOUT, _STAGE_LAYERS, _CHUNKS, *_ENDS, *_COUNTED, _HYBRID), _one_way),
    Rule(
        "chunks-without-a-pipeline",
        ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size", "overlap_p2p_comm"),
        _chunks_without_pipeline,
    ),
)
