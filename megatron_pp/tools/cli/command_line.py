"""The ``megatron-pp`` command: starts a subcommand, and turns its errors into a line and an exit code."""

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
from megatron_pp.tools.cli.options.parser import parse
from megatron_pp.tools.cli.terminal import open_terminal, wrapped_for

_EXTRAS = {"megatron": "megatron", "tqdm": "megatron", "yaml": "megatron", "matplotlib": "viz"}
"""Package that may be missing -> the extra that installs it."""
_PACKAGE = Path(__file__).resolve().parents[2]
_COMMANDS = ("plan", "verify", "simulate", "advise", "draw", "report")
_GROUPS = {
    "a job": (check.NAME, run.NAME),
    "which pipeline": ("advise", "simulate", "draw"),
    "plans and numbers": ("plan", "verify", "report", parity.NAME),
}
"""Title in the help -> commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code (``errors.py``)."""
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
        print(end="", flush=True)  # so that a closed output raises here
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        problem = f"the answer cannot be written ({error.strerror or error})"
        code = BAD_INPUT
    except KeyboardInterrupt:
        _drop_output()
        problem = "ended by Ctrl-C"
        code = ENDED
    except (ImportError, MegatronPPError) as error:
        problem = _in_words(error)
        code = REFUSED if isinstance(error, RefusedError) else BAD_INPUT
    _complain(f"megatron-pp {args.command}: {problem}")
    return code


def _run_script(argv: Sequence[str]) -> int:
    """Runs a script on this engine. Wrong settings and a missing script are reported here. Errors of the script are
    raised, as without this command.
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
    """Under torchrun, the script with its errors written to torchrun's error file.

    torchrun prints that error as the root cause and keeps it in its log folder. It ends the other ranks immediately,
    maybe before they have printed their errors.
    """
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
    except Exception as error:  # a fault of this command; Python's own exit code 1 would mean "different"
        traceback.print_exc()
        return parity.cannot_run(f"{type(error).__name__}: {error}", argv)


def _check(argv: Sequence[str]) -> int:
    try:
        code = check.main(argv)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        _drop_output()
        return OK
    except (ImportError, OSError, MegatronPPError) as error:
        _complain(f"megatron-pp {check.NAME}: {_in_words(error)}")
        return check.cannot_read(_in_words(error), argv)
    except KeyboardInterrupt:
        _drop_output()
        _complain(f"megatron-pp {check.NAME}: ended by Ctrl-C")
        return ENDED
    except Exception as error:  # a fault of this command; Python's own exit code 1 would mean "would fail"
        traceback.print_exc()
        return check.cannot_read(f"{type(error).__name__}: {error}", argv)


def _command(name: str) -> Any:
    """The module of a command. If a package is missing, a stand-in whose help says so; other commands work."""
    try:
        return importlib.import_module(f"megatron_pp.tools.cli.{name}")
    except ImportError as error:
        return SimpleNamespace(
            SUMMARY=f"not available: {_in_words(error)}", EXAMPLES="", add_arguments=lambda _: None, run=None
        )


def _in_words(error: Exception) -> str:
    missing = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if missing not in _EXTRAS:
        return f"{error}; install it by `pip install {missing}`" if missing else str(error)
    return f"{error}; install it by `pip install '.[{_EXTRAS[missing]}]'`"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning of this package as a note. Warnings of other libraries are left out, unless the user asks Python
    for warnings (``-W``, PYTHONWARNINGS)."""
    if sys.warnoptions or Path(filename).is_relative_to(_PACKAGE):
        _complain(f"note: {message}")


def _complain(text: str) -> None:
    with suppress(OSError):
        print(wrapped_for(sys.stderr, visible(text)), file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Discards the output that is still in the buffer. Otherwise the interpreter's flush at its end would fail, too."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
