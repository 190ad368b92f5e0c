"""What commands print: lines, tables, and the names of files. rich is imported when a command runs: ``--help`` and
errors do without it.
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


_LEAST_OF_SENTENCES = 24  # characters of a line, and more than a number has
_WIDE = 10**6  # columns: where no terminal's edge is in the way
_NARROW = 80  # columns of a terminal that does not say
_INDENT = 4
_WORD = r"""(?:[^\s'"]|'[^']*'|"[^"]*")+"""  # of a shell's command
_OPTION = re.compile(rf"--?{_WORD} (?!-){_WORD}|{_WORD}")  # an option with its value, or a word


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


def print_line(console: Console, text: str, hang: int | None = None) -> None:
    """``text``, on a terminal wrapped at words; ``hang``: columns before the lines that follow the first. Into files
    and pipes it goes as it is."""
    for line in text.split("\n"):
        _print_as_it_is(console, wrapped(line, _room(console), hang))


def print_command(console: Console, command: str) -> None:
    """A command to be pasted: on a terminal wrapped at words, with backslashes that let a shell read it as one line."""
    _print_as_it_is(console, wrapped_command(command, _room(console)))


def wrapped(text: str, width: int, hang: int | None = None) -> str:
    """One line, wrapped at words to ``width`` columns; a word that is longer is left whole."""
    if len(text) <= width:
        return text
    beginning = len(text) - len(text.lstrip())
    indent = " " * (beginning + _INDENT if hang is None else hang)
    lines = textwrap.wrap(
        text, max(width, 1), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, tabsize=1
    )
    return "\n".join(lines)


def wrapped_command(command: str, width: int) -> str:
    """As ``wrapped``, with a backslash at the end of each line but the last. Quoted text stays whole, and an option
    with its value, where they fit into a line."""
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
    """``text`` of an error, as ``print_line`` has it: wrapped where ``stream`` is a terminal."""
    with suppress(OSError, ValueError, AttributeError):  # it is closed, or no file
        if stream.isatty():
            width = os.get_terminal_size(stream.fileno()).columns or _NARROW
            return "\n".join(wrapped(line, width) for line in text.split("\n"))
    return text


def _print_as_it_is(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _room(console: Console) -> int:
    """Columns of a line: outside of a terminal no edge is in the way."""
    return console.width if console.is_terminal else _WIDE


def print_json(console: Console, value: object) -> None:
    console.file.write(json.dumps(value, indent=1) + "\n")


def print_table(console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table. Its first column is left-aligned text, the others are numbers or sentences. Sentences and names of
    columns are wrapped, nothing else is. Columns that do not fit into a terminal go below, behind the first one again.
    Empty tables are left out.
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
    """The columns, in parts of which each has the first one and fits into ``room``, if any two columns do."""
    parts = [[0]]
    for k in range(1, len(least)):
        if len(parts[-1]) > 1 and _width([least[j] for j in [*parts[-1], k]]) > room:
            parts.append([0])
        parts[-1].append(k)
    return parts


def _print_part(
    console: Console, title: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]], width: int
) -> None:
    """``columns``: the name of each, and whether it is wrapped."""
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
    """Of a table with columns of these widths, with its edges and separators."""
    return sum(columns) + 2 * len(columns) + 1


def write_output(console: Console, path: str, content: str | bytes) -> None:
    """Write a file and print its name; of what is no file, such as /dev/stdout, nothing."""
    write_whole(path, content)
    if not is_special(path):
        print_line(console, f"wrote {path}")
