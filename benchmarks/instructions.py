"""Counts the machine instructions outside the model per virtual microbatch, by callgrind. The count is the same on a
busy machine.

One process runs the engines in turns, and calls `getsid` before and after the counted steps. At each call callgrind
writes its count since the last call.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.engines import available_steps, surroundings
from benchmarks.megatron_library import versions
from benchmarks.overhead import MODEL, bare_model, settings, stage_of
from benchmarks.report import BenchmarkError, Report, Row, add_options
from benchmarks.stubbed import stubbed_group
from benchmarks.work import PLUG_IN, Work

HELP = "instructions outside the model per virtual microbatch, transport stubbed; needs valgrind"
QUICK = {"only": "P=2 V=2 plain"}
ENGINES = ("ours", PLUG_IN, "megatron", "megatron-main")
WARM_UP, STEPS = 4, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, microbatches=40, timeout=(3600.0, "seconds for each setting"))
    parser.add_argument(
        "--only", default="interleaved_1f1b P=2", metavar="TEXT", help="settings whose name contains TEXT"
    )


def run(args: argparse.Namespace) -> Report:
    if shutil.which("valgrind") is None:
        raise BenchmarkError(
            "there is no valgrind on PATH, which counts instructions (on Debian: apt install valgrind)"
        )
    labels = [work.label() for work, _ in settings(args.microbatches) if args.only in work.label()]
    if not labels:
        raise BenchmarkError(f"no setting of this benchmark has {args.only!r} in its name")
    rows = [row for label in labels for row in _rows(label, args)]
    return Report(
        "instructions",
        "Instructions outside the model per virtual microbatch (F+B), model x + w on 8 floats",
        rows,
        {"microbatches": args.microbatches, **versions()},
        [
            "Outside: the instructions of a step, without those of the same forwards and backwards of the bare model. "
            "The row of the bare model has its own instructions. Of megatron's: ratio to the installed release; "
            "megatron-main is the checkout."
        ],
        ["setting", "engine", "instructions", "of megatron's", "of megatron-main's", "remark"],
    )


def _rows(label: str, args: argparse.Namespace) -> list[Row]:
    counts, remarks, each = _counted(label, args)
    model = counts.pop(MODEL) / each
    outside = {engine: count / each - model for engine, count in counts.items()}
    rows: list[Row] = [{"setting": label, "engine": MODEL, "instructions": round(model), "remark": ""}]
    for engine in ENGINES:
        row: Row = {"setting": label, "engine": engine, "remark": remarks.get(engine, "")}
        if engine in outside:
            row["instructions"] = round(outside[engine])
            row |= {f"of {one}'s": outside[engine] / outside[one] for one in ENGINES[2:] if one in outside}
        rows.append(row)
    return rows


def _counted(label: str, args: argparse.Namespace) -> tuple[dict[str, int], dict[str, str], int]:
    """Engine -> instructions, engine -> why it was not measured, and the number of virtual microbatches of each
    count."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts")
        valgrind = ["valgrind", "--tool=callgrind", "--dump-before=getsid", f"--callgrind-out-file={out}"]
        command = [*valgrind, sys.executable, "-m", "benchmarks.instructions", label, str(args.microbatches)]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
        except subprocess.TimeoutExpired as late:
            raise BenchmarkError(f"{label} was not counted within {args.timeout:g} s; give --timeout more") from late
        names, remarks = _said(done.stdout)
        # Each engine has one file that ends before its steps, and one that ends after them.
        counts = {name: _total(Path(f"{out}.{2 * place + 2}")) for place, name in enumerate(names)}
    if MODEL not in counts:
        raise BenchmarkError(f"{label} was not counted: {done.stderr[-1000:]}")
    work, _ = _setting(label, args.microbatches)
    return counts, remarks, STEPS * work.virtual_microbatches


def _said(output: str) -> tuple[list[str], dict[str, str]]:
    """The engines in the order in which they ran, and for engines that did not run the reasons."""
    lines = [line.split("\t") for line in output.splitlines() if line.startswith(("ran\t", "left out\t"))]
    return [line[1] for line in lines if line[0] == "ran"], {line[1]: line[2] for line in lines if line[0] != "ran"}


def _total(counts: Path) -> int:
    for line in counts.read_text(errors="replace").splitlines():
        if line.startswith(("totals:", "summary:")):
            return int(line.split()[1])
    raise BenchmarkError(f"callgrind has written no total into {counts}")


def _setting(label: str, microbatches: int) -> tuple[Work, int]:
    return next((work, rank) for work, rank in settings(microbatches) if work.label() == label)


def count(label: str, microbatches: int) -> None:
    """Run the engines in the process under callgrind."""
    work, rank = _setting(label, microbatches)
    with stubbed_group(rank, work.pipeline_size, "calls") as (group, transport):
        make_stage = functools.partial(stage_of, work.shape)
        steps, remarks = available_steps(work, rank, group, make_stage, transport, ENGINES)
        steps[MODEL] = bare_model(work, rank)
        for engine in set(ENGINES) - set(steps):
            print("left out", engine, remarks[engine], sep="\t", flush=True)
        for engine, step in steps.items():
            with surroundings(engine):
                for _ in range(WARM_UP):
                    step()
                gc.collect()
                gc.disable()
                os.getsid(0)
                for _ in range(STEPS):
                    step()
                os.getsid(0)
                gc.enable()
            print("ran", engine, sep="\t", flush=True)


if __name__ == "__main__":
    count(sys.argv[1], int(sys.argv[2]))
