"""Runs parts one after the other, each in a process of its own with a deadline, and keeps their results in a file."""

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
    """This run cannot add to the file of results. The message says why."""


@dataclass
class Run:
    """Results by part. They are saved in ``path``, unless it is None. A recorded result stays until the part runs
    again, on any machine and at any commit."""

    machine: Machine
    sizes: Sizes
    path: Path | None
    results: dict[str, Result] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)  # parts that this call has run, or the earlier call that it continues

    @property
    def tried(self) -> bool:
        """Whether the run only tries the script, without GPUs."""
        return not self.machine.has_gpus

    def read(self) -> None:
        """Read the recorded results. Raises OtherRunError."""
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
        """Continue: parts that have run on this machine at this commit are done."""
        here = commit(), self.words
        self.done = {name for name, one in self.results.items() if (one.commit, one.machine) == here and has_run(one)}

    @property
    def words(self) -> str:
        return (
            outside.machine_words(self.machine.gpus) if self.machine.has_gpus else f"no GPU, torch {torch.__version__}"
        )

    def keep(self, part: Part, result: Result) -> None:
        """Record ``result``. If the part could not run here, a recorded result of an earlier run stays."""
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
        """The parts that have yet to run. Those that never ran are first, then those that ran elsewhere or at another
        commit."""
        left = [part for part in PARTS if part.name not in self.done]
        return sorted(left, key=lambda part: part.name in self.results and has_run(self.results[part.name]))

    def failures(self) -> list[str]:
        return [f"{name}: {what}" for name, result in self.results.items() for what in result.failures]


def has_run(result: Result) -> bool:
    return result.verdict != NOT_RUN


def write_whole(path: Path, text: str) -> None:
    """Write the file as a whole or not at all, because a run may end at any time."""
    path.parent.mkdir(exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def run_parts(run: Run, parts: Sequence[Part], seconds: float, say: Callable[[Part, Result], None]) -> None:
    """Run ``parts`` for at most ``seconds``. Each result is saved when its part ends. A part that is cut short by the
    end of the time leaves no result."""
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
    result.date = datetime.date.today().isoformat()
    result.commit = commit()
    return result


def work_of(part: Part, machine: Machine, sizes: Sizes, seconds: float, send: Callable[[Any], None]) -> None:
    """Do the part's work. ``send`` gets the result after each change, and at the end."""
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
    """The commit of the sources, with a "+" if they have changed since. "" without git."""
    found = ""
    with contextlib.suppress(OSError):
        git = ["git", "-C", str(Path(__file__).resolve().parents[2])]
        found = _answer([*git, "rev-parse", "--short=10", "HEAD"])
        if found and _answer([*git, "status", "--porcelain", "--untracked-files=no", "--", *_SOURCES]):
            found += "+"
    return found


def _answer(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
