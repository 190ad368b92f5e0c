"""How a rank ends: after a step, where a signal asks for it, or with a report of what has failed.

Under scripts/launch.py the first rank of a node that fails says why, the first with an unforeseen error shows its
stack, and the launcher ends with one line, from what the ranks have left in its folder. Without that launcher every
rank speaks for itself, except that bad input, which all see, is reported by the first rank of a node.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from examples.gpt.distributed import Process
from examples.gpt.files import write_atomically
from megatron_pp.errors import ConfigError, PipelinePeerError, PlanError, ScheduleInputError

REPORTS = "MEGATRON_PP_REPORTS"
_STACK_LINES, _MESSAGE_LINES = 18, 9


class StopRequest:
    """After ``begin`` the first SIGINT or SIGTERM is noted in ``first``.

    A process that left on its own would leave its peers without a partner in the middle of a step. So the ranks
    exchange their requests at a step's end, and all leave after the same one."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        return self

    def begin(self) -> None:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: Any) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _note(self, number: int, frame: Any) -> None:
        self.first = self.first or signal.Signals(number)


def exit_code_of(error: Exception) -> int:
    """The process's exit code, as listed in the README beside this file."""
    default = 2 if isinstance(error, (ConfigError, PlanError, ScheduleInputError)) else 1
    return getattr(error, "exit_code", default)


def end_process(code: int) -> NoReturn:
    """Leave with ``code``; after a failure without the destructors of process groups, which may wait for peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        os._exit(code)
    sys.exit(code)


def report(error: Exception, foreseen: bool) -> None:
    """Say what has ended this rank: in words where it was ``foreseen``, else with its stack."""
    process = Process.from_environment()
    text = f"train.py: {type(error).__name__}: {error}" if foreseen else "".join(traceback.format_exception(error))
    if REPORTS in os.environ:
        speaks = _leave_report(Path(os.environ[REPORTS]), process.rank, error, "message" if foreseen else "stack")
    else:
        speaks = process.local_rank == 0 or exit_code_of(error) == 1
    if speaks:
        print(_shortened(text, _MESSAGE_LINES if foreseen else _STACK_LINES), file=sys.stderr, flush=True)


def _leave_report(folder: Path, rank: int, error: Exception, kind: str) -> bool:
    """For the launcher, in one line. Returns whether this rank is the first with a report of this kind."""
    start, of_peer = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), isinstance(error, PipelinePeerError)
    line = next(iter(str(error).splitlines()), "")
    if not of_peer:
        line = f"rank {rank}: {type(error).__name__}: {line}"
    # The launcher's SIGTERM may end this rank at any point: it reads a whole report, or none.
    with suppress(OSError):
        found = {"start": int(start), "rank": rank, "of_peer": of_peer, "line": line}
        write_atomically(folder / f"{start}-{rank}.json", json.dumps(found))
    try:
        (folder / f"{start}-{kind}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # a full disk, or the folder is gone: better said twice than not at all
    return True


def _shortened(text: str, most: int) -> str:
    """``text`` in at most that many lines: the first, and the last ones."""
    lines = text.rstrip().splitlines()
    if len(lines) > most:
        lines = [lines[0], f"  ... {len(lines) - most + 2} lines ...", *lines[2 - most :]]
    return "\n".join(lines)
