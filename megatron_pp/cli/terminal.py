"""What commands print: lines, tables, and the names of files. rich is imported when a command runs: ``--help`` and
errors do without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_pp.errors import visible
from megatron_pp.plan.costs.files import is_special, write_whole

if TYPE_CHECKING:
    from rich.console import Console


_LEAST_OF_SENTENCES = 24  # characters of a line, and more than a number has
_WIDE = 1000  # characters: where no terminal's edge is in the way


def open_terminal(no_color: bool | None) -> Console:
    """A console that prints ``visible`` text, and raises BrokenPipeError when its reader, such as ``head``, is gone.
    ``no_color`` None: as NO_COLOR says."""
    from rich.console import Console
    from rich.segment import Segment

    class Terminal(Console):
        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for text, style, control in super().render(*args, **options):
                yield Segment(text if control else visible(text), style, control)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Terminal(no_color=no_color)


def print_line(console: Console, text: str) -> None:
    """``text`` as it is, unwrapped."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(console: Console, value: object) -> None:
    console.file.write(json.dumps(value, indent=1) + "\n")


def print_table(console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table. Its first column is left-aligned text, the others are numbers or sentences. Sentences and names of
    columns are wrapped, nothing else is, however narrow the terminal is. Empty tables are left out.
    """
    from rich import box
    from rich.table import Table

    if not rows:
        return
    before = console.width
    room = before if console.is_terminal or "COLUMNS" in os.environ else _WIDE
    cells = [max(len(row[k]) for row in rows) for k in range(len(names))]
    if _width([max(cell, len(name)) for cell, name in zip(cells, names, strict=True)]) > room:
        names = [name.replace(" ", "\n") for name in names]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_style="bold")
    least = []
    for k, name in enumerate(names):
        wraps = k > 0 and cells[k] > _LEAST_OF_SENTENCES
        least.append(max(_LEAST_OF_SENTENCES if wraps else cells[k], *map(len, name.split("\n"))))
        table.add_column(name, justify="left" if k == 0 else "right", no_wrap=not wraps)
    for row in rows:
        table.add_row(*row)
    console.width = max(room, _width(least))
    console.print(table, markup=False, highlight=False)
    console.width = before


def _width(columns: Sequence[int]) -> int:
    """Of a table with columns of these widths, with its edges and separators."""
    return sum(columns) + 2 * len(columns) + 1


def write_output(console: Console, path: str, content: str | bytes) -> None:
    """Write a file and print its name; of what is no file, such as /dev/stdout, nothing."""
    write_whole(path, content)
    if not is_special(path):
        print_line(console, f"wrote {path}")
