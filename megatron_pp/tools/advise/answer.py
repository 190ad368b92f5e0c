"""Writes the advisor's answer: the recommendation in one line, its numbers, why other schedules lose, and the flags to
paste: ours, for ``megatron-pp run``, and Megatron's.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from megatron_pp.plan.costs.communicators import measured_at_most
from megatron_pp.plan.ir.spec import OVERLAP, PLAIN
from megatron_pp.plan.orders import INTERLEAVED, ONE_F_ONE_B
from megatron_pp.tools.advise.candidates import Candidate, Estimate
from megatron_pp.tools.advise.evaluate import Outcome
from megatron_pp.tools.advise.fit import layout_text
from megatron_pp.tools.advise.layers.gpus import GB
from megatron_pp.tools.advise.microbatch_order import MicrobatchOrder
from megatron_pp.tools.advise.model import EMBEDDING, LOSS, PART, STEPS, is_hybrid
from megatron_pp.tools.advise.pipeline_search import Findings
from megatron_pp.tools.advise.question import Question
from megatron_pp.tools.advise.rounding import rounded

MEASURED_FILE = "advised.json"


def our_settings(outcome: Outcome, measured: str = MEASURED_FILE) -> dict[str, Any]:
    """The fields of our config. Except slices they are also settings of ``megatron-pp run`` and keywords of
    ``install``. ``measured``: the file from which a search reads its costs.
    """
    chosen = outcome.candidate
    settings: dict[str, Any] = {"pipeline_schedule": chosen.schedule}
    if chosen.searches:
        settings["pipeline_measured"] = measured
    if chosen.policy == PLAIN:
        settings |= {"overlap_p2p_comm": False, "batch_p2p_comm": False}
    else:
        settings["overlap_p2p_comm" if chosen.policy == OVERLAP else "batch_p2p_comm"] = True
    if chosen.group_size:
        settings["microbatch_group_size_per_vp_stage"] = chosen.group_size
    if chosen.offload_chunks:
        settings |= {"offload_chunks": chosen.offload_chunks, "offload_slots": chosen.offload_slots}
    if chosen.slices > 1:
        settings["sequence_slices"] = chosen.slices
    return settings


def our_flags(outcome: Outcome, measured: str = MEASURED_FILE) -> list[str]:
    """The flags for ``megatron-pp run``."""
    flags = []
    for name, value in our_settings(outcome, measured).items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def megatron_models_run(outcome: Outcome) -> bool:
    """Whether Megatron's models can run the plan: it has whole sequences, and the output layer is on the last stage."""
    return outcome.candidate.slices == 1 and not outcome.candidate.family.barriers


def megatron_flags(question: Question, outcome: Outcome) -> list[str]:
    """The arguments for Megatron's scripts. Megatron has one number of recomputed layers for all stages, so the largest
    is used. If layers are not known, there are no arguments for recomputation.
    """
    chosen = outcome.candidate
    fit = outcome.fit
    flags = ["--pipeline-model-parallel-size", str(question.pipeline_size)]
    layout = layout_of(outcome)
    if layout and fit is not None and any(is_hybrid(layers) for layers in fit.stages):
        flags += ["--hybrid-layer-pattern", layout + question.model(chosen.micro_batch).mtp_pattern]
    elif layout:
        flags += ["--pipeline-model-parallel-layout", layout]
    elif chosen.num_chunks > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(chosen.num_chunks)]
    flags += ["--micro-batch-size", str(chosen.micro_batch), "--global-batch-size", str(question.global_batch)]
    if chosen.group_size:
        flags += ["--microbatch-group-size-per-virtual-pipeline-stage", str(chosen.group_size)]
    if runs_in_megatron(outcome) and chosen.num_chunks > 1 and chosen.policy != OVERLAP and question.pipeline_size > 2:
        flags.append("--no-overlap-p2p-communication")
    if fit is not None and any(fit.recomputed) and layout:
        most = str(max(fit.recomputed))
        flags += ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", most]
    return flags


