"""The scope of the proof of an accepted plan: its rules, device, spec and programs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

from megatron_pp.plan.ir.feature import AddedSettings, all_values
from megatron_pp.plan.ir.instruction import format_program
from megatron_pp.plan.ir.repeated import Line, Lines

COMPLETE = "complete"
LIFETIME = "lifetime"
KEPT_OUTPUTS = "kept_outputs"
RENDEZVOUS = "rendezvous"
ORDER = "order"
REPETITION = "repetition"

PROOFS = {
    COMPLETE: "every operation runs exactly once, after what it needs",
    LIFETIME: "every buffer is released once, after its last use; a send is waited for before that; nothing is left",
    KEPT_OUTPUTS: "the same with outputs that are not deallocated after their send",
    RENDEZVOUS: "no deadlock and no crossing messages, where a send completes only when its receive is posted",
    "one_queue": "nor where all that a rank issues goes through one hardware queue",
    "any_wait": "nor where any instructions wait for all that their ranks have posted",
    "device_sync": "nor where compute synchronises the device",
    "static_buffers": "an input gradient is used before graphed layers write its buffer again",
    ORDER: "each rank's program runs the compute order of its schedule",
    REPETITION: "proven for fewer microbatches, and that the block between them can be repeated",
}
"""Rule of a certificate -> what it says about the plan."""


def _for_json(value: Any) -> Any:
    if isinstance(value, AddedSettings):
        return all_values(value)
    return list(value) if isinstance(value, tuple) else asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]


@dataclass(frozen=True)
class Certificate:
    """A record of what ``verify`` has proven of a plan.

    rules    keys of ``PROOFS``, in its order
    device   the rules of the device among them, without rendezvous
    spec     the fields of the plan's PlanSpec, as JSON takes them
    """

    rules: tuple[str, ...]
    device: tuple[str, ...]
    spec: Mapping[str, Any]
    programs: Sequence[Line] = field(repr=False, compare=False)

    @classmethod
    def of(cls, rules: Sequence[str], device: Sequence[str], spec: Any, programs: Sequence[Line]) -> Certificate:
        """The certificate for the plan of ``spec`` with these programs."""
        values = {name: _for_json(value) for name, value in spec.values().items()}
        return cls(tuple(rules), tuple(device), values, programs)

    @cached_property
    def digest(self) -> str:
        """``sha256:`` and the SHA-256 of all ranks' programs, as ``megatron-pp plan`` prints them below its
        first line.
        """
        found = hashlib.sha256()
        for rank, program in enumerate(self.programs):
            found.update(f"rank {rank}: {format_program(program)}\n".encode())
        if isinstance(self.programs, Lines):
            self.programs.forget()  # saves memory; each rank makes its own program again
        return f"sha256:{found.hexdigest()}"

    def to_dict(self) -> dict[str, Any]:
        """The certificate as a value for JSON."""
        lists = {"rules": list(self.rules), "device": list(self.device)}
        return {**lists, "spec": dict(self.spec), "digest": self.digest}

    def __str__(self) -> str:
        return f"certificate: {', '.join(self.rules)}; programs {self.digest}"
