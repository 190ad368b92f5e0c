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

from gpu_day import outside
from gpu_day.bench import FAIL, NOT_RUN, RESERVE, Bench, Machine, NotRun, Result, Sizes
from gpu_day.table import PARTS, Part

FORMAT = 1
NOT_YET = "not yet: the next call goes on with it"


class OtherRunError(Exception):
    """The file of results is not one that this run could go on with; the message says why."""


@dataclass
class Run:
    """Results by part, of one machine with one choice of sizes; saved in ``path`` where that is not None."""

    machine: Machine
    sizes: Sizes
    path: Path | None
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def tried(self) -> bool:
        """Without GPUs."""
        return not self.machine.has_gpus

    def go_on(self) -> None:
        """Take over the results of an earlier run. Raises OtherRunError."""
        if self.path is None or not self.path.exists():
            return
        try:
            saved = json.loads(self.path.read_text())
            made = {name: Result(**result) for name, result in saved["parts"].items()}
            same = saved["format"] == FORMAT
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise OtherRunError(f"{self.path} holds no results of this script ({error}); --fresh begins anew") from None
        for what, mine in self._identity().items():
            if not same or saved.get(what) != mine:
                raise OtherRunError(
                    f"{self.path} holds results with {what} {saved.get(what)}, and this run has {mine}; "
                    "--fresh begins anew, --out writes elsewhere"
                )
        self.results = {name: result for name, result in made.items() if name in {part.name for part in PARTS}}

    def save(self) -> None:
        if self.path is None:
            return
        parts = {name: result.as_json() for name, result in self.results.items()}
        write_whole(self.path, json.dumps({"format": FORMAT, **self._identity(), "parts": parts}, indent=1) + "\n")

    def is_done(self, part: Part) -> bool:
        """Whether it has a verdict of its own; what could not run is asked again."""
        result = self.results.get(part.name)
        return result is not None and result.verdict != NOT_RUN

    def to_come(self) -> list[Part]:
        """Those that another call runs."""
        return [part for part in PARTS if part.name not in self.results]

    def failures(self) -> list[str]:
        return [f"{name}: {what}" for name, result in self.results.items() for what in result.failures]

    def _identity(self) -> dict[str, Any]:
        """As it comes back from a file."""
        return dict(json.loads(json.dumps({"machine": asdict(self.machine), "sizes": asdict(self.sizes)})))


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
        run.results[part.name] = result
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
    result.seconds, result.date, result.commit = seconds, datetime.date.today().isoformat(), _commit()
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


def _commit() -> str:
    found = ""
    with contextlib.suppress(OSError):
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found
