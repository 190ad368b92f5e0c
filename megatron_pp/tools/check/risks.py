"""The section "risks": the known faults of the installed Megatron-core (`known_faults.toml`) that the job has."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pp.errors import LayoutError, PlanError
from megatron_pp.tools.advise.megatron_args import each_layer
from megatron_pp.tools.check.findings import ERROR, LEVELS, RISK, Finding, Section
from megatron_pp.tools.check.jobs.files import loaded
from megatron_pp.tools.check.jobs.job import TORCHTITAN, Job
from megatron_pp.tools.check.stages import pipeline_size, stages_of

FILE = Path(__file__).with_name("known_faults.toml")
SAME = "same"
NOT_AFFECTED = "not affected"
OLDEST = "0.14.0"  # the oldest release whose sources were examined for the file
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TERM = re.compile(r"(?P<setting>\w+) (?:(?P<compared>==|!=|<=|>=|<|>) (?P<value>\S+)|is (?P<state>true|false|given))")


@dataclass(frozen=True)
class Term:
    """A condition on a setting: ``compared`` is an operator and ``value`` its right side, or ``state`` is "true",
    "false" or "given"."""

    setting: str
    compared: str = ""
    value: int | str = ""
    state: str = ""

    def holds(self, values: Mapping[str, Any]) -> bool:
        given = values.get(self.setting)
        if self.state:
            return {"true": bool(given), "false": not given, "given": given is not None}[self.state]
        if isinstance(self.value, int) and (isinstance(given, bool) or not isinstance(given, (int, float))):
            return False
        if isinstance(given, (list, tuple)) and self.compared == "==":
            return self.value in given
        return given is not None and _COMPARED[self.compared](given, self.value)


@dataclass(frozen=True)
class KnownFault:
    """A row of the file. The file's head describes the fields.

    when   all entries must hold; an entry holds if one of its terms does
    since  the first release with the fault; "" if the oldest release has it
    fixed  the first release without the fault; "" if the newest release has it
    """

    name: str
    level: str
    when: tuple[tuple[Term, ...], ...]
    what: str
    change: str
    engine: str
    threads: tuple[str, ...]
    since: str = ""
    fixed: str = ""
    shown: str = ""
    unshown: str = ""

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(term.setting for terms in self.when for term in terms))

    def meets(self, values: Mapping[str, Any]) -> bool:
        return all(any(term.holds(values) for term in terms) for terms in self.when)

    def is_in(self, release: str) -> bool:
        """Whether the release has the fault. "" is an unknown release; the newest is assumed."""
        if not release:
            return not self.fixed
        version = version_of(release)
        return version >= version_of(self.since or "0") and (not self.fixed or version < version_of(self.fixed))


def section(job: Job) -> Section:
    if job.framework == TORCHTITAN:
        return Section("risks")
    faults, newest = known_faults()
    here = [fault for fault in faults if fault.is_in(job.release)]
    if job.on_engine:
        here = [fault for fault in here if fault.engine != NOT_AFFECTED]
    values = values_of(job)
    met = [fault for fault in here if fault.meets(values)]
    of = f"Megatron-core {job.release}" if job.release else "Megatron-core (its release is not known)"
    line = f"this job has {len(met) or 'none'} of the known faults of {of}"
    line += " that steps of this engine have too" if job.on_engine else ""
    findings = (*_not_examined(job, newest), *(_finding(fault, job, newest) for fault in met))
    return Section("risks", (line,), findings, {"known": len(here), "met": [fault.name for fault in met]})


def _not_examined(job: Job, newest: str) -> Iterator[Finding]:
    if job.release and not version_of(OLDEST) <= version_of(job.release) <= version_of(newest):
        text = f"Megatron-core {job.release} was not examined for faults, only releases from {OLDEST} to {newest}"
        yield Finding("release-not-examined", RISK, text, "a release that was examined, or compare losses with parity")


def _finding(fault: KnownFault, job: Job, newest: str) -> Finding:
    """The finding of a fault. In a release that is newer than those examined, an error is only a risk."""
    unseen = bool(job.release) and version_of(job.release) > version_of(newest)
    level = RISK if unseen and fault.level == ERROR else fault.level
    release = f"Megatron-core {_releases(fault)}"
    what = f"{release}: {fault.what}" + (f" ({job.release} was not examined)" if unseen else "")
    change = fault.change
    if fault.engine == NOT_AFFECTED:
        change += "; or megatron-pp run: its steps do not have this fault"
    given = tuple(name for name in fault.settings if name not in DERIVED)
    return Finding(fault.name, level, what, change, given, fault.threads)


def _releases(fault: KnownFault) -> str:
    since = fault.since or OLDEST
    return f"{since} and newer" if not fault.fixed else f"before {fault.fixed}"


def values_of(job: Job) -> dict[str, Any]:
    """The job's settings, the settings that Megatron sets itself, and the names in ``DERIVED``."""
    values = dict(job.args)
    if values.get("batch_p2p_comm") is None:  # Megatron's checks ended before its config was made
        values["batch_p2p_comm"] = not values.get("overlap_p2p_comm")
    if job.given.get("deallocate_pipeline_outputs") is None:  # a config has False; all programs but verl set True
        values["deallocate_pipeline_outputs"] = job.framework != "verl"
    return {**values, **{name: how(job) for name, how in DERIVED.items()}}


