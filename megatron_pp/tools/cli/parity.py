"""``megatron-pp parity``: tests whether a parallel configuration computes the same as one process.

Arguments after the script are the script's, so this command parses its own arguments, as ``run`` does.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.errors import MegatronPPError
from megatron_pp.integrations.megatron.settings import read_settings
from megatron_pp.plan.costs.files import check_writable, write_whole
from megatron_pp.tools.cli import run
from megatron_pp.tools.cli.errors import BAD_INPUT
from megatron_pp.tools.cli.terminal import open_terminal, print_command, print_line
from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.answers import junit
from megatron_pp.tools.parity.answers.verdicts import DIFFERENT, EXIT_CODES, REPEAT
from megatron_pp.tools.parity.layout import CHECKPOINTS
from megatron_pp.tools.parity.workers.keeper import Workplace, work_apart

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_pp.tools.parity.answers.answer import Answer

NAME = "parity"
_LAYERS = "--transformer-impl"  # parity sets it on the CPU
SUMMARY = "compare a parallel configuration of a Megatron script with one process, on small sizes"
_EXAMPLES = """\
Give the script and its flags as for training. The command makes sizes small, uses made-up data and turns dropout off.
Without a GPU everything runs on the CPU. Settings of this engine, as for `megatron-pp run`, also come before the
script.

With --checkpoint, training continues from a checkpoint, and is compared with one process that was not interrupted.
restore: one process saves it and the layout restores it; save: the layout saves it and one process restores it;
resume: the layout does both; all: the three one after another.

exit codes: 0 equal (to the bit, or within rounding), 1 different, 2 cannot run, or not exercised

examples:
  megatron-pp parity pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel --num-layers 32 ...
  megatron-pp parity --nproc 4 --json --junit parity.xml --html parity.html pretrain_gpt.py ...
"""


def main(argv: Sequence[str]) -> int:
    """Compares, prints the answer, and returns the exit code. Raises MegatronPPError for arguments that do not fit."""
    args = _parse(argv)
    settings = read_settings(args.settings, **run.given_settings(args))
    for path in filter(None, (args.junit, args.html)):
        check_writable(path)
    try:
        said = _compared(args, settings)
    except (ImportError, MegatronPPError) as error:
        if args.junit is not None:
            write_whole(args.junit, junit.text_of_error(str(error)))
        raise
    if args.json:
        print(json.dumps(said.json), flush=True)
    else:
        _print(said.lines, open_terminal(no_color=True))
    for path, text in ((args.junit, said.junit), (args.html, said.html)):
        if path is not None:
            write_whole(path, text)
    return EXIT_CODES[said.verdict]


def compare(argv: Sequence[str]) -> "Said":
    """The answer, for another command. Raises as ``main`` does."""
    args = _parse(argv)
    return _compared(args, read_settings(args.settings, **run.given_settings(args)))


def _compared(args: argparse.Namespace, settings: Any) -> "Said":
    return work_apart(partial(_answer, args, settings), args.deadline, f"importing what {args.script} imports")


def _print(lines: Sequence[str], console: "Console") -> None:
    for line in lines:
        (print_command if line.startswith(REPEAT) else print_line)(console, line)


@dataclass(frozen=True)
class Said:
    """The answer in each form in which it is printed or written."""

    verdict: str
    json: dict[str, Any]
    lines: list[str]
    junit: str
    html: str


def _answer(args: argparse.Namespace, settings: Any, place: Workplace) -> Said:
    """Runs the comparison, in a process of its own, as it runs the script. The script's output goes to standard
    error."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share the cores
    with collector_paused():  # saves a sixth of the time to import torch
        command: Any = importlib.import_module("megatron_pp.tools.parity.command")
    options = command.Options(
        script=os.path.abspath(args.script) if not args.module else args.script,
        arguments=args.arguments,
        module=args.module,
        nproc=args.nproc,
        shrink=args.shrink == "auto",
        engine=args.engine,
        steps=args.steps,
        uneven_masks=args.masks == "uneven",
        deadline=args.deadline,
        checkpoints=CHECKPOINTS if args.checkpoint == "all" else tuple(args.checkpoint.split()),
    )
    load = run.load_module if args.module else run.load_script
    with contextlib.redirect_stdout(sys.stderr), _progress() as say:
        answer = command.answer(options, load, partial(_install, settings), say, place)
    answer.known_faults = known_faults(answer, options.arguments)
    page: Any = importlib.import_module("megatron_pp.tools.parity.answers.page")
    return Said(answer.verdict, answer.to_json(), answer.lines(), junit.text_of(answer), page.text_of(answer))


def known_faults(answer: "Answer", given: Sequence[str]) -> list[dict[str, str]]:
    """The known faults of the imported Megatron-core that the smallest differing layout has. ``given`` has the script's
    flags as the user wrote them."""
    if answer.verdict != DIFFERENT:
        return []
    risks: Any = importlib.import_module("megatron_pp.tools.check.risks")
    table: Any = importlib.import_module("megatron_pp.tools.check.jobs.flag_table")
    layout = answer.layout if answer.smallest is None else answer.smallest.layout
    flags = layout.flags.without(*(name for name in (_LAYERS,) if name not in Flags.read(given)))
    release = getattr(sys.modules.get("megatron.core"), "__version__", "")
    job = table.read_flags(["script", *flags.words()], layout.world, "", release)
    found = risks.section(replace(job, on_engine=answer.whose != "megatron")).findings
    return [{"name": one.name, "what": one.text, "change": one.change} for one in found]


def _install(settings: Any) -> None:
    importlib.import_module("megatron_pp.integrations.on_import").install_on_import(settings)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Reports each run as it begins: on a terminal by a bar of tqdm, if it is installed, otherwise by a line."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield lambda text: print(f"parity: {text}", file=sys.stderr, flush=True)
        return
    tqdm.monitor_interval = 0  # its thread would be forked with the ranks
    with tqdm(unit="run", file=sys.stderr, leave=False) as bar:

        def say(text: str) -> None:
            bar.update()
            bar.set_description(text)

        yield say


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = run.script_parser(NAME, "options", SUMMARY, _EXAMPLES)
    parser.add_argument(
        "--nproc", type=count, default=None, help="number of processes; default: as many as the layout needs"
    )
    parser.add_argument(
        "--shrink", choices=("auto", "none"), default="auto", help="make sizes small, or keep them; default: auto"
    )
    parser.add_argument(
        "--engine",
        choices=("ours", "megatron", "both"),
        default="both",
        help="whose schedule runs the layout; default: both",
    )
    parser.add_argument("--steps", type=count, default=2, help="training steps; default: 2")
    parser.add_argument(
        "--masks", choices=("uneven", "full"), default="uneven", help="loss masks of the made-up data; default: uneven"
    )
    parser.add_argument(
        "--checkpoint", choices=(*CHECKPOINTS, "all"), default="", help="also save and resume a checkpoint (see below)"
    )
    parser.add_argument("--deadline", type=seconds, default=120.0, help="seconds for each run; default: 120")
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    parser.add_argument("--junit", metavar="FILE", default=None, help="write a JUnit file")
    parser.add_argument("--html", metavar="FILE", default=None, help="write a page with a map of layers and ranks")
    run.add_settings(parser)
    return run.parsed(parser, argv)


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999999")
    return int(text)


def seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= 1e9:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to 1e9")


def cannot_run(message: str, argv: Sequence[str]) -> int:
    """Prints the JSON of `--json` if there is no verdict. Returns the exit code."""
    if "--json" in argv:
        print(json.dumps({"verdict": None, "error": message}), flush=True)
    return BAD_INPUT