def runs_in_megatron(outcome: Outcome) -> bool:
    """Whether Megatron's own schedules can run the plan."""
    return outcome.candidate.schedule in (ONE_F_ONE_B, INTERLEAVED)


def layout_of(outcome: Outcome) -> str:
    """Megatron's ``pipeline_model_parallel_layout``; empty if the layers are not known."""
    if outcome.fit is None or any(one.kind == PART for layers in outcome.fit.stages for one in layers):
        return ""
    return layout_text(outcome.fit.stages)


_CAUSES = ("waits for late peers", "waits for messages in flight", "waits behind other messages")
_SMALL = 0.002  # smaller differences of shares are not mentioned


def in_one_line(question: Question, outcome: Outcome) -> str:
    """The recommendation: ``zb_v: V=2 (v placement), M=64 microbatches of 1, overlap, ...``."""
    chosen = outcome.candidate
    grouped = chosen.family.grouped and chosen.num_chunks > 1
    parts = (
        f"{chosen.schedule}: V={chosen.num_chunks} ({chosen.family.placement} placement)",
        f"M={chosen.num_microbatches} microbatches of {chosen.micro_batch}",
        f"groups of {chosen.shape(question.pipeline_size).group_size}" if grouped else "",
        chosen.policy,
        f"sequences in {chosen.slices} slices" if chosen.slices > 1 else "",
        f"layers {_layers(outcome)}",
        _recomputed_in_words(outcome),
        f"{chosen.offload_chunks} of {chosen.num_chunks} chunks offloaded"
        if chosen.offload_chunks
        else "nothing offloaded",
    )
    return ", ".join(filter(None, parts))


def _layers(outcome: Outcome) -> str:
    stages = outcome.fit.stages if outcome.fit is not None else ()
    if layout_of(outcome):
        return ",".join(map(str, _counts(stages) or ()))
    works = {round(sum(one.work for one in layers), 9) for layers in stages}
    return "in equal shares" if len(works) <= 1 else "as given"


def _recomputed_in_words(outcome: Outcome) -> str:
    fit = outcome.fit
    if fit is None or not any(fit.recomputed):
        return "nothing recomputed"
    if layout_of(outcome):
        return f"recomputed layers {','.join(map(str, fit.recomputed))}"
    return f"recomputed share of each stage {','.join(f'{count / STEPS:.0%}' for count in fit.recomputed)}"


def sentences(question: Question, outcome: Outcome) -> list[str]:
    """The predicted step, its distance from the bound, memory, throughput."""
    fit = outcome.fit
    bound = outcome.bound
    lines = [f"step {rounded(outcome.step):.4g} ms, bubble {outcome.bubble:.1%}"]
    if bound is not None:
        within = f"within {outcome.excess:.1%} of the bound" if outcome.excess > 5e-4 else "at the bound"
        lines[0] += f"; {within}, {rounded(bound.step):.4g} ms ({bound.reason}; this placement and these stages)"
    if fit is not None:
        memory = ", ".join(f"{peak:.3g}" for peak in fit.peaks)
        host = (
            f"; {outcome.on_host:.3g} GB of host memory, at most {outcome.pinned:.3g} pinned" if outcome.on_host else ""
        )
        bare = "" if any(fit.static) else "; parameters, gradients and optimizer states not counted (--static-gb)"
        taken = max(_taken(question, outcome))
        outside = f", {taken:.2g} of it for communicators and the CUDA context" if taken else ""
        lines.append(f"memory of each rank {memory} GB, of {question.memory:g}{outside}{host}{bare}")
        if taken:
            lines.append(_taken_at_most(taken))
        lines += _recomputed_by_megatron(outcome)
    rates = throughput(question, outcome)
    words = {"tokens_per_second": "tokens/s", "sequences_per_second": "sequences/s"}
    said = [f"{rates[name]:,.4g} {word}" for name, word in words.items() if rates.get(name) is not None]
    if rates.get("mfu") is not None:
        said.append(f"MFU {rates['mfu']:.1%}")
    return [*lines, ", ".join(said)]


