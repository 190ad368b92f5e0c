"""The gallery of schedules: a picture of each and its numbers, made while the site is built."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from made_parts import markdown_table

from docs_site.schedule_numbers import MICROBATCHES, RANKS, WORK_MS, Numbers, all_numbers, chunks_of
from megatron_pp.cli.command_line import main as megatron_pp
from megatron_pp.plan.orders import SCHEDULES

PAGE = "gallery.md"
PIXELS = "1000"  # about what the page shows, so that letters keep their size
TABLE_MARK, SECTIONS_MARK = "<!-- table of all schedules -->", "<!-- a section for each schedule -->"
HEAD = ["schedule", "V", "steps", "bubble", "peak memory", "transfers", "paper (arXiv)"]


def pictures() -> Iterator[tuple[str, str]]:
    """(path on the site, SVG) for each schedule, as the command line draws it."""
    with tempfile.TemporaryDirectory() as folder:
        for name in SCHEDULES:
            file = Path(folder) / f"{name}.svg"
            with contextlib.redirect_stdout(io.StringIO()):
                status = megatron_pp([*draw_command(name)[1:], "--width", PIXELS, "-o", str(file)])
            if status:
                raise RuntimeError(f"megatron-pp could not draw {name}")
            yield picture_path(name), file.read_text(encoding="utf-8")


def draw_command(name: str) -> list[str]:
    """The command that draws this picture, but for its -o."""
    chunks = chunks_of(SCHEDULES[name])
    sizes = ["-P", str(RANKS), *(["-V", str(chunks)] if chunks > 1 else []), "-M", str(MICROBATCHES)]
    work = f"{WORK_MS:g}"
    costs = ["--forward-ms", work, "--backward-ms", work, "--weight-ms", work]
    return ["megatron-pp", "draw", "-s", name, *sizes, *costs]


def picture_path(name: str) -> str:
    return f"gallery/{name}.svg"


def filled(text: str) -> str:
    """The page with its table and sections in their places."""
    for mark, made in ((TABLE_MARK, table()), (SECTIONS_MARK, sections())):
        if mark not in text:
            raise ValueError(f"{PAGE} has no line {mark}")
        text = text.replace(mark, made)
    return text


def table() -> str:
    return markdown_table([HEAD, *map(_cells, _numbers())])


def _cells(numbers: Numbers) -> list[str]:
    name = numbers.family.name
    return [
        f"[`{name}`](#{name})",
        str(numbers.chunks),
        f"{numbers.steps:.3g}",
        f"{numbers.bubble:.1%}",
        f"{numbers.peak:g}",
        str(numbers.messages),
        numbers.papers,
    ]


def sections() -> str:
    return "\n\n".join(map(_section, _numbers()))


def _section(numbers: Numbers) -> str:
    name = numbers.family.name
    summary = numbers.family.summary
    picture = picture_path(name)
    lines = [
        f"## {name}",
        f"{summary[0].upper()}{summary[1:]}. Source: {numbers.family.source}.",
        f'<a href="{picture}"><img src="{picture}" alt="{name}" loading="lazy"></a>',
        f"    {' '.join(draw_command(name))} -o {name}.svg",
    ]
    return "\n\n".join(lines)


@cache
def _numbers() -> list[Numbers]:
    return all_numbers()
