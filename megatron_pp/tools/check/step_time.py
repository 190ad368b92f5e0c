"""How long a step takes by an estimate from sizes and data sheets: bubble, imbalance of stages, exposed transfers, and
settings that are better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.errors import LayoutError, MegatronPPError
from megatron_pp.plan.orders import INTERLEAVED, ONE_F_ONE_B
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tools.advise.gpus import Gpu
from megatron_pp.tools.check.findings import NOTE, Finding, Section
from megatron_pp.tools.check.job import Job
from megatron_pp.tools.check.memory import without_vocabulary
from megatron_pp.tools.check.priced import Priced, priced
from megatron_pp.tools.check.stages import NoBatchError, chunks_of, microbatches_of, pipeline_size

_PILOTS = (2, 4)  # estimates are of these multiples of P microbatches; more microbatches go on as these
_GAIN = 0.01  # a better setting saves this share of the step at least
_BETTER = 3
_IMBALANCE = 0.05  # of the mean, by which the busiest rank has to be above it to be named
_CHUNKS = (1, 2, 3, 4, 5, 6, 8)
_WORK = 4096  # forwards of a pilot at most: a check takes seconds
_OURS = {False: ("zb_h1",), True: ("interleaved_zb",)}
"""Whether ranks have several chunks -> schedules of this engine that Megatron does not have."""


@dataclass(frozen=True)
class Timed:
    """``step``: ms; ``bubble``, ``exposed``, ``late``: shares of all ranks' time without compute, waiting for messages
    in flight, and for peers; ``busy``: ms of compute of each rank; ``peak``: GB of the fullest rank."""

    step: float
    bubble: float
    exposed: float
    late: float
    busy: tuple[float, ...]
    peak: float


def section(job: Job, gpu: Gpu | None) -> Section:
    if gpu is None:
        return Section("time", ("not looked at; --gpu NAME says which card the job runs on",))
    try:
        now = timed(job, gpu)
    except NoBatchError as error:
        return Section("time", (f"not estimated: {error}",))
    except LayoutError:
        return Section("time", ("not estimated: see Start",))
    except MegatronPPError as error:
        return Section("time", (f"cannot be estimated: {error}",))
    lines = [
        f"a step takes {_seconds(now.step)} by an estimate from sizes and data sheets, without data parallelism and "
        "the optimizer",
        f"bubble {now.bubble:.1%} of all ranks' time ({job.spell('global_batch_size')}, "
        f"{job.spell('num_virtual_stages_per_pipeline_rank')}), waits for transfers {now.exposed:.1%}",
    ]
    lines += [*without_vocabulary(job), *_imbalance(job, gpu, now)]
    better = [*_better(job, gpu, now)]
    findings = tuple(
        Finding("faster-setting", NOTE, f"{one.saved:.1%} shorter step: {one.text}", one.change, one.settings)
        for one in better
    )
    if not better:
        lines.append(
            "none of the settings that were tried is faster (chunks, embedding and loss as layers, zero bubble)"
        )
    data = {
        "step_ms": now.step,
        "bubble": now.bubble,
        "exposed": now.exposed,
        "waits_for_peers": now.late,
        "busy_ms": list(now.busy),
        "better": [{"step_ms": one.step, "change": one.change} for one in better],
    }
    return Section("time", tuple(lines), findings, data)


def timed(job: Job, gpu: Gpu, schedule: str = "") -> Timed:
    """Estimated from two shorter steps where the step has many microbatches."""
    count, size = microbatches_of(job), pipeline_size(job)
    group = int(job.get("microbatch_group_size_per_vp_stage") or size)
    few, many = (pilot * max(size, group) for pilot in _PILOTS)
    if count <= many:
        return _simulated(priced(job, gpu, schedule), gpu)
    short, long = (_simulated(priced(job, gpu, schedule, most), gpu) for most in (few, many))
    more = (count - many) / (many - few)
    step = long.step + more * (long.step - short.step)

    def grown(of: str) -> float:
        """A share of the ranks' time, of the longer step."""
        parts = [getattr(one, of) * one.step for one in (short, long)]
        return max(0.0, parts[1] + more * (parts[1] - parts[0])) / step

    busy = tuple(b + more * (b - a) for a, b in zip(short.busy, long.busy, strict=True))
    return Timed(step, grown("bubble"), grown("exposed"), grown("late"), busy, long.peak)


