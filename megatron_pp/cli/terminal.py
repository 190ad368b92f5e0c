"""The terminal that commands print on."""

from __future__ import annotations

from rich.console import Console


class Terminal(Console):
    """A console that leaves it to the command what happens when its reader, such as ``head``, has seen enough."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
