"""The section "layout": which layers are on which rank, and which settings Megatron changes silently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_pp.config.hybrid_pattern import HybridPattern
from megatron_pp.errors import MegatronPPError
from megatron_pp.tools.check.findings import NOTE, RISK, Finding, Section
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.stages import Stage, batch_of, chunks_of, microbatches_of, pipeline_size, stages_of

_WIDTH = 74  # columns of a picture
# Of a pipeline with more than 12 ranks, the first 4 and the last 4 are shown.
_RANKS = 12
_SHOWN = 4
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "data": "data_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert tensor": "expert_tensor_parallel_size",
}
_PLACING = (
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_LEGEND = "E embedding, t transformer layer, m multi-token prediction, L loss"


def section(job: Job) -> Section:
    """Sizes, microbatches, and the picture of ranks and chunks. The findings are what Megatron changes silently."""
    lines = list(_sizes(job))
    data: dict[str, object] = {"sizes": {name: job.get(setting, 1) for name, setting in _SIZES.items()}}
    findings = [*_silent(job)]
    try:
        stages = stages_of(job)
    except MegatronPPError as error:  # the section "start" reports it as an error
        lines.append(f"no picture: {error}")
    else:
        data["stages"] = [
            {
                "rank": one.rank,
                "chunk": one.chunk,
                "layers": [one.layers.start, one.layers.stop],
                "embedding": one.embedding,
                "mtp": one.mtp,
                "loss": one.loss,
            }
            for one in stages
        ]
        lines += ["", *picture(stages, pipeline_size(job)), "", f"{_LEGEND} ({_placed_by(job)})"]
        findings += _uneven(job, stages)
    return Section("layout", tuple(lines), tuple(findings), data)


def _sizes(job: Job) -> Iterator[str]:
    shown = {name: job.get(setting, 1) for name, setting in _SIZES.items()}
    if not job.get("num_experts"):
        shown = {name: size for name, size in shown.items() if not name.startswith("expert")}
    shown = {name: size for name, size in shown.items() if size}  # too few GPUs for a replica: see Start
    sizes = [f"{name} {size}" for name, size in shown.items() if size != 1]
    yield f"{job.gpus} GPUs: {', '.join(sizes) or 'no parallelism'}"
    set_by = [job.spell(_SIZES[name]) for name, size in shown.items() if size != 1 and name != "data"]
    if set_by:
        yield f"set by {', '.join(set_by)}; data parallelism takes the remaining GPUs"
    try:
        count = microbatches_of(job)
    except MegatronPPError:
        return
    if "data" not in shown:
        return
    batch = job.get("global_batch_size")
    micro = job.get("micro_batch_size", 1)
    flags = f"{job.spell('global_batch_size')} {batch}, {job.spell('micro_batch_size')} {micro}"
    microbatches = "1 microbatch" if count == 1 else f"{count} microbatches"
    yield f"{microbatches} a step on each of {job.get('data_parallel_size', 1)} replicas ({flags})"
    if chunks_of(job) > 1:
        group = job.get("microbatch_group_size_per_vp_stage") or pipeline_size(job)
        chunks = f"{chunks_of(job)} chunks a rank{_said_by_layout(job)}"
        named = job.spell("microbatch_group_size_per_vp_stage")
        yield f"{chunks}; a chunk runs {group} microbatches before the next chunk runs ({named})"


def _said_by_layout(job: Job) -> str:
    """A clause saying that the layout determines the number of chunks; "" if a setting does. A layout that was made for
    another number of ranks changes the schedule silently."""
    chunked = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    if not job.given.get("pipeline_model_parallel_layout") or any(map(job.given.get, chunked)):
        return ""
    return f", as the layout has {chunks_of(job) * pipeline_size(job)} stages"


def picture(stages: Sequence[Stage], size: int) -> list[str]:
    """A line for each rank and a column for each chunk. Of long pipelines and many chunks, only both ends are shown."""
    chunks = len(stages) // size
    cells = [[stages[chunk * size + rank].text() for chunk in range(chunks)] for rank in range(size)]
    heads = [f"chunk {chunk}" if chunks > 1 else "layers" for chunk in range(chunks)]
    shown = range(size) if size <= _RANKS else [*range(_SHOWN), -1, *range(size - _SHOWN, size)]
    wide = [max(len(heads[k]), *(len(row[k]) for row in cells)) for k in range(chunks)]
    keeps = chunks
    while keeps > 2 and 8 + sum(wide[: keeps - 1]) + wide[-1] + 2 * (keeps + 1) > _WIDTH:
        keeps -= 1
    columns = [*range(chunks)] if keeps == chunks else [*range(keeps - 1), -1, chunks - 1]
    lines = [_line("rank", columns, heads, wide)]
    for rank in shown:
        lines.append("..." if rank < 0 else _line(f"{rank}", columns, cells[rank], wide))
    return lines


def _line(first: str, columns: Sequence[int], row: Sequence[str], wide: Sequence[int]) -> str:
    parts = ["..." if column < 0 else row[column].ljust(wide[column]) for column in columns]
    return f"{first:<5} {'  '.join(parts)}".rstrip()


def _placed_by(job: Job) -> str:
    used = [job.spell(name) for name in _PLACING if job.get(name)]
    return f"placed by {' and '.join(used)}" if used else f"placed evenly; {job.spell(_PLACING[0])} changes that"


def _silent(job: Job) -> Iterator[Finding]:
    """A finding for each setting that Megatron changes or ignores. If Megatron's own checks have run, reading has found
    the settings that they change."""
    size = pipeline_size(job)
    chunks = chunks_of(job)
    wanted = bool(job.given.get("overlap_p2p_comm") or job.given.get("overlap_p2p_communication"))
    if chunks == 1 and size > 1 and wanted:
        yield Finding(
            "overlap-without-virtual-stages",
            RISK,
            "Megatron turns the overlap of transfers off, because each rank has one chunk",
            f"{job.spell('num_virtual_stages_per_pipeline_rank')} 2, or install(overlap_p2p_comm=True), which overlaps "
            "without virtual stages",
            ("overlap_p2p_comm",),
        )
    group = "microbatch_group_size_per_vp_stage"
    if chunks == 1 and job.given.get(group):
        yield Finding("group-without-chunks", NOTE, f"{job.spell(group)} has no effect: each rank has one chunk")
    yield from _left_layout(job)
    yield from _rounded_batch(job)
    if not job.validated:
        yield from _turned_off(job)


def _left_layout(job: Job) -> Iterator[Finding]:
    """A finding if only the layout determines the number of chunks: the layout may have been made for another pipeline.

    This is for Megatron-Bridge, which has a setting for the number. With Megatron's own flags, a layout excludes it.
    """
    said = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    if job.framework != "megatron-bridge" or chunks_of(job) == 1 or any(map(job.given.get, said)):
        return
    named = "pipeline_model_parallel_layout"
    if job.given.get(named) is not None:
        size = pipeline_size(job)
        chunks = chunks_of(job)
        yield Finding(
            "chunks-by-a-layout",
            RISK,
            f"{job.spell(named)} has {size * chunks} stages, so each of the {size} pipeline ranks has {chunks} chunks, "
            "although no setting gives this number; the layout may have been made for another number of ranks",
            f"{job.spell(said[0])} {chunks} if this is intended, or a layout of {size} stages",
            (named, "pipeline_model_parallel_size"),
        )


def _rounded_batch(job: Job) -> Iterator[Finding]:
    batch = batch_of(job)
    each = int(job.get("micro_batch_size", 1)) * int(job.get("data_parallel_size", 1))
    if job.get("decrease_batch_size_if_needed") and isinstance(batch, int) and each and batch % each:
        named = job.spell("global_batch_size")
        yield Finding(
            "rounded-batch",
            RISK,
            f"Megatron rounds {named} {batch} down to {batch // each * each}, a multiple of {each}",
            f"{named} {batch // each * each or each} or {(batch // each + 1) * each}",
            ("global_batch_size", "decrease_batch_size_if_needed"),
        )


def _turned_off(job: Job) -> Iterator[Finding]:
    """A finding for each setting that Megatron's checks would change. If they have run, reading has found these."""
    if job.given.get("sequence_parallel") and int(job.get("tensor_model_parallel_size", 1)) == 1:
        named = job.spell("sequence_parallel")
        if job.framework != "megatron-bridge":  # Megatron-Bridge refuses it; "start" reports that
            text = f"{named} has no effect: there is one tensor-parallel rank"
            yield Finding("sequence-parallelism-alone", NOTE, text, "", ("sequence_parallel",))
    layers = job.given.get("num_layers")
    pattern = job.get("hybrid_layer_pattern")
    if pattern and isinstance(layers, int):
        counted = len(HybridPattern.read(pattern).layers)
        if counted != layers:
            text = (
                f"{job.spell('num_layers')} {layers} has no effect: {job.spell('hybrid_layer_pattern')} has {counted} "
            )
            change = f"leave {job.spell('num_layers')} out"
            yield Finding("layers-of-a-pattern", RISK, text + "layers", change, ("num_layers", "hybrid_layer_pattern"))


def _uneven(job: Job, stages: Sequence[Stage]) -> Iterator[Finding]:
    """A finding if a rank between the first and the last has more layers than another."""
    size = pipeline_size(job)
    held = [sum(len(one.layers) + one.mtp for one in stages if one.rank == rank) for rank in range(size)]
    if size > 2 and max(held[1:-1]) != min(held[1:-1]):
        most = held.index(max(held[1:-1]), 1)
        least = held.index(min(held[1:-1]), 1)
        yield Finding(
            "uneven-middle-ranks",
            NOTE,
            f"rank {most} has {held[most]} layers, rank {least} has {held[least]}; the others wait for rank {most}",
            "",
            ("pipeline_model_parallel_layout", "num_layers"),
        )
