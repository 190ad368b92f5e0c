"""The section "time": the time of a step, estimated from sizes and data sheets; its bubble, imbalance and exposed
transfers; and faster settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_pp.errors import MegatronPPError
from megatron_pp.plan.orders import INTERLEAVED, ONE_F_ONE_B
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tools.advise.layers.gpus import Gpu
from megatron_pp.tools.advise.pilots import PILOTS, continued
from megatron_pp.tools.check.findings import NOTE, Finding, Section
from megatron_pp.tools.check.jobs.job import TORCHTITAN, Job
from megatron_pp.tools.check.memory import without_vocabulary
from megatron_pp.tools.check.priced import Priced, priced, why_not_priced
from megatron_pp.tools.check.rules import RULES
from megatron_pp.tools.check.stages import chunks_of, microbatches_of, pipeline_size

_FEWER = (1, 2)
_LONG = 32
"""The pilots of pipelines with at least ``_LONG`` ranks. They are shorter, as P microbatches are many there."""
_GAIN = 0.01  # a faster setting saves at least this share of the step
_BETTER = 3
_IMBALANCE = 0.05  # the busiest rank is named if it computes this share longer than the mean
_CHUNKS = (1, 2, 3, 4, 5, 6, 8)
_WORK = 20000  # most forwards that are simulated for other settings, so that a check takes seconds
_DEAR = {"zb_h1": 1.6, "interleaved_zb": 1.6, ONE_F_ONE_B: 3.0}  # time to simulate a forward; Megatron's schedule: 1
_OURS = {False: ("zb_h1",), True: ("interleaved_zb",)}
"""Whether ranks have several chunks -> the schedules that this engine has and Megatron does not."""
_WHOLE = (
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "fine_grained_activation_offloading",
    "enable_cuda_graph",
)
"""Settings that need whole backwards in Megatron's order, as CUDA graphs do. `install()` refuses them with the
schedules
of ``_OURS``."""


@dataclass(frozen=True)
class Timed:
    """The estimated times of a step.

    step     ms of the step
    bubble   share of all ranks' time without compute
    exposed  share of all ranks' time in waits for messages in flight
    late     share of all ranks' time in waits for peers
    busy     ms of compute of each rank
    peak     GB of the fullest rank
    """

    step: float
    bubble: float
    exposed: float
    late: float
    busy: tuple[float, ...]
    peak: float


def section(job: Job, gpu: Gpu | None) -> Section:
    if gpu is None:
        return Section("time", ("not estimated; name the card of the job by --gpu NAME",))
    try:
        now = timed(job, gpu)
    except MegatronPPError as error:
        return Section("time", (why_not_priced(error),))
    lines = [
        f"a step takes {_seconds(now.step)}, estimated from sizes and data sheets, without data parallelism and the "
        "optimizer",
        f"bubble {now.bubble:.1%} of all ranks' time ({job.spell('global_batch_size')}, "
        f"{job.spell('num_virtual_stages_per_pipeline_rank')}), waits for transfers {now.exposed:.1%}",
    ]
    lines += [*without_vocabulary(job), *_imbalance(job, gpu, now)]
    tried = _looked_at(job, gpu, now)
    better = tried.better()
    findings = tuple(
        Finding("faster-setting", NOTE, f"{one.saved:.1%} shorter step: {one.text}", one.change, one.settings)
        for one in better
    )
    lines += tried.lines(gpu)
    data = {
        "step_ms": now.step,
        "bubble": now.bubble,
        "exposed": now.exposed,
        "waits_for_peers": now.late,
        "busy_ms": list(now.busy),
        "better": [{"step_ms": one.step, "change": one.change} for one in better],
        "tried": [one.text for one in tried.fast + tried.slow + tried.large],
        "not_tried": [*tried.left],
    }
    return Section("time", tuple(lines), findings, data)


def timed(job: Job, gpu: Gpu, schedule: str = "") -> Timed:
    """The times of a step of the job. If it has many microbatches, they are extrapolated from two shorter steps."""
    count = microbatches_of(job)
    size = pipeline_size(job)
    group = int(job.get("microbatch_group_size_per_vp_stage") or size)
    few, many = (pilot * max(size, group) for pilot in _pilots(size))
    if count <= many:
        return _simulated(priced(job, gpu, schedule), gpu)
    short, long = (_simulated(priced(job, gpu, schedule, most), gpu) for most in (few, many))
    step = continued(short.step, long.step, few, many, count)

    def grown(of: str) -> float:
        """A share of the ranks' time, extrapolated to the whole step."""
        shorter, longer = (getattr(one, of) * one.step for one in (short, long))
        return max(0.0, continued(shorter, longer, few, many, count)) / step

    busy = tuple(continued(a, b, few, many, count) for a, b in zip(short.busy, long.busy, strict=True))
    return Timed(step, grown("bubble"), grown("exposed"), grown("late"), busy, long.peak)


