"""Rules of batches and microbatches, and of the numbers that Megatron's schedules accept."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_pp.config.microbatch_counts import explain_microbatch_count
from megatron_pp.errors import MegatronPPError
from megatron_pp.tools.check.findings import RISK
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.rules.rule import Rule, either, nearest, set_to, whole, without
from megatron_pp.tools.check.stages import batch_of, chunks_of, microbatches_of, pipeline_size

_ANY_COUNT = "install(any_microbatch_count=True), or megatron-pp run --any-microbatch-count"


def _batch(job: Job) -> Iterator[tuple[str, str]]:
    micro = whole(job, "micro_batch_size")
    replicas = whole(job, "data_parallel_size")
    batch = batch_of(job)
    each = micro * replicas
    if not isinstance(batch, int) or not batch or not each or batch % each == 0:
        return
    rounded = bool(job.get("decrease_batch_size_if_needed"))
    if rounded and batch > each:
        return  # the section "layout" reports it
    schedule = "step_batch_size_schedule"
    named = schedule if job.get(schedule) else "global_batch_size"
    nearby = nearest(batch, each)
    nearby = f"{job.spell(named)} that begins with {nearby}" if named == schedule else set_to(job, named, nearby)
    yield (
        f"{job.spell(named)} {batch} cannot be divided by {job.spell('micro_batch_size')} {micro} "
        f"x {replicas} data-parallel ranks = {each}",
        nearby,
    )


def _rampup(job: Job) -> Iterator[tuple[str, str]]:
    """The conditions of Megatron's `RampupBatchsizeNumMicroBatchesCalculator`."""
    asked = job.get("rampup_batch_size")
    named = job.spell("rampup_batch_size")
    if not asked:
        return
    numbers = isinstance(asked, (list, tuple)) and all(str(one).isdigit() for one in asked)
    if not numbers or len(asked) != 3:
        yield f"{named} is {asked}; it must be three numbers: first batch size, increment, samples of the ramp-up", ""
        return
    first = int(asked[0])
    more = int(asked[1])
    batch = whole(job, "global_batch_size", 0)
    if batch and (first > batch or more < 1 or (batch - first) % more):
        text = f"{named} begins with {first} and adds {more}, which never reaches {job.spell('global_batch_size')} "
        fits = f"{named} {first} {batch - first} {asked[2]}" if first < batch else ""
        yield text + f"{batch}", fits
        return
    each = whole(job, "micro_batch_size") * whole(job, "data_parallel_size")
    wrong = next((one for one in (first, more) if each and one % each), None)
    if wrong is not None and not job.get("decrease_batch_size_if_needed"):
        text = f"{named} has {wrong}, which cannot be divided by {job.spell('micro_batch_size')} x data-parallel ranks"
        yield f"{text} = {each}", f"{nearest(wrong, each)} instead of {wrong}"


def _interleaved(job: Job) -> Iterator[tuple[str, str]]:
    """The errors that Megatron's interleaved schedule raises in the first step (`get_schedule_table`,
    `schedules.py`)."""
    size = pipeline_size(job)
    chunks = chunks_of(job)
    if size == 1 or chunks == 1 or job.on_engine:
        return
    try:
        count = microbatches_of(job)
    except MegatronPPError:
        return
    group = whole(job, "microbatch_group_size_per_vp_stage", size)
    named = job.spell("microbatch_group_size_per_vp_stage")
    if group < size or group > count:
        most = f"at least the pipeline's {size} ranks and at most the {count} microbatches of a step"
        change = set_to(job, "microbatch_group_size_per_vp_stage", [size]) if size <= count else ""
        change = change or set_to(job, "global_batch_size", [size * whole(job, "global_batch_size") // count])
        text = f"a chunk's group has {group} microbatches ({named}); Megatron's schedule needs {most}"
        yield text, change if group < size <= count else either(change, _ANY_COUNT)
    elif 0 < count % group < size:
        text = f"a step has {count} microbatches in groups of {group}; the last group has {count % group}, but "
        text += f"Megatron's schedule needs at least {size}, the number of pipeline ranks"
        each = whole(job, "global_batch_size") // count
        below = count // group * group
        batches = set_to(job, "global_batch_size", [below * each, (below + group) * each])
        yield text, either(batches, _ANY_COUNT)


def _counts_of_engine(job: Job) -> Iterator[tuple[str, str]]:
    """The numbers that `install()` refuses, unless a setting allows them."""
    size = pipeline_size(job)
    chunks = chunks_of(job)
    if not job.on_engine or size == 1 or chunks == 1:
        return
    try:
        group = whole(job, "microbatch_group_size_per_vp_stage", size)
        count = explain_microbatch_count(microbatches_of(job), size, chunks, group)
    except MegatronPPError:
        return  # other sections report it
    if not count.full_speed:
        text = f"{count.sentence}; install() refuses such a number unless any_microbatch_count is set"
        yield text, f"{_ANY_COUNT}, if it is not set yet"


def _two_ranks(job: Job) -> Iterator[tuple[str, str]]:
    if job.on_engine:
        return
    if pipeline_size(job) == 2 and chunks_of(job) > 1 and not job.get("overlap_p2p_comm", False):
        yield (
            "Megatron's interleaved schedule on 2 ranks needs the overlap of transfers",
            "leave --no-overlap-p2p-communication out",
        )


def _transfers(job: Job) -> Iterator[tuple[str, str]]:
    """The conditions of Megatron's configs and its interleaved schedule on settings of transfers."""
    overlapped = bool(job.get("overlap_p2p_comm"))
    batched = bool(job.get("batch_p2p_comm"))
    if chunks_of(job) > 1 and overlapped and batched:
        yield (
            f"{job.spell('overlap_p2p_comm')} and {job.spell('batch_p2p_comm')} are both on; Megatron's interleaved "
            "schedule accepts only one of them",
            f"{job.spell('batch_p2p_comm')} false",
        )
    flush = "overlap_p2p_comm_warmup_flush"
    if job.get(flush) and (not overlapped or batched):
        needed = f"{job.spell('overlap_p2p_comm')} without {job.spell('batch_p2p_comm')}"
        text = f"{job.spell(flush)} needs {needed}"
        chunked = set_to(job, "num_virtual_stages_per_pipeline_rank", [2]) if chunks_of(job) == 1 else ""
        yield text, either(chunked, without(job, flush))


BATCHES = (
    Rule("global-batch", ("global_batch_size", "micro_batch_size", "data_parallel_size"), _batch),
    Rule("batch-size-rampup", ("rampup_batch_size",), _rampup),
    Rule(
        "microbatches-of-the-last-group",
        ("global_batch_size", "microbatch_group_size_per_vp_stage", "pipeline_model_parallel_size"),
        _interleaved,
    ),
    Rule(
        "microbatches-of-this-engine",
        ("global_batch_size", "microbatch_group_size_per_vp_stage"),
        _counts_of_engine,
        RISK,
    ),
    Rule("interleaved-on-two-ranks", ("overlap_p2p_comm", "pipeline_model_parallel_size"), _two_ranks),
    Rule("transfers", ("overlap_p2p_comm", "batch_p2p_comm", "overlap_p2p_comm_warmup_flush"), _transfers),
)
