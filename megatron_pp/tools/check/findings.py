"""What a check finds, and where its answer has it."""

from __future__ import annotations

from dataclasses import dataclass

ERROR = "error"  # the job would fail, hang or compute wrongly
RISK = "risk"  # it may
NOTE = "note"  # worth knowing
LEVELS = (ERROR, RISK, NOTE)

SECTIONS = ("layout", "start", "risks", "memory", "time", "hangs", "numbers")
"""Of an answer, in its order."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    name      the same in every run, for programs and for suppressions: "overlap-without-virtual-stages"
    level     one of LEVELS
    text      what is wrong, with the value that is given
    change    what would be right, as the user writes it: "--num-layers 62 or --pipeline-model-parallel-size 2"
    settings  names of the settings that it is about
    threads   addresses where it was reported
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
    lines   plain text, without findings, at most 78 columns where that is possible
    data    what `--json` has under the section's name: JSON values
    """

    name: str
    lines: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    data: object = None

    def worst(self) -> str:
        """The worst level of its findings; "" without any."""
        return min((finding.level for finding in self.findings), key=LEVELS.index, default="")
