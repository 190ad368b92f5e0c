"""Whether the plan of a job can hang, under the rules of the device, and whether `install()` runs it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from megatron_pp.errors import LayoutError, PlanError, ScheduleInputError
from megatron_pp.integrations.megatron.steps.served_configs import unserved_setting
from megatron_pp.plan.builder import verified_plan
from megatron_pp.tools.check.findings import ERROR, Finding, Section
from megatron_pp.tools.check.jobs.job import TORCHTITAN, Job
from megatron_pp.tools.check.priced import spec_of
from megatron_pp.tools.check.stages import NoBatchError, microbatches_of, pipeline_size

_PERIODS = 8
"""Microbatches of the plan that is verified at most, in those of the pipeline's ranks."""
_RULES = {
    "rendezvous": "a send ends when its receive is posted",
    "one_queue": "all that a rank issues goes through one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)",
    "any_wait": "any operation may wait for an idle device, as at a kernel's first launch",
}

_NOT_VERIFIED = "Megatron's own order is not verified here; Known faults has what is known of it."
_SERVED = "install() runs every step: no setting leaves one to Megatron's own schedule."


def section(job: Job) -> Section:
    """What `verify` says of the plan that this engine runs under `install()`, or why Megatron's own schedule runs the
    job's steps there too.
    """
    if job.framework == TORCHTITAN:
        return _of_plan(job)
    try:
        reason = handed_back(job)
    except ScheduleInputError:  # "start" says it
        return _of_plan(job)
    if reason is None:
        found = _of_plan(job)
        return replace(found, lines=(*found.lines, _SERVED))
    line = f"install() leaves the training steps to Megatron's own schedule: the engine does not serve {reason}."
    return Section("hangs", (line, _NOT_VERIFIED), (), {"verified": None, "handed_back": reason})


def handed_back(job: Job) -> str | None:
    """Why `install()` hands the training steps of a job of Megatron's back to Megatron's own schedule, by the function
    by which it decides; None where it does not. Raises ScheduleInputError for what no schedule runs.
    """
    return unserved_setting(SimpleNamespace(**job.args), bool(job.get("use_megatron_fsdp")))


def _of_plan(job: Job) -> Section:
    if pipeline_size(job) == 1:
        return Section("hangs", ("one pipeline rank sends nothing",), (), {"verified": None})
    try:
        spec = spec_of(job, most=_PERIODS * pipeline_size(job))
        plan, _ = verified_plan(spec)
    except NoBatchError as error:
        return Section("hangs", (f"no plan: {error}",), (), {"verified": None})
    except LayoutError:  # "start" says it
        return Section("hangs", ("no plan: see Start",), (), {"verified": None})
    except PlanError as error:
        found = Finding("plan-refused", ERROR, f"there is no plan for the job: {error}")
        return Section("hangs", (), (found,), {"verified": False})
    proof = plan.certificate
    lines = [f"under install() the plan {spec.describe()} cannot hang. It was verified where"]
    lines += [f"- {text}" for rule, text in _RULES.items() if rule == "rendezvous" or rule in spec.device]
    if microbatches_of(job) > spec.num_microbatches:
        lines.append(f"The job's step of {microbatches_of(job)} microbatches repeats this plan.")
    if not job.on_engine:
        lines.append(_NOT_VERIFIED)
    data = {"plan": spec.describe(), "verified": True, "certificate": proof.to_dict() if proof else None}
    return Section("hangs", tuple(lines), (), data)