def _taken(question: Question, outcome: Outcome) -> tuple[float, ...]:
    """The GB of each rank for communicators and the CUDA context."""
    return question.taken(outcome.candidate.placement(question.pipeline_size), outcome.candidate.policy)


def _taken_at_most(taken: float) -> str:
    """How much more than the estimated ``taken`` GB was measured."""
    most = measured_at_most(taken * GB) / GB
    return f"communicators and context are estimated for NVLink; over sockets, up to {most:.2g} GB were measured"


def _recomputed_by_megatron(outcome: Outcome) -> list[str]:
    """A sentence if Megatron's flags recompute other layers than the plan."""
    if outcome.fit is None or not any(outcome.fit.recomputed):
        return []
    if not layout_of(outcome):
        return ["the flags below have no recomputation, because the layers are not known (--layers N)"]
    if rounded(outcome.flagged) == rounded(outcome.step):
        return []
    number = f"Megatron has one number of recomputed layers for all stages, {max(outcome.fit.recomputed)}"
    return [f"{number}: with it the step takes {outcome.flagged:.4g} ms"]


def throughput(question: Question, outcome: Outcome) -> dict[str, float | None]:
    """The tokens and sequences per second of all replicas, and the MFU of one device."""
    sequences = question.global_batch / outcome.step * 1e3 if outcome.step else 0.0
    flops = question.model(outcome.candidate.micro_batch).flops
    mfu = None
    if flops is not None and question.peak_flops and outcome.step:
        done = flops * outcome.candidate.num_microbatches / question.pipeline_size
        mfu = done / (outcome.step / 1e3) / question.peak_flops
    tokens = None if question.seq_length is None else sequences * question.seq_length
    return {"tokens_per_second": tokens, "sequences_per_second": sequences, "mfu": mfu}


def why_not(outcome: Outcome, best: Outcome) -> str:
    """The reason why ``outcome`` is not the recommendation."""
    slower, by_flags = (
        rounded(mine) / rounded(theirs) - 1
        for mine, theirs in ((outcome.step, best.step), (outcome.flagged, best.flagged))
    )
    if outcome.refused:
        return f"{slower:+.1%}, but {outcome.refused}" if outcome.candidate.family.barriers else outcome.refused
    if slower < 5e-4 <= by_flags:
        return f"{slower:+.1%}, but {by_flags:+.1%} by Megatron's flags, which recompute more"
    if slower < 5e-4 and rounded(outcome.peak) >= rounded(best.peak):
        return f"as fast, {outcome.peak:.3g} GB against {best.peak:.3g}"
    causes = []
    for name, mine, theirs in zip(_CAUSES, outcome.exposed, best.exposed, strict=True):
        causes.append((mine * outcome.step - theirs * best.step, name))
    causes.append((outcome.again * outcome.step - best.again * best.step, "recomputes"))
    causes.append((_work(outcome) - _work(best), "computes more on the busiest rank"))
    most = max(causes)
    cause = f": {most[1]} ({most[0] / best.step:.1%} of the step)" if most[0] > _SMALL * best.step else ""
    return f"{slower:.1%} slower{cause}"


def _work(outcome: Outcome) -> float:
    """The milliseconds that the busiest rank computes in a step, without recomputation."""
    fit = outcome.fit
    if fit is None or outcome.spec is None:
        return 0.0
    placement = outcome.candidate.placement(outcome.spec.pipeline_size)
    each = (sum(one.work for s in row for one in fit.stages[s]) for row in placement.stages)
    return max(each) * outcome.candidate.num_microbatches


def alternatives(findings: Findings) -> list[Outcome]:
    """The best outcome of each other schedule: the fastest first, then the impossible ones."""
    best = findings.best
    found: dict[tuple[str, str], Outcome] = {}
    order = [*findings.fitting, *(one for one in findings.outcomes if one.refused)]
    for one in order:
        found.setdefault((one.candidate.schedule, one.candidate.policy), one)
    return [one for one in found.values() if one is not best]


