"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is left-aligned text and whose others are numbers; empty tables are left out."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_style="bold")
    for k, name in enumerate(names):
        table.add_column(name, justify="left" if k == 0 else "right", overflow="fold", no_wrap=k == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)
