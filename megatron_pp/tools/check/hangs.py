"""The section "hangs": whether the plan of a job can hang on its device, and whether `install()` runs this plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from megatron_pp.errors import LayoutError, PlanError, ScheduleInputError
from megatron_pp.integrations.megatron.steps.served.served_configs import unserved_setting
from megatron_pp.plan.builder import verified_plan
from megatron_pp.tools.check.findings import ERROR, Finding, Section
from megatron_pp.tools.check.jobs.job import TORCHTITAN, Job
from megatron_pp.tools.check.priced import spec_of
from megatron_pp.tools.check.stages import NotGivenError, microbatches_of, pipeline_size

_PERIODS = 8
"""The plan that is verified has at most this number of microbatches per pipeline rank."""
_RULES = {
    "rendezvous": "a send does not end before its receive is posted",
    "one_queue": "all kernels and transfers of a rank go through one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)",
    "any_wait": "any operation may wait until the device is idle, as the first launch of a kernel does",
}

_NOT_VERIFIED = "Megatron's own order is not verified here; the section Known faults lists its known faults."
_SERVED = "install() runs every step: none of the settings needs Megatron's own schedule."


def section(job: Job) -> Section:
    """The result of `verify` for the plan that this engine runs under `install()`. If `install()` leaves the job's
    steps to Megatron's own schedule, the reason for that."""
    if job.framework == TORCHTITAN:
        return _of_plan(job)
    try:
        reason = handed_back(job)
    except ScheduleInputError:  # the section "start" reports it
        return _of_plan(job)
    if reason is None:
        found = _of_plan(job)
        return replace(found, lines=(*found.lines, _SERVED))
    line = f"install() leaves the training steps to Megatron's own schedule: the engine does not serve {reason}."
    return Section("hangs", (line, _NOT_VERIFIED), (), {"verified": None, "handed_back": reason})


def handed_back(job: Job) -> str | None:
    """The reason why `install()` leaves the training steps of a Megatron job to Megatron's own schedule; None if it
    runs them. `install()` decides by the same function. Raises ScheduleInputError for settings that no schedule
    runs."""
    return unserved_setting(SimpleNamespace(**job.args), bool(job.get("use_megatron_fsdp")))


def _of_plan(job: Job) -> Section:
    if pipeline_size(job) == 1:
        return Section("hangs", ("one pipeline rank sends nothing",), (), {"verified": None})
    try:
        spec = spec_of(job, most=_PERIODS * pipeline_size(job))
        plan, _ = verified_plan(spec)
    except NotGivenError as error:
        return Section("hangs", (f"no plan: {error}",), (), {"verified": None})
    except LayoutError:  # the section "start" reports it
        return Section("hangs", ("no plan: see Start",), (), {"verified": None})
    except PlanError as error:
        found = Finding("plan-refused", ERROR, f"there is no plan for the job: {error}")
        return Section("hangs", (), (found,), {"verified": False})
    proof = plan.certificate
    lines = [f"under install() the plan {spec.describe()} cannot hang. It was verified under these rules:"]
    lines += [f"- {text}" for rule, text in _RULES.items() if rule == "rendezvous" or rule in spec.device]
    if microbatches_of(job) > spec.num_microbatches:
        lines.append(f"The job's step of {microbatches_of(job)} microbatches repeats this plan.")
    if not job.on_engine:
        lines.append(_NOT_VERIFIED)
    data = {"plan": spec.describe(), "verified": True, "certificate": proof.to_dict() if proof else None}
    return Section("hangs", tuple(lines), (), data)