def _simulated(found: Priced, gpu: Gpu) -> Timed:
    result = simulate(found.plan, found.cut.costs, found.network(gpu), found.plan.spec.device)
    whole = result.makespan * len(result.busy)
    exposed = sum(one.transfer + one.queued for one in result.waits) / whole
    late = sum(one.peer_late for one in result.waits) / whole
    return Timed(result.makespan, result.bubble_share, exposed, late, tuple(result.busy), max(found.cut.peaks))


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"


def _imbalance(job: Job, gpu: Gpu, now: Timed) -> Iterator[str]:
    """The rank that the others wait for, and its dearest layer."""
    mean = sum(now.busy) / len(now.busy)
    rank = max(range(len(now.busy)), key=now.busy.__getitem__)
    if now.busy[rank] <= mean * (1 + _IMBALANCE):
        yield "ranks are balanced: the busiest computes no more than 5% longer than the mean"
        return
    found = priced(job, gpu, most=2 * pipeline_size(job))
    layers = [one for stage in found.plan.placement.stages[rank] for one in found.cut.stages[stage]]
    dearest = max(layers, key=lambda one: one.work)
    yield (
        f"rank {rank} computes {now.busy[rank] / mean - 1:.0%} longer than the mean; its dearest part is the "
        f"{dearest.kind} ({dearest.work:.3g} ms a microbatch)"
    )


@dataclass(frozen=True)
class _Better:
    step: float
    saved: float
    text: str
    change: str
    settings: tuple[str, ...]


def _better(job: Job, gpu: Gpu, now: Timed) -> list[_Better]:
    """At most three settings that fit the card and are faster, the fastest first."""
    found = []
    for text, change, args, schedule in _tried(job):
        try:
            other = timed(replace(job, args={**job.args, **args}), gpu, schedule)
        except MegatronPPError:
            continue
        fits = other.peak <= max(gpu.memory, now.peak)
        if fits and other.step < now.step * (1 - _GAIN):
            found.append(_Better(other.step, 1 - other.step / now.step, text, change, tuple(args)))
    return sorted(found, key=lambda one: one.step)[:_BETTER]


def _tried(job: Job) -> Iterator[tuple[str, str, Mapping[str, Any], str]]:
    """What it is, how it is asked for, the settings, and the schedule where it is not Megatron's."""
    size, chunks = pipeline_size(job), chunks_of(job)
    if size == 1:
        return
    for name in _OURS[chunks > 1]:
        run = f"install(pipeline_schedule={name!r}), or megatron-pp run --pipeline-schedule {name}"
        yield f"zero bubble, {name}", run, {}, name
    if chunks == 1 and not job.get("overlap_p2p_comm"):
        run = "install(overlap_p2p_comm=True), or megatron-pp run --overlap-p2p-comm"
        yield "overlapped transfers", run, {"overlap_p2p_comm": True}, ONE_F_ONE_B
    placed = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "hybrid_layer_pattern")
    if any(map(job.get, (*placed, "decoder_last_pipeline_num_layers"))):
        return
    virtual = job.spell("num_virtual_stages_per_pipeline_rank")
    for number in _CHUNKS:
        if number != chunks and number * size * size * _PILOTS[-1] <= _WORK:
            args = {"virtual_pipeline_model_parallel_size": number, "overlap_p2p_comm": number > 1}
            yield f"{number} chunks a rank", f"{virtual} {number}", args, INTERLEAVED if number > 1 else ONE_F_ONE_B
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    if not any(map(job.get, ends)):
        yield "embedding and loss as layers", " ".join(map(job.spell, ends)), dict.fromkeys(ends, True), ""
