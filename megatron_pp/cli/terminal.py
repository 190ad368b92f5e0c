"""What commands print: lines, tables, and the names of files. rich is imported when a command runs: ``--help`` and
errors do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_pp.plan.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console


def open_terminal(no_color: bool | None) -> Console:
    """A console that raises BrokenPipeError where its reader, such as ``head``, is gone. None: as NO_COLOR says."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Terminal(no_color=no_color)


def print_line(console: Console, text: str) -> None:
    """``text`` as it is, unwrapped."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is left-aligned text and whose others are numbers; empty tables are left out."""
    from rich import box
    from rich.table import Table

    if not rows:
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_style="bold")
    for k, name in enumerate(names):
        table.add_column(name, justify="left" if k == 0 else "right", overflow="fold", no_wrap=k == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)


def write_output(console: Console, path: str, content: str | bytes) -> None:
    """Write a file and print its name."""
    write_whole(path, content)
    print_line(console, f"wrote {path}")
