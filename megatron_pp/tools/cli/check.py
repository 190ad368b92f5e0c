"""``megatron-pp check``: what would go wrong in a job, before it is launched.

What follows the script is the script's, so the command reads its arguments itself, as ``run`` does.
"""

import argparse
import json
from collections.abc import Sequence

from megatron_pp.tools.advise.gpus import GPUS, gpu_named
from megatron_pp.tools.check.command import check
from megatron_pp.tools.check.megatron_flags import HOPPER, PATIENCE
from megatron_pp.tools.check.read import Given, read_job
from megatron_pp.tools.check.text import lines_of
from megatron_pp.tools.cli import run
from megatron_pp.tools.cli.errors import BAD_INPUT
from megatron_pp.tools.cli.terminal import open_terminal, print_line

NAME = "check"
SUMMARY = "find what would fail, compute wrongly, wait or run out of memory in a job, before it is launched"
_EXAMPLES = """\
No GPU and no launch is needed.

exit codes: 0 nothing found, 1 something would fail or compute wrongly, 2 cannot be read, 3 risks only

examples:
  megatron-pp check --gpus 2048 --gpu h100 pretrain_gpt.py --tensor-model-parallel-size 8 ...
"""
_GENERATIONS = {"v100": 7, "a100": 8, "a800": 8, "l40s": 8, "b200": 10, "b300": 10, "gb200": 10, "gb300": 10}
"""First part of a GPU's name -> its generation, as CUDA numbers it; others are of Hopper's."""


def main(argv: Sequence[str]) -> int:
    """Check, print the answer, and return the exit code. Raises MegatronPPError for what cannot be read."""
    args = _parse(argv)
    gpu = None if args.gpu is None else gpu_named(args.gpu)
    generation = _GENERATIONS.get((args.gpu or "").partition("-")[0], HOPPER)
    words = [args.script, *args.arguments]
    job = read_job(Given(words, args.gpus, args.module, generation, args.patience))
    answer = check(job, gpu)
    if args.json:
        print(json.dumps(answer.to_json(args.strict)), flush=True)
    else:
        console = open_terminal(no_color=True)
        for line, hang in lines_of(answer):
            print_line(console, line, hang)
    return answer.exit_code(args.strict)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = run.script_parser(NAME, "options", SUMMARY, _EXAMPLES)
    parser.add_argument("--gpus", type=_count, required=True, metavar="N", help="GPUs of the whole job")
    parser.add_argument("--gpu", default=None, metavar="NAME", help=f"the card: {', '.join(GPUS)}")
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    parser.add_argument("--strict", action="store_true", default=False, help="risks alone end with 1 too")
    more = f"seconds that Megatron's parser may take; default {PATIENCE:g}"
    parser.add_argument("--patience", type=float, default=PATIENCE, metavar="SECONDS", help=more)
    parser.add_argument("-m", dest="module", action="store_true", default=False, help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="the script, whose arguments follow it")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    rest.required = False
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999999")
    return int(text)


def cannot_read(message: str, argv: Sequence[str]) -> int:
    """What `--json` prints where there is no answer; the exit code."""
    if "--json" in argv:
        print(json.dumps({"error": message, "exit_code": BAD_INPUT}), flush=True)
    return BAD_INPUT
