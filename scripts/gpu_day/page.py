"""Makes the page of results from the JSON alone. Its tables are data files, so that results do not make the page
longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from made_parts import write_data

from gpu_day.bench import NOT_RUN, Result
from gpu_day.runner import NOT_YET, Run
from gpu_day.table import PARTS

Row = list[str]
_LISTED = 4  # checks of a part, up to which all are listed; of more, only failed checks


def page(run: Run, path: Path) -> str:
    """The Markdown of the page ``path``. Writes its tables into files beside it."""
    results = [(part, run.results.get(part.name, Result(NOT_RUN, NOT_YET))) for part in PARTS]
    counts = Counter(result.verdict for _, result in results)
    what = "tried without a GPU: this says nothing about GPUs" if run.tried else "measured on GPUs"
    parts = [["part", "verdict", "s", "what failed, or why it was not run", "on", "date", "commit"]]
    for part, result in results:
        where = [_cell(result.machine) or "-", result.date or "-", result.commit or "-"]
        parts.append([part.title, _shown(result), f"{result.seconds:.0f}", _why(result), *where])
    found = [["part", "what", "result"]]
    found += [[part.title, *map(_cell, row)] for part, result in results for row in _found(result)]
    text = [
        "# On a GPU",
        f"This page has what `scripts/gpu_check.sh` has {what}, for whoever wants to know what is proven there. "
        f"Each part is shown as it last ran: {', '.join(f'{number} {verdict}' for verdict, number in counts.items())}. "
        "A part that has not run is not yet measured.",
        write_data(path, "gpu_parts", "Parts", parts),
        write_data(path, "gpu_results", "Results", found),
    ]
    return "\n\n".join(text) + "\n"


def _shown(result: Result) -> str:
    return f"**{result.verdict}**" if result.failures else result.verdict


def _why(result: Result) -> str:
    return _cell("; ".join(result.failures) or result.why)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _found(result: Result) -> Iterator[Row]:
    """The rows of a part's results on the page. A table of the part gives a row for each of its rows."""
    if result.verdict == NOT_RUN:
        return
    good = [what for what, holds in result.checks if holds]
    yield from ([what, "holds"] for what in (good if len(good) <= _LISTED else [f"{len(good)} checks"]))
    yield from ([what, "**NO**"] for what in result.failures)
    for block in result.blocks:
        if isinstance(block, str):
            yield [block, ""]
            continue
        (first, *others), *rows = block
        for name, *values in rows:
            numbers = (f"{other} {value}" for other, value in zip(others, values, strict=True))
            yield [f"{first} {name}".strip(), "; ".join(numbers)]
