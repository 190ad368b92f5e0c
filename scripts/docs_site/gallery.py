"""The gallery of schedules: a picture of each and its numbers, made while the site is built."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

from made_parts import markdown_table

from docs_site.schedule_numbers import (
    MICROBATCHES,
    RANKS,
    WORK_MS,
    Numbers,
    all_numbers,
    chunks_of,
    output_of,
    slices_of,
)
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.tools.cli.command_line import main as megatron_pp

PAGE = "gallery.md"
PIXELS = "1000"  # about the width that the page shows, so that letters keep their size
TABLE_MARK, SECTIONS_MARK = "<!-- table of all schedules -->", "<!-- a section for each schedule -->"
COMPARISON_MARK = "<!-- some side by side -->"
HEAD = ["schedule", "V", "steps", "bubble", "peak memory", "transfers", "paper (arXiv)"]
COMPARED = "1f1b,zb_h1,zb_v"


def pictures() -> Iterator[tuple[str, str]]:
    """(path on the site, SVG) for each schedule, and for one picture of several. The command line draws them."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (*SCHEDULES, COMPARED):
            file = Path(folder) / f"{name}.svg"
            with contextlib.redirect_stdout(io.StringIO()):
                status = megatron_pp([*draw_command(name)[1:], "-o", str(file)])
            if status:
                raise RuntimeError(f"megatron-pp could not draw {name}")
            yield picture_path(name), file.read_text(encoding="utf-8")


def draw_command(name: str) -> list[str]:
    """The command that draws the picture of one schedule, or of several, without its -o."""
    chunks = chunks_of(SCHEDULES[name]) if name in SCHEDULES else 1
    sizes = ["-P", str(RANKS), *(["-V", str(chunks)] if chunks > 1 else []), "-M", str(MICROBATCHES)]
    if name in SCHEDULES and slices_of(SCHEDULES[name]) > 1:
        sizes += ["--sequence-slices", str(slices_of(SCHEDULES[name]))]
    work = f"{WORK_MS:g}"
    costs = ["--forward-ms", work, "--backward-ms", work, "--weight-ms", work]
    if name in SCHEDULES and output_of(SCHEDULES[name]):
        costs += ["--output-ms", f"{output_of(SCHEDULES[name]):g}"]
    return ["megatron-pp", "draw", "-s", name, *sizes, *costs, "--width", PIXELS]


def picture_path(name: str) -> str:
    return f"gallery/{name.replace(',', '-')}.svg"


def filled(text: str) -> str:
    """The page ``text`` with the table, the comparison and the sections in place of their marks."""
    table = markdown_table([HEAD, *map(_cells, all_numbers())])
    sections = "\n\n".join(map(_section, all_numbers()))
    for mark, made in ((TABLE_MARK, table), (COMPARISON_MARK, _picture(COMPARED)), (SECTIONS_MARK, sections)):
        if mark not in text:
            raise ValueError(f"{PAGE} has no line {mark}")
        text = text.replace(mark, made)
    return text


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


def _section(numbers: Numbers) -> str:
    name, summary = numbers.family.name, numbers.family.summary
    source = f"Source: {numbers.family.source}."
    return "\n\n".join([f"## {name}", f"{summary[0].upper()}{summary[1:]}. {source}", _picture(name)])


def _picture(name: str) -> str:
    """The picture, and the command that draws it."""
    file = picture_path(name)
    image = f'<a href="{file}"><img src="{file}" alt="{name}" loading="lazy"></a>'
    return f"{image}\n\n    {' '.join(draw_command(name))} -o x.svg"
