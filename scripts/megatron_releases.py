#!/usr/bin/env python
"""Record in docs/data/megatron_releases.csv how a release of Megatron-core ran, and print what to do with the release.

    PYTHON scripts/megatron_releases.py NAME --package DIR --tests JUNIT.xml [--parity FLAGS] [--csv FILE]

`scripts/test_megatron_versions.sh` calls it with the interpreter that ran the tests. NAME is the release, or the branch
of a checkout. DIR holds its `megatron`. FLAGS are flags of scripts/parity_table.py that choose the part of the matrix
to run; without FLAGS nothing is compared with one process. A release has one row, that of its last run.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import re
import shlex
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from made_parts import markdown_table, table_in  # noqa: E402
from megatron_reads import digests_of  # noqa: E402

from megatron_pp.integrations.megatron.releases.sources import KNOWN  # noqa: E402

CSV = ROOT / "docs" / "data" / "megatron_releases.csv"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
NOT_RUN = "-"


@dataclass(frozen=True)
class Row:
    """How one release ran. ``tests_...``: numbers of the plug-in's tests. ``cases``: cases that were compared with one
    process, ``equal``: those that are equal to the last bit. ``differs``: functions whose source no known release
    has."""

    release: str
    python: str
    torch: str
    date: str
    tests_passed: str
    tests_skipped: str
    tests_failed: str
    cases: str
    equal: str
    differs: str

    @staticmethod
    def heads() -> list[str]:
        return [field.name.replace("_", " ") for field in fields(Row)]

    def cells(self) -> list[str]:
        return list(asdict(self).values())


def tests_in(junit: Path) -> tuple[str, str, str]:
    """The numbers of passed, skipped and failed tests in a JUnit file."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    every, skipped, failures, errors = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped", "failures", "errors")
    )
    return str(every - skipped - failures - errors), str(skipped), str(failures + errors)


def parity_under(flags: str) -> tuple[str, str]:
    """The number of this engine's cases under this interpreter's Megatron-core, and how many are equal."""
    command = [sys.executable, str(ROOT / "scripts" / "parity_table.py"), "--part", "matrix", "--engine", "ours"]
    done = subprocess.run([*command, "--output", "-", *shlex.split(flags)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    found = [row for row in table_in(done.stdout.partition("### In short")[2]) if row and row[0] == "megatron_pp"]
    return (found[0][1], found[0][2]) if found else ("0", "0")


def with_row(table: list[list[str]], row: Row) -> list[list[str]]:
    """The table with ``row``, which replaces an earlier row of its release. Sorted by release, branches last."""
    rows = {cells[0]: cells for cells in table[1:]} | {row.release: row.cells()}
    return [Row.heads(), *(rows[name] for name in sorted(rows, key=_order))]


def _order(name: str) -> tuple[bool, list[int], str]:
    return not name[0].isdigit(), [int(digits) for digits in re.findall(r"\d+", name)], name


def runs(row: Row) -> bool:
    """Whether tests have passed, none has failed, and all compared cases are equal."""
    return row.tests_passed != "0" and row.tests_failed == "0" and row.equal == row.cases


def advice(row: Row) -> str:
    """What to do with the release, in one paragraph."""
    passed = f"{row.tests_passed} tests of the plug-in pass and {row.tests_failed} fail"
    compared = f", and {row.equal} of {row.cases} cases are equal to one process" if row.cases != NOT_RUN else ""
    if not runs(row):
        found = (
            f"megatron-core {row.release} is not shown to run correctly: {passed}{compared}. Use an earlier release, "
            "or leave install() out, until this is fixed: read what its functions have beyond the tables (below), "
            "serve it or hand it back in integrations/megatron/steps/served/scope.py, and run this again."
        )
    elif f"\nmegatron-core=={row.release};" in CONSTRAINTS.read_text(encoding="utf-8"):
        found = f"megatron-core {row.release} runs correctly: {passed}{compared}. The constraints already pin it."
    else:
        found = (
            f"megatron-core {row.release} runs correctly: {passed}{compared}. To adopt it, pin it in "
            "scripts/constraints.txt, write the tables of scripts/parity_table.py with it, and name it in "
            "docs/megatron_features.md."
        )
    if row.differs != NOT_RUN:
        found += (
            f" It differs from all known releases in {row.differs}. Read the difference, then add the output of "
            "`scripts/megatron_reads.py DIR` to reads.py and sources.py in integrations/megatron/releases/."
        )
    return textwrap.fill(found, 120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release")
    parser.add_argument("--package", type=Path, required=True, help="the folder that holds its `megatron`")
    parser.add_argument("--tests", type=Path, required=True, help="the file that pytest --junitxml has written")
    parser.add_argument("--parity", default="", help="flags of scripts/parity_table.py, such as '--pp 2'")
    parser.add_argument("--csv", type=Path, default=CSV)
    options = parser.parse_args()
    changed = [name for name, digest in digests_of(options.package).items() if digest not in KNOWN[name].split()]
    row = Row(
        options.release,
        platform.python_version(),
        version("torch"),
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        *tests_in(options.tests),
        *(parity_under(options.parity) if options.parity else (NOT_RUN, NOT_RUN)),
        ", ".join(changed) or NOT_RUN,
    )
    old = list(csv.reader(options.csv.read_text(encoding="utf-8").splitlines())) if options.csv.is_file() else []
    with options.csv.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(with_row(old, row))
    print(markdown_table([Row.heads(), row.cells()]))
    print(advice(row))
    return 0 if runs(row) else 1


if __name__ == "__main__":
    sys.exit(main())
