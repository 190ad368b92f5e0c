"""What a rank says when it fails, so that what all of them say stays short.

Under scripts/launch.py the first rank of a node that fails says why, the first with an unforeseen error shows its
stack, and the launcher ends with one line, from what the ranks have left in its folder. Without that launcher every
rank speaks for itself, except that bad input, which all see, is reported by the first rank of a node.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from examples.gpt.distributed import Process
from examples.gpt.files import write_atomically
from megatron_pp.errors import ConfigError, PipelinePeerError, PlanError

REPORTS = "MEGATRON_PP_REPORTS"
_STACK_LINES, _MESSAGE_LINES = 18, 9


def report(error: Exception, foreseen: bool) -> None:
    """Say what has ended this rank: in words where it was ``foreseen``, else with its stack."""
    process, start = Process.from_environment(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    kind = "message" if foreseen else "stack"
    if REPORTS in os.environ:
        folder = Path(os.environ[REPORTS])
        line = f"rank {process.rank}: {type(error).__name__}: {first_line(error)}"
        of_peer = isinstance(error, PipelinePeerError)
        found = {"start": int(start), "rank": process.rank, "of_peer": of_peer}
        content = json.dumps({**found, "line": first_line(error) if of_peer else line})
        # The launcher's SIGTERM may end this rank at any point: it reads a whole report, or none.
        with suppress(OSError):
            write_atomically(folder / f"{start}-{process.rank}.json", content)
        speaks = _is_first(folder / f"{start}-{kind}")
    else:
        speaks = process.local_rank == 0 or exit_code_of(error) == 1
    if speaks and foreseen:
        print(shortened(f"train.py: {type(error).__name__}: {error}", _MESSAGE_LINES), file=sys.stderr, flush=True)
    elif speaks:
        print(shortened("".join(traceback.format_exception(error)), _STACK_LINES), file=sys.stderr, flush=True)


def exit_code_of(error: Exception) -> int:
    """The process's exit code, as listed in the README beside this file."""
    default = 2 if isinstance(error, (ConfigError, PlanError)) else 1
    return getattr(error, "exit_code", default)


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def shortened(text: str, most: int) -> str:
    """``text`` in at most that many lines: the first, and the last ones."""
    lines = text.rstrip().splitlines()
    if len(lines) <= most:
        return "\n".join(lines)
    return "\n".join([lines[0], f"  ... {len(lines) - most + 2} lines ...", *lines[2 - most :]])


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # a full disk, or the folder is gone: better said twice than not at all
    return True
