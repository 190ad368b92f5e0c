"""The page of results, from what the JSON holds and nothing else. Long tables are data files, as on other pages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from made_parts import long_tables_to_data, markdown_table

from gpu_day.bench import NOT_RUN, Result
from gpu_day.runner import NOT_YET, Run
from gpu_day.table import PARTS, Part

_LISTED = 4  # checks; of more, only those that fail are


def page(run: Run, path: Path) -> str:
    """Markdown, for the file ``path``, with its long tables in files beside it."""
    results = [(part, run.results.get(part.name, Result(NOT_RUN, NOT_YET))) for part in PARTS]
    counts = Counter(result.verdict for _, result in results)
    dates = sorted({result.date for _, result in results if result.date})
    commits = sorted({result.commit for _, result in results if result.commit})
    what = "Tried without a GPU, which says nothing of one" if run.tried else f"Measured on {run.machine.gpus} GPU(s)"
    head = [
        "# On a GPU",
        "",
        f"{what}, {' to '.join(dates[:1] + dates[1:][-1:]) or 'not yet'}, by `scripts/gpu_check.sh` at commit "
        f"{', '.join(commits) or '-'}. {', '.join(f'{number} {verdict}' for verdict, number in counts.items())}.",
        "",
    ]
    rows = [["part", "verdict", "s", "what failed, or why it was not run"]]
    rows += [[part.title, _shown(result), f"{result.seconds:.0f}", _why(result)] for part, result in results]
    sections = [_section(part, result) for part, result in results if result.verdict != NOT_RUN]
    text = "\n".join(sections) + "\n"
    return "\n".join([*head, markdown_table(rows), long_tables_to_data(path, "gpu", "results", text)])


def _shown(result: Result) -> str:
    return f"**{result.verdict}**" if result.failures else result.verdict


def _why(result: Result) -> str:
    return _cell("; ".join(result.failures) or result.why)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _section(part: Part, result: Result) -> str:
    lines = ["", f"## {part.title}", ""]
    good = [what for what, holds in result.checks if holds]
    if len(good) <= _LISTED:
        lines += [f"- {_cell(what)}" for what in good]
    else:
        lines += [f"- {len(good)} checks hold"]
    lines += [f"- **NO**: {_cell(what)}" for what in result.failures]
    for block in result.blocks:
        lines += ["", block if isinstance(block, str) else markdown_table([[_cell(c) for c in row] for row in block])]
    return "\n".join(lines)
