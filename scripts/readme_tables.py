"""Writes the README's tables: beside its peers, from the pages with the measurements, and the schedules, simulated.

python scripts/readme_tables.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs_site.schedule_numbers import all_numbers  # noqa: E402
from made_parts import MadePart, markdown_table, renew  # noqa: E402

PARITY, PERFORMANCE = "docs/parity.md", "docs/performance.md"
ENGINES = ("ours", "megatron", "torch")
SETTING = "interleaved_1f1b P=4 V=2 overlap"

Row = dict[str, str]


def table_after(page: str, mark: str) -> list[Row]:
    """The first Markdown table after the line ``mark`` of a page."""
    _, found, rest = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{mark}\n")
    lines = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    if not found or lines is None:
        raise SystemExit(f"{page} has no table after {mark!r}")
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines[0].splitlines()]
    head, _, *body = cells
    return [dict(zip(head, row, strict=True)) for row in body]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def parity_rows() -> list[list[str]]:
    cases = {row[""]: row for row in table_after(PARITY, "## In short")}
    ours, theirs = cases["megatron_pp"], cases["Megatron-core's schedules"]
    labels = {
        "equal to the last bit": "equal to one process, to the last bit",
        "different": "wrong losses or gradients",
        "crash or hang": "crash or hang",
        "refused": "refused",
    }
    named = [(f"GPTModel, {ours['cases']} cases: {label}", key) for key, label in labels.items()]
    return [[label, ours[key], theirs[key], "-", f"[parity]({PARITY})"] for label, key in named]


def performance_rows() -> list[list[str]]:
    overhead = _of_setting("overhead", ["outside us (median)"])
    memory = _of_setting("memory", [f"rank {r}" for r in range(4)])
    page = f"[performance]({PERFORMANCE})"
    rows = [["Host time per forward and backward, interleaved, P=4, V=2", *(f"{overhead[e]:.3g} us" for e in ENGINES)]]
    for schedule, label in (("1f1b", "1F1B"), ("interleaved_1f1b", "interleaved")):
        over = _over_bound(schedule)
        rows.append([f"Step over its lower bound, {label}, worst case", *(f"{over[e]:.2f}" for e in ENGINES)])
    rows.append(["Peak memory in activations, interleaved, P=4, V=2", *(f"{memory[e]:g}" for e in ENGINES)])
    return [[*row, page] for row in rows]


def _measured(name: str) -> list[Row]:
    return table_after(PERFORMANCE, f"<!-- table {name} -->")


def _of_setting(name: str, columns: list[str]) -> dict[str, float]:
    """The largest of these columns, for each engine at SETTING."""
    rows = [row for row in _measured(name) if row["setting"] == SETTING and row["engine"] in ENGINES]
    return {row["engine"]: max(number(row[column]) for column in columns) for row in rows}


def _over_bound(schedule: str) -> dict[str, float]:
    """The worst of each engine's, over all ranks and transfers that are not longer than a forward."""
    worst = dict.fromkeys(ENGINES, 0.0)
    for row in _measured("exposed"):
        if row["schedule"] == schedule and row["engine"] in worst and number(row["transfer / F"]) <= 1:
            worst[row["engine"]] = max(worst[row["engine"]], number(row["over bound"]))
    return worst


def versions() -> tuple[str, str]:
    """Of Megatron-core and torch, as the page of parity names them."""
    found = re.search(r"with megatron-core ([\d.]+) and torch ([\d.]+)", (ROOT / PARITY).read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{PARITY} does not name the versions")
    return found[1], found[2]


def peers() -> str:
    megatron, torch = versions()
    head = ["", "megatron_pp", f"Megatron-core {megatron}", f"torch {torch} pipelining", "measured in"]
    return markdown_table([head, *parity_rows(), *performance_rows()])


def schedules() -> str:
    rows = [["name", "V", "bubble", "peak memory", "transfers", "paper (arXiv)"]]
    for one in all_numbers():
        name = one.family.name
        rows.append([f"`{name}`", str(one.chunks), f"{one.bubble:.1%}", f"{one.peak:g}", str(one.messages), one.papers])
    return markdown_table(rows)


if __name__ == "__main__":
    README = ROOT / "README.md"
    parts = [MadePart(README, "peers", peers), MadePart(README, "schedules", schedules)]
    sys.exit(renew(parts, __doc__.splitlines()[0]))
