"""``megatron-pp advise``: recommends a pipeline, and says why the others are worse."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pp.errors import MegatronPPError
from megatron_pp.plan.costs.files import check_writable, write_whole
from megatron_pp.plan.ir.feature import all_values
from megatron_pp.tools import draw
from megatron_pp.tools.advise import answer
from megatron_pp.tools.advise.evaluate import Outcome
from megatron_pp.tools.advise.microbatch_order import MicrobatchOrder, best_order
from megatron_pp.tools.advise.pipeline_search import Findings, Report, search
from megatron_pp.tools.advise.question import Question
from megatron_pp.tools.cli.errors import INTERRUPTED, OK, RefusedError, UsageError
from megatron_pp.tools.cli.options import advise_input
from megatron_pp.tools.cli.options.cost_options import number
from megatron_pp.tools.cli.options.plan_options import whole
from megatron_pp.tools.cli.terminal import print_command, print_json, print_line, print_table, write_output
from megatron_pp.tools.draw.facts import percent, short
from megatron_pp.tools.draw.pareto_front import Point

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "which pipeline should I run? Schedule, chunks, layers per stage, recomputation"
EXAMPLES = """examples:
  megatron-pp advise -P 8 --memory-gb 80 --activation-gb 2 --forward-ms 1 --backward-ms 1 --weight-ms 1 \\
      --p2p-ms 0.1 --global-batch 64
  megatron-pp advise -P 8 --global-batch 128 --gpu h100 --layers 80 --hidden-size 8192 --seq-length 8192 \\
      --attention-heads 64 --vocab-size 128256 --tensor-parallel 8 --sequence-parallel --micro-batch-size 1,2
  megatron-pp advise -P 4 --global-batch 32 --memory-gb 80 --costs-per layer --layers 30 --forward-ms 2 \\
      --backward-ms 4 --activation-gb 0.5 --loss-ms 3,3,3 --plot front.svg
  megatron-pp advise --from-trace runs/x/traces --global-batch 64 --memory-gb 80 --activation-gb 2
  megatron-pp advise --megatron-args "--num-layers 32 --hidden-size 4096 ..." --gpu a100

exit codes: 0 done, 1 nothing fits into the memory, 2 wrong arguments, 3 ended by Ctrl-C or SIGTERM (the answer is the
best pipeline that was found until then)
"""
_TORCHRUN = "torchrun "
_ORDER_SHARE = 0.2  # share of the budget for the order of unequal microbatches
_SILENCE = 10.0  # seconds between two lines of progress
_JOBS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    advise_input.add_arguments(parser)
    budget = "seconds to search; default a fixed amount of work, which takes 20 s for 16 ranks and one or two minutes "
    budget += "for the largest pipelines on two idle cores"
    parser.add_argument("--budget-s", type=number, metavar="S", help=budget)
    parser.add_argument("--jobs", type=whole, metavar="N", help="processes that search; default 2, or fewer cores")
    parser.add_argument("--plot", metavar="FILE", help="step time against memory, as .svg or .png")
    written = (
        "file for the costs of a recommended search; a run reads it by --pipeline-measured; default "
        + answer.MEASURED_FILE
    )
    parser.add_argument("--measured-out", metavar="FILE", help=written)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace, console: Console) -> int:
    ending = Path(args.plot).suffix if args.plot else ".svg"
    if ending not in (".svg", ".png"):
        raise UsageError(f"--plot writes .svg and .png, not {ending!r}")
    if args.jobs == 0:
        raise UsageError("--jobs is 0; it must be at least 1")
    if args.plot:
        draw.require_matplotlib()
    question = advise_input.question_of(args)
    for path in filter(None, (args.plot, args.measured_out)):
        check_writable(path)
    findings, order = _found(question, args.budget_s, args.jobs or min(_JOBS, os.cpu_count() or 1))
    best = findings.best
    measured = args.measured_out or answer.MEASURED_FILE
    if args.json:
        print_json(console, answer.as_json(findings, order, measured))
    if best is None and findings.interrupted:
        print("megatron-pp advise: interrupted before a plan was found", file=sys.stderr)
        return INTERRUPTED
    if best is None:
        raise _nothing_found(findings)
    if not args.json:
        for line in _recommended(findings, best, order, measured):
            (print_command if line.startswith(_TORCHRUN) else print_line)(console, line)
        _show_others(findings, best, console)
    if best.spec is not None and best.spec.measured is not None:  # the printed command names this file
        write_whole(measured, json.dumps(all_values(best.spec.measured), indent=1) + "\n")
    elif args.measured_out:
        warnings.warn(
            f"{args.measured_out} is not written: {best.candidate.schedule} is not a schedule with a search",
            stacklevel=1,
        )
    if args.plot:
        points = []
        for one in findings.fitting:
            name = f"{one.candidate.schedule} V={one.candidate.num_chunks}"
            points.append(Point(one.peak, one.step, name, one in findings.front))
        picture = draw.front(points, question.memory, as_png=ending == ".png")
        if args.json:
            write_whole(args.plot, picture)
        else:
            write_output(console, args.plot, picture)
    return INTERRUPTED if findings.interrupted else OK


def _found(question: Question, budget: float | None, jobs: int) -> tuple[Findings, MicrobatchOrder | None]:
    """The best pipeline, and the order of unequal microbatches; after an interrupt there is no order."""
    patience = None
    if budget is not None and question.microbatch_costs:
        budget, patience = budget * (1 - _ORDER_SHARE), budget * _ORDER_SHARE
    with _ended_by_signals(), _progress() as report:
        findings = search(question, budget, jobs, report)
        try:
            if findings.best is not None and not findings.interrupted:
                return findings, best_order(question, findings.best, patience)
        except KeyboardInterrupt:
            findings = replace(findings, interrupted=True)
    return findings, None


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM end a search as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # a handler can be set in the main thread only
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[Report]:
    """Reports progress on the error stream: on a terminal by a bar with the remaining time, otherwise by a line every
    ten seconds."""
    from rich import progress
    from rich.console import Console

    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield _Lines().report
        return
    columns = [progress.BarColumn(), progress.TaskProgressColumn(), progress.TimeElapsedColumn()]
    columns += [progress.TextColumn("left"), progress.TimeRemainingColumn(), progress.TextColumn("{task.description}")]
    with progress.Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task("", visible=False)
        yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what, visible=True)


class _Lines:
    """Prints the progress of a long search as lines."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def report(self, done: int, of: int, what: str) -> None:
        if time.monotonic() - self.said > _SILENCE:
            self.said = time.monotonic()
            print(f"megatron-pp advise: {done / max(of, 1):.0%} done, {what}", file=sys.stderr, flush=True)


