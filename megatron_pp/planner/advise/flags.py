"""The flags that ask for a recommended pipeline: ours, for ``megatron-pp run``, and Megatron's."""

from typing import Any

from megatron_pp.plan.ir.spec import OVERLAP, PLAIN
from megatron_pp.plan.orders import INTERLEAVED, ONE_F_ONE_B
from megatron_pp.planner.advise.evaluate import Outcome
from megatron_pp.planner.advise.layout import layout_text
from megatron_pp.planner.advise.model import PART
from megatron_pp.planner.advise.question import Question

MEASURED_FILE = "advised.json"


def our_settings(outcome: Outcome, measured: str = MEASURED_FILE) -> dict[str, Any]:
    """Fields of our config, and but for slices settings of ``megatron-pp run`` and keywords of ``install``.
    ``measured``: where a search reads its costs.
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
    """Of ``megatron-pp run``."""
    flags = []
    for name, value in our_settings(outcome, measured).items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def megatron_models_run(outcome: Outcome) -> bool:
    """Whether Megatron's models can: they run sequences whole, and have their output layer on the last stage."""
    return outcome.candidate.slices == 1 and not outcome.candidate.family.barriers


def megatron_flags(question: Question, outcome: Outcome) -> list[str]:
    """Arguments of Megatron's scripts. Its one number for recomputed layers, the same on all stages, is the largest.
    Where layers are not known, nothing is said of recomputation.
    """
    chosen, fit = outcome.candidate, outcome.fit
    flags = ["--pipeline-model-parallel-size", str(question.pipeline_size)]
    layout = layout_of(outcome)
    if layout:
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
    """Whether Megatron's own schedules can run it."""
    return outcome.candidate.schedule in (ONE_F_ONE_B, INTERLEAVED)


def layout_of(outcome: Outcome) -> str:
    """Megatron's ``pipeline_model_parallel_layout``; empty where the layers are not known."""
    if outcome.fit is None or any(one.kind == PART for layers in outcome.fit.stages for one in layers):
        return ""
    return layout_text(outcome.fit.stages)
