"""Prints lines, tables and the names of written files. rich is imported when a command runs, so ``--help`` and errors
do not need it.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from megatron_pp.errors import visible
from megatron_pp.plan.costs.files import is_special, write_whole

if TYPE_CHECKING:
    from rich.console import Console


_LEAST_OF_SENTENCES = 24  # least width of a column of sentences; more than any number has
_WIDE = 10**6  # columns of an output that is not a terminal
_NARROW = 80  # columns of a terminal whose width is not known
_INDENT = 4
_WORD = r"""(?:[^\s'"]|'[^']*'|"[^"]*")+"""  # a word of a shell command
_OPTION = re.compile(rf"--?{_WORD} (?!-){_WORD}|{_WORD}")  # an option with its value, or a word


def open_terminal(no_color: bool | None) -> Console:
    """A console that prints ``visible`` text. It raises BrokenPipeError if its reader, such as ``head``, has ended. If
    ``no_color`` is None, the variable NO_COLOR decides."""
    from rich.console import Console
    from rich.segment import Segment

    class Terminal(Console):
        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for text, style, control in super().render(*args, **options):
                yield Segment(text if control else visible(text), style, control)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Terminal(no_color=no_color)


def print_line(console: Console, text: str, hang: int | None = None) -> None:
    """Prints ``text``, wrapped at words on a terminal, unchanged into files and pipes. ``hang`` is the indent of the
    lines after the first."""
    for line in text.split("\n"):
        _print_as_it_is(console, wrapped(line, _room(console), hang))


def print_command(console: Console, command: str) -> None:
    """Prints a command that can be pasted. On a terminal it is wrapped at words, with a backslash at the ends of
    lines."""
    _print_as_it_is(console, wrapped_command(command, _room(console)))


def wrapped(text: str, width: int, hang: int | None = None) -> str:
    """A line wrapped at words to ``width`` columns. A longer word is not broken."""
    if len(text) <= width:
        return text
    beginning = len(text) - len(text.lstrip())
    indent = " " * (beginning + _INDENT if hang is None else hang)
    lines = textwrap.wrap(
        text, max(width, 1), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, tabsize=1
    )
    return "\n".join(lines)


def wrapped_command(command: str, width: int) -> str:
    """A command wrapped to ``width`` columns, with a backslash at the end of all lines but the last. Quoted text is not
    broken, and an option stays with its value if both fit into a line."""
    if len(command) <= width:
        return command
    beginning = command[: len(command) - len(command.lstrip())]
    lines = [beginning]
    for part in _OPTION.findall(command):
        longer = f"{lines[-1]}{'' if lines[-1].isspace() or not lines[-1] else ' '}{part}"
        if len(longer) + len(" \\") > width and lines[-1].strip():
            lines.append(f"{beginning}{' ' * _INDENT}{part}")
        else:
            lines[-1] = longer
    return " \\\n".join(lines)


def wrapped_for(stream: TextIO, text: str) -> str:
    """The text of an error, wrapped if ``stream`` is a terminal."""
    with suppress(OSError, ValueError, AttributeError):  # the stream is closed or not a file
        if stream.isatty():
            width = os.get_terminal_size(stream.fileno()).columns or _NARROW
            return "\n".join(wrapped(line, width) for line in text.split("\n"))
    return text


def _print_as_it_is(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _room(console: Console) -> int:
    """The width of a line in columns. Only a terminal limits it."""
    return console.width if console.is_terminal else _WIDE


def print_json(console: Console, value: object) -> None:
    console.file.write(json.dumps(value, indent=1) + "\n")


def print_table(console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table. The first column has left-aligned text, the others numbers or sentences. Only sentences and the
    names of columns are wrapped. Columns that do not fit into the terminal follow in another table, after the first
    column again. A table without rows is not printed.
    """
    if not rows:
        return
    room = console.width if "COLUMNS" in os.environ else _room(console)
    cells = [max(len(row[k]) for row in rows) for k in range(len(names))]
    if _width([max(cell, len(name)) for cell, name in zip(cells, names, strict=True)]) > room:
        names = [name.replace(" ", "\n") for name in names]
    wraps = [k > 0 and cell > _LEAST_OF_SENTENCES for k, cell in enumerate(cells)]
    least = [
        max(_LEAST_OF_SENTENCES if wraps[k] else cell, *map(len, names[k].split("\n"))) for k, cell in enumerate(cells)
    ]
    for part in _parts(least, _room(console)):
        width = max(room, _width([least[k] for k in part]))
        shown = [[row[k] for k in part] for row in rows]
        _print_part(console, title, [(names[k], wraps[k]) for k in part], shown, width)
        title = "More columns"


def _parts(least: Sequence[int], room: int) -> list[list[int]]:
    """The columns in parts. Each part has the first column, and fits into ``room`` if any two columns do."""
    parts = [[0]]
    for k in range(1, len(least)):
        if len(parts[-1]) > 1 and _width([least[j] for j in [*parts[-1], k]]) > room:
            parts.append([0])
        parts[-1].append(k)
    return parts


def _print_part(
    console: Console, title: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]], width: int
) -> None:
    """Prints one table. ``columns`` has the name of each column and whether its text is wrapped."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_style="bold")
    for k, (name, wraps) in enumerate(columns):
        table.add_column(name, justify="left" if k == 0 else "right", no_wrap=not wraps)
    for row in rows:
        table.add_row(*row)
    before = console.width
    console.width = width
    console.print(table, markup=False, highlight=False)
    console.width = before


def _width(columns: Sequence[int]) -> int:
    """The width of a table with columns of these widths, including edges and separators."""
    return sum(columns) + 2 * len(columns) + 1


def write_output(console: Console, path: str, content: str | bytes) -> None:
    """Writes a file and prints its name. Nothing is printed for special files such as /dev/stdout."""
    write_whole(path, content)
    if not is_special(path):
        print_line(console, f"wrote {path}")
