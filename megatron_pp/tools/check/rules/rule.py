"""The class of rules, and functions that rules use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_pp.tools.check.findings import ERROR
from megatron_pp.tools.check.jobs.job import Job

MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_MEGATRON_ARGUMENTS = ("megatron", "slime", "ms-swift")


@dataclass(frozen=True)
class Rule:
    """A rule that a job's settings must keep. ``broken(job)`` yields (the fault, a right value) for each fault that it
    finds. ``settings`` are the settings that it reads."""

    name: str
    settings: tuple[str, ...]
    broken: Callable[[Job], Iterator[tuple[str, str]]]
    level: str = ERROR


def unchecked(job: Job) -> bool:
    """Whether the program checks its settings by Megatron's `validate_args`, but this has not been done here. Other
    programs make Megatron's configs themselves."""
    return job.framework in _MEGATRON_ARGUMENTS and not job.validated


def whole(job: Job, name: str, default: int = 1) -> int:
    """The value of a setting. It is ``default`` if the value is not a whole number, or is a size below 1, which another
    rule reports."""
    value = job.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (default and value < 1):
        return default
    return value


def nearest(value: int, factor: int) -> str:
    """The multiples of ``factor`` next to ``value``, as text: "60 or 64"."""
    below = value // factor * factor
    found = [number for number in (below, below + factor) if number > 0 and number != value]
    return " or ".join(map(str, found))


def divisors_near(whole: int, value: int) -> list[int]:
    """The divisors of ``whole`` next to ``value``: the largest below it and the smallest above it."""
    below = next((one for one in range(min(value - 1, whole), 0, -1) if whole % one == 0), None)
    above = next((one for one in range(value + 1, whole + 1) if whole % one == 0), None)
    return [one for one in (below, above) if one is not None]


def set_to(job: Job, name: str, values: Sequence[int] | str) -> str:
    text = values if isinstance(values, str) else " or ".join(map(str, values))
    return f"{job.spell(name)} {text}" if text else ""


def without(job: Job, name: str) -> str:
    return f"leave {job.spell(name)} out"


def either(*changes: str) -> str:
    return ", or ".join(change for change in changes if change)