def _pilots(size: int) -> tuple[int, int]:
    return _FEWER if size >= _LONG else PILOTS


def _simulated(found: Priced, gpu: Gpu) -> Timed:
    result = simulate(found.plan, found.cut.costs, found.network(gpu), found.plan.spec.device)
    whole = result.makespan * len(result.busy)
    exposed = sum(one.transfer + one.queued for one in result.waits) / whole
    late = sum(one.peer_late for one in result.waits) / whole
    return Timed(result.makespan, result.bubble_share, exposed, late, tuple(result.busy), max(found.cut.peaks))


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"


def _imbalance(job: Job, gpu: Gpu, now: Timed) -> Iterator[str]:
    """A line that names the rank with the most compute, and the kind of layer that causes it."""
    mean = sum(now.busy) / len(now.busy)
    rank = max(range(len(now.busy)), key=now.busy.__getitem__)
    if now.busy[rank] <= mean * (1 + _IMBALANCE):
        yield "ranks are balanced: the busiest computes no more than 5% longer than the mean"
        return
    found = priced(job, gpu, most=2 * pipeline_size(job))
    kind, more = _surplus(found, rank)
    yield (
        f"rank {rank} computes {now.busy[rank] / mean - 1:.0%} longer than the mean, most of it by the {kind} "
        f"({more:.3g} ms a microbatch more than the mean of ranks)"
    )


def _surplus(found: Priced, rank: int) -> tuple[str, float]:
    """The kind of layer whose work on a rank exceeds the mean of all ranks most, and by how many ms."""
    works: dict[str, list[float]] = {}
    for other, row in enumerate(found.plan.placement.stages):
        for layer in (one for stage in row for one in found.cut.stages[stage]):
            works.setdefault(layer.kind, [0.0] * len(found.plan.placement.stages))[other] += layer.work
    surplus = {kind: work[rank] - sum(work) / len(work) for kind, work in works.items()}
    kind = max(surplus, key=surplus.__getitem__)
    return kind, surplus[kind]


@dataclass(frozen=True)
class _Better:
    step: float
    saved: float
    text: str
    change: str
    settings: tuple[str, ...]


@dataclass
class _Tried:
    """Other settings: faster ones that fit the card, faster ones that need more memory, slower ones, and the names of
    settings that were not simulated."""

    fast: list[_Better] = field(default_factory=list)
    large: list[_Better] = field(default_factory=list)
    slow: list[_Better] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def better(self) -> list[_Better]:
        """The faster settings that fit: at most three, the fastest first."""
        return sorted(self.fast, key=lambda one: one.step)[:_BETTER]

    def lines(self, gpu: Gpu) -> Iterator[str]:
        slow, large = ([one.text for one in found] for found in (self.slow, self.large))
        if slow:
            yield f"not faster by {_GAIN:.0%}: {', '.join(slow)}"
        if large:
            yield f"faster, but estimated to need more than the card's {gpu.memory:g} GB: {', '.join(large)}"
        if self.left:
            yield f"not simulated, because it takes long: {', '.join(self.left)}; megatron-pp advise simulates them"


