"""Runs every benchmark that this machine can run, each in a process of its own. If a benchmark fails or takes too long,
the others still run."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import BenchmarkError

HELP = "all benchmarks, one after the other; with --quick in about a quarter of an hour on two cores"
PARTS = (
    *("overhead", "tracing", "growth", "memory", "bubble", "prediction", "exposed", "sharded", "overlap", "slices"),
    *("vocabulary", "megatron_steps", "training", "packing", "gpu"),
)
NO_DEVICE = 3  # exit code of a benchmark that needs a GPU, on a machine without one
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "benchmark.py"
QUICK = {"deadline": 600.0}
_END_SECONDS = 20.0
_OK, _LEFT_OUT, _INTERRUPTED = "ok", "left out: there is no GPU", "interrupted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help="only these, in this order")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds for each benchmark")


def run(args: argparse.Namespace) -> int:
    """Run the benchmarks. Returns 0 if all of them ended well, 1 if any did not, and 130 after Ctrl-C."""
    if args.out is None:
        raise BenchmarkError("give a folder for the results: --out results")
    names = args.only or list(PARTS)
    outcomes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    began = time.monotonic()
    for place, name in enumerate(names):
        print(f"\n== [{place + 1}/{len(names)}] {name}, after {time.monotonic() - began:.0f} s", flush=True)
        started = time.monotonic()
        try:
            outcomes[name] = _run_one(name, args)
        except KeyboardInterrupt:
            outcomes[name] = _INTERRUPTED
            break
        finally:
            seconds[name] = time.monotonic() - started
    print(f"\n== {sum(seconds.values()):.0f} s in all")
    for name in names:
        print(f"{name:<12} {seconds.get(name, 0):6.0f} s  {outcomes.get(name, 'not started')}")
    if _INTERRUPTED in outcomes.values():
        return 130
    return 0 if all(outcome in (_OK, _LEFT_OUT) for outcome in outcomes.values()) else 1


def _run_one(name: str, args: argparse.Namespace) -> str:
    """Run the subcommand. Returns one of the outcomes above, or how it failed."""
    command = [sys.executable, str(SCRIPT), name, "--out", str(args.out), *(["--quick"] if args.quick else [])]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(args.deadline)
    except subprocess.TimeoutExpired:
        return f"not done within {args.deadline:g} s"
    finally:
        _end(process)
    return {0: _OK, NO_DEVICE: _LEFT_OUT}.get(code, f"exit code {code}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a benchmark. On SIGTERM it removes its namespaces and ranks; then SIGKILL ends the rest of its session."""
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
