"""Tokens per second of whole training steps: Megatron-core's GPTModel under both engines, and our GPT."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.megatron_library import source, versions
from benchmarks.report import BenchmarkError, Report, Row, add_options, numbers_of
from testkit.megatron.cases import Case, Job, Model, Outcome
from testkit.megatron.runner import run_jobs
from testkit.processes import run_processes

HELP = "tokens/s of a real GPT: ours, and Megatron-core's GPTModel under our engine and under its own"
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
QUICK = {"steps": 3}
# Number of chunks -> the policies that Megatron-core has.
POLICIES = {1: ("plain", "batched"), 2: ("overlap", "overlap+flush")}
OURS = "examples.gpt.gpt, scripts/train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, pp=2, layers=8, hidden=128, heads=4, seq=128, micro_batch=4, microbatches=8)
    add_options(parser, steps=(8, "timed steps of each, in turns; two more come before"), timeout=400.0)


def run(args: argparse.Namespace) -> Report:
    rows = _megatron_rows(args, "megatron-core", None)
    if (checkout := source()) is not None:
        rows += _megatron_rows(args, "Megatron-LM", checkout)
    rows.append(_our_gpt_row(args))
    return Report(
        "training",
        "Whole training steps on this machine's cores: tokens per second",
        rows,
        numbers_of(args) | versions(),
        [
            "GPTModel rows of one library, V and policy ran in turns in the same processes, so only the schedule "
            "differs. Vocabulary 256, fp32, Adam. Our GPT is a different model of the same sizes. It ran separately, "
            "so its row does not compare engines.",
        ],
    )


def _megatron_rows(args: argparse.Namespace, library: str, checkout: Path | None) -> list[Row]:
    """A row for each case and engine. ``checkout`` None: the installed Megatron-core."""
    cases = _cases(args)
    environment = {} if checkout is None else {"PYTHONPATH": os.pathsep.join([str(checkout), os.environ["PYTHONPATH"]])}
    given = (cases, args.timeout)
    # In a process of its own, because the runner that it starts keeps the library that it has imported.
    outcomes = run_processes(
        _outcomes, 1, given, backend=None, timeout=args.timeout * len(cases), environment=environment
    )[0]
    rows: list[Row] = []
    for case, outcome in zip(cases, outcomes, strict=True):
        if outcome.status != "ok":
            raise BenchmarkError(f"{library}, V={case.vp or 1}, {case.policy}: {outcome.status}: {outcome.message}")
        for engine in ("ours", "megatron"):
            seconds = [max(times) for times in zip(*(fact[engine] for fact in outcome.facts), strict=True)]
            rows.append(_row(f"GPTModel, {library}", case.vp or 1, case.policy, engine, args, seconds))
    return rows


def _cases(args: argparse.Namespace) -> list[Case]:
    model = Model(
        layers=args.layers, hidden=args.hidden, heads=args.heads, vocab=256, seq=args.seq, micro_batch=args.micro_batch
    )
    return [
        Case(
            model=model,
            pp=args.pp,
            vp=chunks if chunks > 1 else None,
            microbatches=args.microbatches,
            policy=policy,
            # With overlap 0.16.1 frees outputs before their sends are read, so both engines keep the outputs.
            deallocate=False,
            steps=args.steps,
            optimizer="adam",
        )
        for chunks, policies in POLICIES.items()
        for policy in policies
    ]


def _outcomes(rank: int, size: int, cases: list[Case], deadline: float) -> list[Outcome]:
    jobs = [Job(case, check="benchmarks.training:measure", deadline=deadline) for case in cases]
    return run_jobs(jobs, deadline=deadline * len(jobs))


def _row(model: str, chunks: int, policy: str, engine: str, args: argparse.Namespace, seconds: list[float]) -> Row:
    tokens = args.microbatches * args.micro_batch * args.seq
    middle = statistics.median(seconds)
    return {
        "model": model,
        "V": chunks,
        "policy": policy,
        "engine": engine,
        "tokens/s (median)": tokens / middle,
        "step ms (median)": middle * 1e3,
        "step ms (min)": min(seconds) * 1e3,
    }


def measure(case: Any) -> dict[str, list[float]]:
    """The seconds of steps of both engines on this rank, in turns. This is a ``check`` of
    ``testkit.megatron.runner``."""
    from benchmarks.megatron_stages import in_turns
    from testkit.megatron.lab import Run

    return in_turns(case, Run, warmup=2)


def _our_gpt_row(args: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, str(SCRIPTS / "launch.py"), "--standalone", "--nproc-per-node", str(args.pp)]
        command += [str(SCRIPTS / "train.py"), "--run-dir", str(run_dir)]
        settings = {
            "pipeline-model-parallel-size": args.pp,
            "num-layers": args.layers,
            "hidden-size": args.hidden,
            "num-attention-heads": args.heads,
            "seq-length": args.seq,
            "micro-batch-size": args.micro_batch,
            "num-microbatches": args.microbatches,
            "train-steps": args.steps + 2,
            "warmup-steps": 0,
            "eval-interval": 0,
            "save-interval": 0,
            "device": "cpu",
        }
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, env=dict(os.environ))
        if done.returncode != 0:
            raise BenchmarkError("scripts/train.py failed:\n" + "\n".join(done.stderr.strip().splitlines()[-8:]))
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record][2:]
    tokens = args.microbatches * args.micro_batch * args.seq
    return _row(OURS, 1, "default", "ours", args, [tokens / rate for rate in rates])
