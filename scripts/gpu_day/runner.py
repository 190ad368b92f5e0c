"""Runs parts one after the other, each in a process of its own with a deadline, and keeps what is done in a file."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_day import outside
from gpu_day.bench import FAIL, NOT_RUN, RESERVE, Bench, Machine, NotRun, Result, Sizes
from gpu_day.table import PARTS, Part

FORMAT = 2
NOT_YET = "not yet measured"
_SOURCES = ("megatron_pp", "scripts", "testkit", "tests", "benchmarks", "examples")


class OtherRunError(Exception):
    """The file of results is not one that this run can add to; the message says why."""


@dataclass
class Run:
    """Results by part; saved in ``path`` where that is not None. What is recorded there stays, until the part has run
    again: on this machine or another one, at this commit or another one."""

    machine: Machine
    sizes: Sizes
    path: Path | None
    results: dict[str, Result] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)  # parts that this call, or the one that it goes on with, has run

    @property
    def tried(self) -> bool:
        """Without GPUs."""
        return not self.machine.has_gpus

    def read(self) -> None:
        """Take over what is recorded. Raises OtherRunError."""
        if self.path is None or not self.path.exists():
            return
        try:
            saved = json.loads(self.path.read_text())
            made = {name: Result(**result) for name, result in saved["parts"].items()}
            form, backend = saved["format"], saved["backend"]
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise OtherRunError(
                f"{self.path} holds no results of this script ({error}); --out writes elsewhere"
            ) from None
        if (form, backend) != (FORMAT, self.machine.backend):
            raise OtherRunError(
                f"{self.path} holds results of format {form} over {backend}, and this run is of format {FORMAT} over "
                f"{self.machine.backend}; --out writes elsewhere"
            )
        known = {part.name for part in PARTS}
        self.results = {name: result for name, result in made.items() if name in known}
        for result in self.results.values():
            result.checks = [(what, good) for what, good in result.checks]

    def go_on(self) -> None:
        """What was run on this machine at this commit need not be run again."""
        here = commit(), self.words
        self.done = {name for name, one in self.results.items() if (one.commit, one.machine) == here and has_run(one)}

    @property
    def words(self) -> str:
        return (
            outside.machine_words(self.machine.gpus) if self.machine.has_gpus else f"no GPU, torch {torch.__version__}"
        )

    def keep(self, part: Part, result: Result) -> None:
        """Record ``result``, unless it says only that the part could not run here, and more is known of it."""
        self.done.add(part.name)
        known = self.results.get(part.name)
        if known is None or has_run(result) or not has_run(known):
            self.results[part.name] = result

    def save(self) -> None:
        if self.path is None:
            return
        parts = {part.name: asdict(self.results[part.name]) for part in PARTS if part.name in self.results}
        content = {"format": FORMAT, "backend": self.machine.backend, "parts": parts}
        write_whole(self.path, json.dumps(content, indent=1) + "\n")

    def to_come(self) -> list[Part]:
        """Those that another call runs: first what has never run, then what ran elsewhere or at another commit."""
        left = [part for part in PARTS if part.name not in self.done]
        return sorted(left, key=lambda part: part.name in self.results and has_run(self.results[part.name]))

    def failures(self) -> list[str]:
        return [f"{name}: {what}" for name, result in self.results.items() for what in result.failures]


def has_run(result: Result) -> bool:
    return result.verdict != NOT_RUN


def write_whole(path: Path, text: str) -> None:
    """At once or not at all: a run may be ended at any time."""
    path.parent.mkdir(exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def run_parts(run: Run, parts: Sequence[Part], seconds: float, say: Callable[[Part, Result], None]) -> None:
    """Run ``parts`` for ``seconds`` at most; each result is kept and saved as soon as it is there. A part that the end
    of the time cuts short leaves none."""
    ends = time.monotonic() + seconds
    for part in parts:
        result = _result(run, part, ends - time.monotonic())
        if result is None:
            return
        run.keep(part, result)
        run.save()
        say(part, result)


def _result(run: Run, part: Part, left: float) -> Result | None:
    if reason := part.reason_not_to_run(run.machine):
        return Result(NOT_RUN, reason)
    deadline = min(part.deadline, left)
    if deadline <= 0.0:
        return None
    kept: list[Result] = []
    began = time.monotonic()
    ended = outside.own_process(partial(work_of, part, run.machine, run.sizes, deadline), deadline, kept.append)
    seconds = round(time.monotonic() - began, 1)
    if deadline < part.deadline and seconds >= deadline - RESERVE:
        return None
    result = kept[-1] if kept else Result(FAIL)
    if ended:
        result.verdict, result.why = FAIL, ended
    result.seconds, result.machine = seconds, run.words
    result.date, result.commit = datetime.date.today().isoformat(), commit()
    return result


def work_of(part: Part, machine: Machine, sizes: Sizes, seconds: float, send: Callable[[Any], None]) -> None:
    """Do the part's work; ``send`` gets its result whenever that changes."""
    bench = Bench(machine, sizes, time.monotonic() + seconds, part.one_gpu, send)
    try:
        part.work(bench)
        result = bench.result.judged()
    except NotRun as reason:
        result = Result(NOT_RUN, str(reason))
    except Exception as error:
        result = bench.result
        result.verdict, result.why = FAIL, f"{type(error).__name__}: {str(error)[:800]}"
    send(result)


def commit() -> str:
    """Of the sources; with a mark where they have changed since."""
    found = ""
    with contextlib.suppress(OSError):
        git = ["git", "-C", str(Path(__file__).resolve().parents[2])]
        found = _answer([*git, "rev-parse", "--short=10", "HEAD"])
        if found and _answer([*git, "status", "--porcelain", "--untracked-files=no", "--", *_SOURCES]):
            found += "+"
    return found


def _answer(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
