"""Writes the table of docs/known_faults.md from the file that `megatron-pp check` reads. ``--check`` only reports
whether it is up to date.

python scripts/known_faults.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from made_parts import MadePart, renew  # noqa: E402

from megatron_pp.tools.check.risks import NOT_AFFECTED, OLDEST, KnownFault, Term, known_faults  # noqa: E402


def parts_of_faults() -> str:
    return "\n\n".join(map(_part, known_faults()[0]))


def _part(fault: KnownFault) -> str:
    since = fault.since or OLDEST
    releases = f"{since} and newer, open" if not fault.fixed else f"{since} up to the last before {fault.fixed}"
    terms = "; ".join(" or ".join(map(_term, terms)) for terms in fault.when)
    engine = "without it" if fault.engine == NOT_AFFECTED else "the same"
    shown = f"`{fault.shown}`" if fault.shown else f"no test: {fault.unshown}"
    lines = [
        f"### {fault.name}",
        "",
        f"{fault.level.capitalize()}. {fault.what[0].upper()}{fault.what[1:]}.",
        "",
        f"- Releases: {releases}.",
        f"- Where: {terms}.",
        f"- Change: {fault.change}.",
        f"- Under `install()`: {engine}.",
        f"- Shown by: {shown}.",
    ]
    if fault.threads:
        lines.append(f"- Threads: {', '.join(map(_link, fault.threads))}.")
    return "\n".join(lines)


def _term(term: Term) -> str:
    if term.state:
        return f"`{term.setting}` is {term.state}"
    return f"`{term.setting} {term.compared} {term.value}`"


def _link(address: str) -> str:
    project, _, number = address.removeprefix("https://github.com/").partition("/")[2].partition("/")
    return f"[{project}#{number.rpartition('/')[2]}]({address})"


PARTS = [MadePart(ROOT / "docs" / "known_faults.md", "faults", parts_of_faults)]

if __name__ == "__main__":
    sys.exit(renew(PARTS, __doc__.splitlines()[0]))
