"""``megatron-pp check``: finds faults of a job before it is launched.

Arguments after the script are the script's, so this command parses its own arguments, as ``run`` does.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from megatron_pp.errors import MegatronPPError
from megatron_pp.plan.costs.files import check_writable, write_whole
from megatron_pp.tools.advise.layers.gpus import GPUS, gpu_named
from megatron_pp.tools.check import outputs
from megatron_pp.tools.check.command import Answer, check
from megatron_pp.tools.check.findings import ERROR, NOTE, RISK, Finding, Section
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.megatron_flags import HOPPER, PATIENCE
from megatron_pp.tools.check.jobs.read import Given, read_job
from megatron_pp.tools.check.text import lines_of
from megatron_pp.tools.cli import parity, run
from megatron_pp.tools.cli.errors import BAD_INPUT
from megatron_pp.tools.cli.terminal import open_terminal, print_line
from megatron_pp.tools.parity.answers.verdicts import DIFFERENT, EXIT_CODES

NAME = "check"
SUMMARY = "find what would fail, compute wrongly, wait or run out of memory in a job, before it is launched"
_EXAMPLES = """\
It needs no GPU, and does not launch the job. The job is one of these:

  pretrain_gpt.py --num-layers 32 ...      # a Megatron script and its flags
  job.sh                                   # a shell script: torchrun, slime, verl, `megatron sft`; it is not run
  recipe.yaml model.num_layers=8 ...       # a file of Megatron, Megatron-Bridge, verl or ms-swift
  llama3_70b.toml                          # a file of torchtitan
  megatron.bridge.recipes.llama:FUNCTION   # a recipe function of Megatron-Bridge

exit codes: 0 nothing found, 1 the job would fail or compute wrongly, 2 the job cannot be read, 3 risks only

examples:
  megatron-pp check --gpus 2048 --gpu h100 pretrain_gpt.py --tensor-model-parallel-size 8 ...
  megatron-pp check --gpus 64 --strict --junit check.xml recipe.yaml
"""
_GENERATIONS = {"v100": 7, "a100": 8, "a800": 8, "l40s": 8, "b200": 10, "b300": 10, "gb200": 10, "gb300": 10}
"""First part of a GPU's name -> its major compute capability. GPUs that are not listed have Hopper's."""
_RELEASE = re.compile(r"\d+\.\d+(\.\w+)*")


def main(argv: Sequence[str]) -> int:
    """Checks a job, prints the answer, and returns the exit code. Raises MegatronPPError if the job cannot be read."""
    args = _parse(argv)
    gpu = None if args.gpu is None else gpu_named(args.gpu)
    if args.junit is not None:
        check_writable(args.junit)
    generation = _GENERATIONS.get((args.gpu or "").partition("-")[0].lower(), HOPPER)
    try:
        job = read_job(Given([args.script, *args.arguments], args.gpus, args.module, generation, args.patience))
    except (ImportError, MegatronPPError) as error:
        if args.junit is not None:
            write_whole(args.junit, outputs.junit_of_error(str(error)))
        if args.github:
            print(outputs.annotation_of_error(str(error)), flush=True)
        raise
    job = replace(job, release=args.release or job.release)
    answer = check(job, gpu, (lambda: _numbers(args, job)) if args.numbers else None)
    _print(args, answer)
    return answer.exit_code(args.strict)


def _print(args: argparse.Namespace, answer: Answer) -> None:
    if args.junit is not None:
        write_whole(args.junit, outputs.junit_of(answer, args.strict))
    if args.json:
        print(json.dumps(answer.to_json(args.strict), default=str), flush=True)
        return
    console = open_terminal(no_color=True)
    for line, hang in lines_of(answer):
        print_line(console, line, hang)
    if args.github:
        for line in outputs.annotations_of(answer):
            print(line, flush=True)


def _numbers(args: argparse.Namespace, job: Job) -> Section:
    """The answer of `megatron-pp parity` to the script and its flags, as a section."""
    if not args.module and not args.script.endswith(".py"):
        text = f"numbers can be compared only for a Megatron script with its flags; {job.source} is not one"
        return Section("numbers", findings=(Finding("numbers-not-compared", RISK, text),))
    words = [*(["-m"] if args.module else []), args.script, *args.arguments]
    try:
        said = parity.compare(words)
    except (ImportError, OSError, MegatronPPError) as error:
        text = f"numbers cannot be compared: {error}"
        return Section("numbers", findings=(Finding("numbers-not-compared", RISK, text),))
    level = ERROR if said.verdict == DIFFERENT else RISK if EXIT_CODES[said.verdict] else NOTE
    names = {ERROR: "numbers-differ", RISK: "numbers-not-exercised", NOTE: "numbers-agree"}
    first, *rest = said.lines
    return Section("numbers", tuple(rest), (Finding(names[level], level, first),), said.json)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = run.script_parser(NAME, "options", SUMMARY, _EXAMPLES)
    parser.usage = "%(prog)s --gpus N [options] [-m] JOB [its flags or changes]"
    parser.add_argument("--gpus", type=parity.count, required=True, metavar="N", help="GPUs of the whole job")
    parser.add_argument("--gpu", default=None, metavar="NAME", help=f"the card: {', '.join(GPUS)}")
    numbers = "also compare losses and gradients with one process on small sizes, as parity does; takes minutes"
    parser.add_argument("--numbers", action="store_true", default=False, help=numbers)
    release = "list the known faults of this release of Megatron-core; default the job's, or the installed one"
    parser.add_argument("--release", type=_release, default=None, metavar="X.Y.Z", help=release)
    parser.add_argument("--strict", action="store_true", default=False, help="exit with 1 also for risks")
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    parser.add_argument("--junit", metavar="FILE", default=None, help="write a JUnit file")
    parser.add_argument(
        "--github", action="store_true", default=False, help="also print annotations for GitHub Actions"
    )
    more = f"seconds that Megatron's parser may take; default {PATIENCE:g}"
    parser.add_argument("--patience", type=parity.seconds, default=PATIENCE, metavar="SECONDS", help=more)
    parser.add_argument("-m", dest="module", action="store_true", default=False, help="JOB is a module")
    parser.add_argument("script", metavar="JOB", help="script or file of the job; its own arguments follow it")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    rest.required = False
    return parser.parse_args(argv)


def _release(text: str) -> str:
    if not _RELEASE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a release of Megatron-core; write it as 0.19.2")
    return text


def cannot_read(message: str, argv: Sequence[str]) -> int:
    """Prints the JSON of `--json` if there is no answer. Returns the exit code."""
    if "--json" in argv:
        print(json.dumps({"error": message, "exit_code": BAD_INPUT}), flush=True)
    return BAD_INPUT
