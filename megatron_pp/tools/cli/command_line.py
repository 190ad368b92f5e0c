"""The ``megatron-pp`` command: look at plans before they run, and at runs afterwards."""

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from megatron_pp.errors import MegatronPPError, visible
from megatron_pp.tools.cli import check, parity, run
from megatron_pp.tools.cli.errors import BAD_INPUT, ENDED, OK, REFUSED, RefusedError, UsageError
from megatron_pp.tools.cli.parser import parse
from megatron_pp.tools.cli.terminal import open_terminal, wrapped_for

_EXTRAS = {"megatron": "megatron", "tqdm": "megatron", "yaml": "megatron", "matplotlib": "viz"}
"""Package that may be missing -> the extra that brings it."""
_PACKAGE = Path(__file__).resolve().parents[2]
_COMMANDS = ("plan", "verify", "simulate", "advise", "draw", "report")
_GROUPS = {
    "a job": (check.NAME, run.NAME),
    "which pipeline": ("advise", "simulate", "draw"),
    "plans and numbers": ("plan", "verify", "report", parity.NAME),
}
"""Title in the help -> commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code (``errors.py``)."""
    given = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if given[:1] == [run.NAME]:
        return _run_script(given[1:])
    if given[:1] == [parity.NAME]:
        return _compare(given[1:])
    if given[:1] == [check.NAME]:
        return _check(given[1:])
    try:
        commands = {name: _command(name) for name in _COMMANDS}
    except KeyboardInterrupt:
        _complain("megatron-pp: ended by Ctrl-C")
        return ENDED
    args = parse(commands, given, {own.NAME: own.SUMMARY for own in (check, run, parity)}, _GROUPS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            code = int(args.run(args, open_terminal(args.no_colour or None)))
        print(end="", flush=True)  # also where the output is closed, and there is none
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        problem = f"the answer cannot be written ({error.strerror or error})"
        code = BAD_INPUT
    except KeyboardInterrupt:
        _drop_output()
        problem, code = "ended by Ctrl-C", ENDED
    except (ImportError, MegatronPPError) as error:
        problem = _in_words(error)
        code = REFUSED if isinstance(error, RefusedError) else BAD_INPUT
    _complain(f"megatron-pp {args.command}: {problem}")
    return code


def _run_script(argv: Sequence[str]) -> int:
    """Errors of the settings, and a script that is not there, are ours to report; whatever the script raises is
    raised.
    """
    script: Callable[[], None] | None = None
    try:
        script = run.prepare(argv)
        _recorded(script)()
    except (ImportError, MegatronPPError) as error:
        if script is not None and not isinstance(error, UsageError):
            raise
        _complain(f"megatron-pp {run.NAME}: {_in_words(error)}")
        return BAD_INPUT
    return OK


def _recorded(script: Callable[[], None]) -> Callable[[], None]:
    """Under torchrun what the script raises goes to the error file that it reads, prints as the root cause, and keeps
    in its log folder: it ends the other ranks at once, maybe before they have said theirs."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return script
    errors: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    recorded: Callable[[], None] = errors.record(script)
    return recorded


def _compare(argv: Sequence[str]) -> int:
    try:
        return parity.main(argv)
    except (ImportError, OSError, MegatronPPError) as error:
        _complain(f"megatron-pp {parity.NAME}: {_in_words(error)}")
        return parity.cannot_run(_in_words(error), argv)
    except KeyboardInterrupt:
        _complain(f"megatron-pp {parity.NAME}: ended by Ctrl-C")
        return ENDED
    except Exception as error:  # ours: without an answer, and Python's own exit code would say "different"
        traceback.print_exc()
        return parity.cannot_run(f"{type(error).__name__}: {error}", argv)


def _check(argv: Sequence[str]) -> int:
    try:
        code = check.main(argv)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        _drop_output()
        return OK
    except (ImportError, OSError, MegatronPPError) as error:
        _complain(f"megatron-pp {check.NAME}: {_in_words(error)}")
        return check.cannot_read(_in_words(error), argv)
    except KeyboardInterrupt:
        _drop_output()
        _complain(f"megatron-pp {check.NAME}: ended by Ctrl-C")
        return ENDED
    except Exception as error:  # ours: without an answer, and Python's own exit code would say "would fail"
        traceback.print_exc()
        return check.cannot_read(f"{type(error).__name__}: {error}", argv)


def _command(name: str) -> Any:
    """The module of a command. Where a package that it needs is missing, its help says so, and that of others works."""
    try:
        return importlib.import_module(f"megatron_pp.tools.cli.{name}")
    except ImportError as error:
        return SimpleNamespace(
            SUMMARY=f"not available: {_in_words(error)}", EXAMPLES="", add_arguments=lambda _: None, run=None
        )


def _in_words(error: Exception) -> str:
    missing = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if missing not in _EXTRAS:
        return f"{error}; `pip install {missing}` gets it" if missing else str(error)
    return f"{error}; `pip install '.[{_EXTRAS[missing]}]'` gets it, and what goes with it"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A note of ours. What another library warns of is not the answer, and does not appear between its lines, unless
    Python was told to show warnings (``-W``, PYTHONWARNINGS)."""
    if sys.warnoptions or Path(filename).is_relative_to(_PACKAGE):
        _complain(f"note: {message}")


def _complain(text: str) -> None:
    with suppress(OSError):
        print(wrapped_for(sys.stderr, visible(text)), file=sys.stderr, flush=True)


def _drop_output() -> None:
    """What is still in the buffer goes nowhere: the interpreter's own flush at its end would fail as well."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
