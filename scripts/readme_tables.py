"""Writes two parts of the README from the measurements in docs/: the comparison with peers, and the gain under
Megatron. Also writes the table of docs/schedules.md, from the simulator.

python scripts/readme_tables.py [--check]
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs_site.schedule_numbers import all_numbers  # noqa: E402
from made_parts import MadeData, MadePart, data_file, markdown_table, read_data, renew, table_in  # noqa: E402

PARITY, PERFORMANCE = "docs/parity.md", "docs/performance.md"
Engines = dict[str, tuple[str, ...]]
ENGINES: Engines = {"ours": ("ours",), "megatron": ("megatron",), "torch": ("torch", "torch per-edge")}
"""Column of the README -> engines of the tables. If there are several, the column has the better number."""
UNDER_MEGATRON: Engines = {"ours": ("plug-in",), "megatron": ("megatron",), "torch": ()}
OF_MEGATRON = ("1f1b", "interleaved_1f1b")
BESIDE = {"zb_h1": "1F1B", "interleaved_zb": "interleaved 1F1B"}
"""Schedules that Megatron lacks -> Megatron's schedule that they are compared with."""
SETTING = "interleaved_1f1b P=4 V=2 overlap"

Row = dict[str, str]


def rows_of(table: list[list[str]]) -> list[Row]:
    head, *body = table
    return [dict(zip(head, row, strict=True)) for row in body]


def number(text: str) -> float:
    return float(text.replace(",", ""))


class PeerRow(NamedTuple):
    """A row of the README's table: our number, Megatron's by release, and torch's."""

    label: str
    ours: str
    megatron: dict[str, str]
    torch: str
    page: str


def parity_rows() -> list[PeerRow]:
    text = (ROOT / PARITY).read_text(encoding="utf-8")
    cases = {row[""]: row for row in rows_of(table_in(text.partition("\n### In short\n")[2]))}  # not in a data file
    installed = version(text.partition("Written by")[2], "megatron-core")
    theirs = {
        installed if who == "Megatron-core's schedules" else version(who, "Megatron-core"): row
        for who, row in cases.items()
        if who.startswith("Megatron-core")
    }
    ours = cases["megatron_pp"]
    labels = {
        "equal to the last bit": f"{ours['cases']} settings of Megatron's GPTModel: equal to one process, to the bit",
        "different": "... wrong losses or gradients",
        "crash or hang": "... crash or hang",
        "refused": "... refused",
    }
    page = f"[parity]({PARITY})"
    return [
        PeerRow(label, ours[key], {release: row[key] for release, row in theirs.items()}, "-", page)
        for key, label in labels.items()
    ]


def performance_rows() -> list[PeerRow]:
    memory = _of_setting("memory", [f"rank {r}" for r in range(4)])
    host = "Host time per forward and backward, median (range): the library alone"
    loop = "... in Megatron's training loop, under `install()`"
    rows = [_row("overhead", host, _over_settings(ENGINES)), _row("overhead", loop, _over_settings(UNDER_MEGATRON))]
    for schedule, name in (("1f1b", "1F1B"), ("interleaved_1f1b", "interleaved")):
        over = {who: f"{number:.2f}" for who, number in _over_bound(schedule).items()}
        rows.append(_row("exposed", f"Step over its lower bound, {name}, worst case", over))
    counted = {who: f"{number:g}" for who, number in memory.items()}
    rows.append(_row("memory", "Peak memory in tensors between stages, interleaved, P=4, V=2", counted))
    return rows


def _row(table: str, label: str, found: dict[str, str]) -> PeerRow:
    """A row with numbers of a table of the performance page, under the release of Megatron-core that it was measured
    with."""
    theirs = {_release(table, "megatron-core"): found["megatron"]}
    return PeerRow(label, found["ours"], theirs, found["torch"], f"[performance]({PERFORMANCE})")


def _release(table: str, package: str) -> str:
    (run,) = [row for row in _measured("runs") if row["table"] == table]
    return version(run["measured with"], package)


def _measured(name: str) -> list[Row]:
    return rows_of(read_data(ROOT / PERFORMANCE, f"performance_{name}"))


def _of_setting(name: str, columns: list[str]) -> dict[str, float]:
    """For each column of the README, the largest number of ``columns`` at SETTING."""
    rows = [row for row in _measured(name) if row["setting"] == SETTING]
    return _best({row["engine"]: [number(row[c]) for c in columns if row[c] != "-"] for row in rows}, ENGINES)


def _over_settings(columns: Engines) -> dict[str, str]:
    """For each column of the README, the median and the range of the host's time over all settings, in microseconds. If
    a column has several engines, the better one counts at each setting."""
    found = {}
    for column, engines in columns.items():
        by_setting: dict[str, list[float]] = {}
        for row in _measured("overhead"):
            if row["engine"] in engines and row["outside us (median)"] != "-":
                by_setting.setdefault(row["setting"], []).append(number(row["outside us (median)"]))
        best = [min(times) for times in by_setting.values()]
        found[column] = f"{median(best):.3g} us ({min(best):.3g} to {max(best):.3g})" if best else "-"
    return found