def layers_without_a_stage(job: Job) -> int:
    """The number of layers that are on no stage. This happens if sizes are given for all stages and their sum is too
    small."""
    sizes = [job.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    stages = job.get("pipeline_model_parallel_size", 1)
    layers = job.get("num_layers")
    given = [size for size in sizes if isinstance(size, int)]
    if not isinstance(layers, int) or not given or stages > len(given):
        return 0
    return max(0, layers - (given[-1] if stages == 1 else sum(given)))


def prediction_between_the_ends(job: Job) -> bool:
    """Whether multi-token prediction is on a rank of the pipeline that is neither its first nor its last. A layout that
    cannot be placed has no such stage: the section "start" names its error."""
    if not job.get("pipeline_model_parallel_layout"):
        return False
    try:
        ranks = {stage.rank for stage in stages_of(job) if stage.mtp}
    except LayoutError:
        return False
    return not ranks <= {0, pipeline_size(job) - 1}


def auxiliary_losses_of_experts(job: Job) -> bool:
    """Whether a coefficient of the routers' auxiliary losses is above zero. The one of load balancing may be a list."""
    balance = job.get("moe_aux_loss_coeff")
    z_loss = job.get("moe_z_loss_coeff")
    coefficients = [*(balance if isinstance(balance, (list, tuple)) else [balance]), z_loss]
    return any(isinstance(one, (int, float)) and one > 0 for one in coefficients)


def rank_without_experts(job: Job) -> bool:
    """Whether a rank of the pipeline has no layer with experts although the model has some.

    False for layers that cannot be placed: the section "start" names their error.
    """
    if not job.get("num_experts"):
        return False
    try:
        experts = each_layer(job.args, "moe_layer_freq", "1", True)
        stages = stages_of(job)
    except (LayoutError, PlanError):
        return False
    routed = {number for number, has in enumerate(experts) if has}
    with_experts = {stage.rank for stage in stages if stage.mtp or routed.intersection(stage.layers)}
    return len(with_experts) < pipeline_size(job)


def _framework(job: Job) -> str:
    return job.framework


def _replicas(job: Job) -> int:
    return int(job.get("data_parallel_size", 1))


DERIVED: Mapping[str, Callable[[Job], Any]] = {
    "framework": _framework,
    "data_parallel_size": _replicas,
    "layers_without_a_stage": layers_without_a_stage,
    "auxiliary_losses_of_experts": auxiliary_losses_of_experts,
    "prediction_between_the_ends": prediction_between_the_ends,
    "rank_without_experts": rank_without_experts,
}
"""Names that a term may use in addition to Megatron's settings."""


@functools.cache
def known_faults() -> tuple[tuple[KnownFault, ...], str]:
    """All rows, and the newest release that was examined. Raises ValueError for a row that is not well formed."""
    return faults_of(loaded(str(FILE)))


def faults_of(values: Mapping[str, Any]) -> tuple[tuple[KnownFault, ...], str]:
    return tuple(_fault(row) for row in values["fault"]), str(values["newest"])


def _fault(row: Mapping[str, Any]) -> KnownFault:
    values = dict(row)
    values["since"] = values.pop("from", "")
    values["when"] = tuple(terms_of(text) for text in values["when"])
    values["threads"] = tuple(values["threads"])
    fault = KnownFault(**values)
    if fault.level not in LEVELS:
        raise ValueError(f"{fault.name}: level is {fault.level!r}; it must be one of {', '.join(LEVELS)}")
    if fault.engine not in (SAME, NOT_AFFECTED):
        raise ValueError(f"{fault.name}: engine is {fault.engine!r}; it must be {SAME!r} or {NOT_AFFECTED!r}")
    return fault


def terms_of(text: str) -> tuple[Term, ...]:
    """The terms of one entry of the file. Each is an alternative."""
    return tuple(map(_term, text.split(" or ")))


def _term(text: str) -> Term:
    found = _TERM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a term; terms are 'num_layers >= 2' or 'sequence_parallel is true'")
    value = found["value"] or ""
    number = int(value) if value.lstrip("-").isdigit() else value
    return Term(found["setting"], found["compared"] or "", number, found["state"] or "")


def version_of(release: str) -> tuple[int, ...]:
    """The numbers of a release without its suffix: 0.20.0+d98e8a64 and 0.20.0rc1 are 0.20.0."""
    found = re.match(r"\d+(?:\.\d+)*", release)
    numbers: Sequence[str] = found[0].split(".") if found else ()
    return tuple(int(number) for number in [*numbers, "0", "0", "0"][: max(3, len(numbers))])
