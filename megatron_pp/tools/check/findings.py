"""The findings of a check, and the sections of its answer."""

from __future__ import annotations

from dataclasses import dataclass

ERROR = "error"  # the job would fail, hang or compute wrongly
RISK = "risk"  # the job may fail, hang or compute wrongly
NOTE = "note"  # information, not a fault
LEVELS = (ERROR, RISK, NOTE)

SECTIONS = ("layout", "start", "risks", "memory", "time", "hangs", "numbers")
"""The sections of an answer, in their order."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    name      such as "overlap-without-virtual-stages"; programs can rely on it, as it is the same in every run
    level     one of LEVELS
    text      a sentence about the fault, with the value that was given
    change    a right value, as the user writes it: "--num-layers 62 or --pipeline-model-parallel-size 2"
    settings  the names of the settings that the finding is about
    threads   web addresses of threads that report the fault
    """

    name: str
    level: str
    text: str
    change: str = ""
    settings: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the answer: lines of text for a person, data for a program, and findings for both.

    name    one of SECTIONS
    lines   plain text without the findings, in lines of at most 78 columns if possible
    data    the JSON values that `--json` prints under the section's name
    """

    name: str
    lines: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    data: object = None

    def worst(self) -> str:
        """The worst level of the section's findings; "" if it has none."""
        return min((finding.level for finding in self.findings), key=LEVELS.index, default="")
