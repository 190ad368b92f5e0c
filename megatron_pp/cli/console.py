"""rich's console as the commands use it. Imported when a command runs: ``--help`` and errors do without rich."""

from __future__ import annotations

from rich.console import Console


class Terminal(Console):
    """A console that raises BrokenPipeError where its reader, such as ``head``, is gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