def _nothing_found(findings: Findings) -> MegatronPPError:
    question = findings.question
    least = findings.least_memory
    if least is None and findings.cut_short:
        estimates = [one for one in findings.estimates if not one.refused]
        fastest = min(estimates, key=lambda one: one.step, default=None)
        first = (
            f"; a first estimate says that {fastest.candidate} is the fastest, ~{short(fastest.step)} ms"
            if fastest
            else ""
        )
        left = len(findings.not_looked_at)
        seconds = short(findings.seconds)
        advice = "give a larger --budget-s, or fewer microbatches, chunks or slices"
        return UsageError(f"search cut short after {seconds} s: none of {left} candidates was built{first}; {advice}")
    if least is None:
        reasons = (one.refused for one in findings.outcomes if one.refused)
        return RefusedError(f"no pipeline is possible: {min(reasons, key=len)}")
    cut = "search cut short: " if findings.cut_short else ""
    return RefusedError(
        f"{cut}nothing fits into {question.memory:g} GB; the least memory that was found is {least.peak:.3g} GB, with "
        f"{least.candidate}: give more memory, more ranks, smaller microbatches or more tensor parallelism"
    )


def _recommended(findings: Findings, best: Outcome, order: MicrobatchOrder | None, measured: str) -> Iterator[str]:
    """The lines of the answer: what to run, why, and how."""
    question = findings.question
    left = len(findings.not_looked_at)
    of_all = left + len({one.candidate for one in findings.outcomes})
    cut = f"; search cut short: {left} of {of_all} candidates were not built" if left else ""
    yield f"run {answer.in_one_line(question, best)}{cut}"
    for sentence in answer.sentences(question, best):
        yield f"    {sentence}"
    if order is not None:
        listed = ",".join(map(str, order.order))
        numbers = f"{order.step:.4g} ms; {order.step_as_given:.4g} ms as given"
        yield f"    run the unequal microbatches in the order {listed}: {numbers}"
    elif question.microbatch_costs and findings.interrupted:
        yield "    interrupted before an order of the unequal microbatches was found"
    certificate = best.certificate or {}
    yield f"    verified: {', '.join(certificate.get('rules', ()))}; {certificate.get('digest', '')}"
    yield ""
    if answer.megatron_models_run(best):
        flags = [*answer.our_flags(best, measured), "pretrain_gpt.py", *answer.megatron_flags(question, best)]
        ranks = question.pipeline_size * question.data_parallel
        yield f"{_TORCHRUN}--nproc-per-node {ranks} -m megatron_pp run {shlex.join(flags)} ..."
        yield "    on one machine, with the other flags of your script in place of ...; tensor and context parallelism"
        yield "    multiply the number of processes"
    else:
        settings = ", ".join(f"{name}={value!r}" for name, value in answer.our_settings(best, measured).items())
        yield f"TransformerConfig({settings}, ...)"
        yield "    in a training loop of your own: Megatron's models cannot run it"
    if best.spec is not None and best.spec.measured is not None:
        yield f"    wrote the costs of this plan to {measured}; the search of the run reads them"
    if answer.megatron_models_run(best) and not answer.runs_in_megatron(best):
        yield "    Megatron without megatron_pp has no such schedule"
    yield ""


def _show_others(findings: Findings, best: Outcome, console: Console) -> None:
    names = ["pipeline", "step ms", "bubble", "GB", "over the bound"]
    rows = []
    for one in findings.front:
        excess = "0%" if one.excess < 5e-4 else percent(one.excess)
        rows.append([_name(one), short(one.step), percent(one.bubble), short(one.peak), excess])
    print_table(console, "Step time against memory: no other is better in both", names, rows)
    rows = []
    for one in answer.alternatives(findings):
        step = short(one.step) if one.step else "-"
        memory = short(one.peak) if one.fit else "-"
        rows.append([_name(one), step, memory, answer.why_not(one, best)])
    for guess in answer.estimated(findings):
        why = answer.estimated_why(guess, best)
        rows.append([str(guess.candidate), f"~{short(guess.step)}", f"~{short(guess.peak)}", why])
    print_table(console, "Why not another", ["schedule", "step ms", "GB", "why"], rows)
    if findings.not_looked_at:
        ended = f"{'interrupted ' if findings.interrupted else ''}after {short(findings.seconds)} s"
        left = len(findings.not_looked_at)
        print_line(console, f"{ended}, {left} of the candidates were not built; --budget-s gives more")


def _name(one: Outcome) -> str:
    policy = "" if one.candidate.policy == "overlap" else f" {one.candidate.policy}"
    return f"{one.candidate}{policy}"
