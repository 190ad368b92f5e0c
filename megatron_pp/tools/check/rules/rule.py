"""A rule of a job, and what rules are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_pp.tools.check.findings import ERROR
from megatron_pp.tools.check.jobs.job import Job

MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_MEGATRON_ARGUMENTS = ("megatron", "slime", "ms-swift")


@dataclass(frozen=True)
class Rule:
    """``broken(job)``: what is wrong and what would be right, or nothing. Its settings are those that it reads."""

    name: str
    settings: tuple[str, ...]
    broken: Callable[[Job], Iterator[tuple[str, str]]]
    level: str = ERROR


def unchecked(job: Job) -> bool:
    """Whether the program passes its settings through Megatron's `validate_args`, and nobody has done so here. Other
    programs make Megatron's configs themselves."""
    return job.framework in _MEGATRON_ARGUMENTS and not job.validated


def whole(job: Job, name: str, default: int = 1) -> int:
    """A setting; ``default`` for what is no whole number, and for a size below 1, which a rule of its own refuses."""
    value = job.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (default and value < 1):
        return default
    return value


def nearest(value: int, factor: int) -> str:
    """Multiples of ``factor`` beside ``value``: "60 or 64"."""
    below = value // factor * factor
    found = [number for number in (below, below + factor) if number > 0 and number != value]
    return " or ".join(map(str, found))


def divisors_near(whole: int, value: int) -> list[int]:
    """Numbers that divide ``whole``: the largest below ``value`` and the smallest above it."""
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