def _looked_at(job: Job, gpu: Gpu, now: Timed) -> _Tried:
    """The results of other settings that Megatron accepts. Those that are fast to simulate are tried first."""
    found = _Tried()
    work = 0.0
    usable = [one for one in _tried(job) if not _refused(job, one[2])]
    for text, change, args, schedule in sorted(usable, key=lambda one: _work_of(job, *one[2:])):
        other = replace(job, args={**job.args, **args})
        work += _work_of(job, args, schedule)
        if work > _WORK:
            found.left.append(text)
            continue
        try:
            timing = timed(other, gpu, schedule)
        except MegatronPPError:
            continue
        one = _Better(timing.step, 1 - timing.step / now.step, text, change, tuple(args))
        if timing.step >= now.step * (1 - _GAIN):
            found.slow.append(one)
        else:
            (found.fast if timing.peak <= max(gpu.memory, now.peak) else found.large).append(one)
    return found


def _refused(job: Job, args: Mapping[str, Any]) -> bool:
    """Whether Megatron refuses the changed job by a rule that the job keeps now."""
    changed = replace(job, args={**job.args, **args})
    return any([*rule.broken(changed)] and not [*rule.broken(job)] for rule in RULES)


def _work_of(job: Job, args: Mapping[str, Any], schedule: str) -> float:
    """The work to simulate a setting, in forwards of Megatron's schedule."""
    changed = replace(job, args={**job.args, **args})
    size = pipeline_size(changed)
    group = max(size, int(changed.get("microbatch_group_size_per_vp_stage") or size))
    counts = {min(pilot * group, microbatches_of(changed)) for pilot in _pilots(size)}
    dear = _DEAR.get(schedule, 1.0) if args.get("virtual_pipeline_model_parallel_size") is None else 1.0
    return chunks_of(changed) * size * sum(counts) * dear


def _tried(job: Job) -> Iterator[tuple[str, str, Mapping[str, Any], str]]:
    """Settings to try: (name, how the user sets it, the changed settings, the schedule or "" for Megatron's)."""
    size = pipeline_size(job)
    chunks = chunks_of(job)
    if size == 1 or job.framework == TORCHTITAN:  # torchtitan's settings have other names
        return
    for name in () if any(map(job.get, _WHOLE)) or job.get("cuda_graph_impl", "none") != "none" else _OURS[chunks > 1]:
        run = f"install(pipeline_schedule={name!r}), or megatron-pp run --pipeline-schedule {name}"
        yield f"zero bubble, {name}", run, {}, name
    if chunks == 1 and not job.get("overlap_p2p_comm"):
        run = "install(overlap_p2p_comm=True), or megatron-pp run --overlap-p2p-comm"
        yield "overlapped transfers", run, {"overlap_p2p_comm": True}, ONE_F_ONE_B
    placed = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "hybrid_layer_pattern")
    if any(map(job.get, (*placed, "decoder_last_pipeline_num_layers"))):
        return
    virtual = job.spell("num_virtual_stages_per_pipeline_rank")
    other = "num_layers_per_virtual_pipeline_stage"
    instead = f" instead of {job.spell(other)}" if job.given.get(other) else ""
    for number in _CHUNKS:
        if number != chunks:
            args = {"virtual_pipeline_model_parallel_size": number, "overlap_p2p_comm": number > 1}
            schedule = INTERLEAVED if number > 1 else ONE_F_ONE_B
            yield f"{number} chunk{'s' * (number > 1)} a rank", f"{virtual} {number}{instead}", args, schedule
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    if not any(map(job.get, ends)):
        yield "embedding and loss as layers", " ".join(map(job.spell, ends)), dict.fromkeys(ends, True), ""
