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
    releases = f"{since} and newer; fixed in {fault.fixed}" if fault.fixed else f"{since} and newer; not fixed so far"
    terms = ", and ".join(" or ".join(map(_term, terms)) for terms in fault.when)
    engine = "absent" if fault.engine == NOT_AFFECTED else "present: the fault is outside of the schedule"
    shown = f"Shown by: `{fault.shown}`" if fault.shown else f"Not shown by a test: {fault.unshown}"
    lines = [
        f"### {fault.name}",
        "",
        f"**{fault.level.capitalize()}.** {fault.what[0].upper()}{fault.what[1:]}.",
        "",
        f"- If: {terms}.",
        f"- Change: {fault.change}.",
        f"- Megatron-core: {releases}.",
        f"- Under `install()`: {engine}.",
        f"- {shown}.",
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