def _over_bound(schedule: str) -> dict[str, float]:
    """For each column, the largest step over its lower bound, over all ranks and all transfers up to a forward's
    length."""
    found: dict[str, list[float]] = {}
    for row in _measured("exposed"):
        if row["schedule"] == schedule and number(row["transfer / F"]) <= 1 and row["over bound"] != "-":
            found.setdefault(row["engine"], []).append(number(row["over bound"]))
    return _best(found, ENGINES)


def _best(found: dict[str, list[float]], columns: Engines) -> dict[str, float]:
    """For each column of the README, the largest number of its best engine: the one whose largest number is
    smallest."""
    worst = {engine: max(numbers) for engine, numbers in found.items() if numbers}
    return {column: min(worst[e] for e in engines if e in worst) for column, engines in columns.items()}


def version(text: str, name: str) -> str:
    """The first version of package ``name`` in ``text``."""
    found = re.search(rf"\b{name} (\d+\.\d+\.\d+)", text)
    if found is None:
        raise SystemExit(f"the version of {name} is not in {text[:80]!r}")
    return found[1]


def peers() -> str:
    rows = [*parity_rows(), *performance_rows()]
    first, *others = dict.fromkeys(release for row in rows for release in row.megatron)
    # A release with the same numbers as the first one has no column.
    differing = {
        one for row in rows for one in others if row.megatron.get(one, "") not in ("", row.megatron.get(first))
    }
    releases = [first, *(one for one in others if one in differing)]
    torch = " and ".join(sorted({_release(name, "torch") for name in ("overhead", "exposed", "memory")}))
    heads = [f"Megatron-core {release}" for release in releases]
    table = [["", "megatron_pp", *heads, f"torch {torch} pipelining", "measured in"]]
    for row in rows:
        table.append([row.label, row.ours, *(row.megatron.get(one, "-") for one in releases), row.torch, row.page])
    return markdown_table(table)


def under_megatron() -> str:
    """The README's part about the gain by ``install()``: in steps, and on the host."""
    rows = _measured("megatron_steps")
    own = [row for row in rows if row["schedule"] in OF_MEGATRON]
    fixed, variable = (_ratios([row for row in own if row["shapes"] == kind]) for kind in ("fixed", "variable"))
    added = [
        f"`{schedule}` takes {_ratios([row for row in rows if row['schedule'] == schedule])} of Megatron's {theirs}"
        for schedule, theirs in BESIDE.items()
        if any(row["schedule"] == schedule for row in rows)
    ]
    (release,) = {_release("overhead", "megatron-core")}
    host = {row["setting"]: number(row["plug-in / it"]) for row in _measured("overhead") if row["engine"] == "megatron"}
    ratios = list(host.values())
    chunks = [ratio for setting, ratio in host.items() if setting.startswith("interleaved")]
    lines = [
        f"- **Steps on Megatron's own schedules.** A step of its GPTModel takes {fixed} of Megatron's time with fixed "
        f"shapes, and {variable} with shapes that vary (median and range of {len(own)} settings, with layers that "
        f"sleep and messages that take no time). [Measured]({PERFORMANCE}#steps-beside-megatrons-own).",
        f"- **Steps on schedules that Megatron does not have.** A step with {', one with '.join(added)}."
        if added
        else "",
        "- **Slow links.** The gain is that of the rows *step over its lower bound*, with and without virtual stages.",
        f"- **Host time.** Outside the model the host takes {_typical(ratios)} of the time of Megatron-core {release}; "
        f"with virtual stages {_typical(chunks)}. This matters when the host cannot launch kernels as fast as the GPU "
        f"runs them. [Measured]({PERFORMANCE}#overhead-per-virtual-microbatch).",
    ]
    made = [
        textwrap.fill(line, 160, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
        if line
    ]
    return "\n".join(["**What do I gain under Megatron, by `install()`?**\n", *made])


def _ratios(rows: list[Row]) -> str:
    """The ratio of our step to Megatron's: its median, and its range."""
    return _typical([number(row["ours / megatron"]) for row in rows])


def _typical(values: list[float]) -> str:
    """The median, and the range if values differ."""
    middle, low, high = (f"{value:.2f}" for value in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def schedules() -> list[list[str]]:
    rows = [["name", "V", "bubble", "peak memory", "transfers", "paper (arXiv)"]]
    for one in all_numbers():
        name = one.family.name
        rows.append([f"`{name}`", str(one.chunks), f"{one.bubble:.1%}", f"{one.peak:g}", str(one.messages), one.papers])
    return rows


if __name__ == "__main__":
    README = ROOT / "README.md"
    table = data_file(ROOT / "docs" / "schedules.md", "schedules")
    parts = [MadePart(README, "peers", peers), MadePart(README, "under Megatron", under_megatron)]
    sys.exit(renew([*parts, MadeData(table, schedules)], __doc__.partition("\n\n")[0]))