def estimated(findings: Findings) -> list[Estimate]:
    """The best first estimate of each schedule that was never built, fastest first."""
    built = {one.candidate.schedule for one in findings.outcomes if one.fit is not None}
    unseen = {*findings.not_looked_at, *findings.needless}
    left = (one for one in findings.estimates if one.candidate in unseen)
    found: dict[str, Estimate] = {}
    for one in sorted(left, key=lambda one: one.step):
        if one.candidate.schedule not in built:
            found.setdefault(one.candidate.schedule, one)
    return list(found.values())


def estimated_why(one: Estimate, best: Outcome) -> str:
    if one.candidate.is_bounded:
        least = f"no plan with these stages is faster than {one.step:.4g} ms"
        return f"not searched: {least}, {one.step / best.step - 1:+.1%}"
    return f"not built; the first estimate is {one.step / best.step - 1:+.1%}"


def as_json(findings: Findings, order: MicrobatchOrder | None = None, measured: str = MEASURED_FILE) -> dict[str, Any]:
    """The answer as a JSON value. ``order`` is that of unequal microbatches, ``measured`` the file with a search's
    costs."""
    question = findings.question
    best = findings.best
    return {
        "recommended": None if best is None else _facts(question, best, measured),
        "microbatch_order": None if order is None else asdict(order),
        "pareto": [_facts(question, one, measured) for one in findings.front],
        "alternatives": [
            {**_facts(question, one, measured), "why_not": one.refused if best is None else why_not(one, best)}
            for one in alternatives(findings)
        ],
        "cannot_be_faster": [_named(one) for one in findings.needless],
        "not_looked_at": [_named(one) for one in findings.not_looked_at],
        "least_memory_gb": None if findings.least_memory is None else findings.least_memory.peak,
        "seconds": findings.seconds,
        "cut_short": findings.cut_short,
        "interrupted": findings.interrupted,
    }


def _named(chosen: Candidate) -> dict[str, Any]:
    return {
        "schedule": chosen.schedule,
        "num_chunks": chosen.num_chunks,
        "num_microbatches": chosen.num_microbatches,
        "micro_batch_size": chosen.micro_batch,
        "group_size": chosen.group_size or None,
        "sequence_slices": chosen.slices,
        "policy": chosen.policy,
        "memory_share": chosen.memory_share,
        "offload_chunks": chosen.offload_chunks,
        "offload_slots": chosen.offload_slots if chosen.offload_chunks else None,
        "placement": chosen.family.placement,
    }


def _facts(question: Question, one: Outcome, measured: str) -> dict[str, Any]:
    facts: dict[str, Any] = {**_named(one.candidate), "refused": one.refused or None}
    if one.fit is None:
        return facts
    facts |= {
        "step_ms": one.step,
        "step_ms_by_megatron_flags": one.flagged,
        "bubble_share": one.bubble,
        **throughput(question, one),
    }
    if one.bound is not None:
        facts |= {"bound_ms": one.bound.step, "bound_reason": one.bound.reason, "excess_over_bound": one.excess}
    facts |= {
        "memory_gb": list(one.fit.peaks),
        "communicators_and_context_gb": list(_taken(question, one)),
        "host_memory_gb": one.on_host,
        "host_pinned_at_most_gb": one.pinned,
        "layout": layout_of(one) or None,
        "layers_per_stage": _counts(one.fit.stages),
        "recomputed_per_stage": _recomputed(one),
        "settings": our_settings(one, measured),
        "flags": {"megatron_pp": our_flags(one, measured), "megatron": megatron_flags(question, one)}
        if megatron_models_run(one)
        else None,
        "certificate": one.certificate,
    }
    return facts


def _counts(stages: Iterable[Iterable[Any]]) -> list[int] | None:
    kinds = [[one.kind for one in layers] for layers in stages]
    if any(PART in row for row in kinds):
        return None
    return [sum(kind not in (EMBEDDING, LOSS) for kind in row) for row in kinds]


def _recomputed(one: Outcome) -> list[float]:
    """The number of recomputed layers of each stage; the recomputed share if layers are not known."""
    counts = one.fit.recomputed if one.fit is not None else ()
    return [float(count) if layout_of(one) else count / STEPS for count in counts]
