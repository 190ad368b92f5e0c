"""`Bench`, the object through which a part runs ranks and reports its checks, texts and tables; and `Result`, in which
they are kept and saved as JSON."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_day import outside, ranks
from testkit.race_cases import ONE_GPU_ENVIRONMENT

PASS, FAIL, NUMBERS, NOT_RUN = "pass", "fail", "numbers", "not run"
RESERVE = 2.0  # seconds by which ranks end before the part, so that it can name the ranks that were late


class NotRun(Exception):  # noqa: N818  (a verdict)
    """The part cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run. ``megabytes``: of a tensor. ``forward_ms``: length of a forward that spins. ``late``: seconds
    by which a receiver is late. ``schedules``: the schedules to run; empty: all."""

    repeats: int = 5
    megabytes: float = 64.0
    forward_ms: float = 20.0
    rounds: int = 4
    seq_length: int = 1024
    hidden: int = 256
    late: float = 1.0
    schedules: tuple[str, ...] = ()


TINY = Sizes(1, 0.25, 2.0, 1, 8, 16, 0.3, ("1f1b", "zb_v"))
"""The sizes for trying the script without a GPU."""


@dataclass(frozen=True)
class Machine:
    """The machine on which the parts run. ``backend``: "nccl", or "gloo" for a machine without GPUs, which acts as one
    with ``gpus``."""

    backend: str
    gpus: int

    @property
    def has_gpus(self) -> bool:
        return self.backend == "nccl"


@dataclass
class Result:
    """The result of a part, with its date, commit and machine. ``blocks``: texts, and tables as lists of rows, the head
    first. ``why``: why the part was not run, or how it failed."""

    verdict: str
    why: str = ""
    seconds: float = 0.0
    date: str = ""
    commit: str = ""
    machine: str = ""
    checks: list[tuple[str, bool]] = field(default_factory=list)
    blocks: list[str | list[list[str]]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        return [what for what, good in self.checks if not good] + [self.why] * (self.verdict == FAIL and bool(self.why))

    def judged(self) -> Result:
        """This result, with the verdict that follows from its checks."""
        bad = any(not good for _, good in self.checks)
        self.verdict = FAIL if bad else PASS if self.checks else NUMBERS
        return self


@dataclass
class Bench:
    """The methods that a part works with. ``ends``: the part's deadline on the monotonic clock. ``one_gpu``: whether
    its ranks share the first GPU. ``report`` is called with the result so far after each change."""

    machine: Machine
    sizes: Sizes
    ends: float
    one_gpu: bool = False
    report: Callable[[Result], None] = lambda result: None
    result: Result = field(default_factory=lambda: Result(NUMBERS))

    # -- results -------------------------------------------------------------------------------------------------------

    def check(self, good: bool, what: str) -> None:
        """Record a check: ``what`` must hold, and ``good`` says whether it does."""
        self.result.checks.append((what, bool(good)))
        self.report(self.result.judged())

    def text(self, text: str) -> None:
        self.result.blocks.append(text)
        self.report(self.result.judged())

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.result.blocks.append([list(columns), *([_cell(value) for value in row] for row in rows)])
        self.report(self.result.judged())

    def numbers(self, **numbers: Any) -> None:
        """Record numbers that only the JSON has, not the page."""
        self.result.numbers |= numbers

    # -- ranks ---------------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> bool:
        """Whether two ranks share a GPU."""
        return self.one_gpu or self.machine.gpus == 1

    @property
    def left(self) -> float:
        """The seconds that ranks may still run."""
        return max(0.1, self.ends - time.monotonic() - RESERVE)

    @property
    def start(self) -> str:
        return "spawn" if self.machine.has_gpus else "fork"

    def preload(self, module: str) -> None:
        """Import a module that takes long, before ranks are forked from this process."""
        if not self.machine.has_gpus:
            importlib.import_module(module)

    def devices(self, size: int) -> tuple[str, ...]:
        """The device of each rank. Each has its own GPU if there are enough."""
        if not self.machine.has_gpus:
            return ("cpu",) * size
        return tuple(f"cuda:{0 if self.one_gpu else rank % self.machine.gpus}" for rank in range(size))

    def ranks(
        self,
        work: Callable[..., Any],
        *args: Any,
        size: int = 2,
        environment: dict[str, str] | None = None,
        seconds: float | None = None,
    ) -> list[Any]:
        """Run ``work(rank, size, device, *args)`` on ranks of a process group. Returns their results by rank.
        ``seconds``: their limit; the default is the time that is left."""
        with tempfile.TemporaryDirectory() as folder:
            place = ranks.Place(self.machine.backend, self.devices(size), f"{folder}/store")
            connections = ONE_GPU_ENVIRONMENT if place.shared and self.machine.has_gpus else {}
            surroundings = {"GLOO_SOCKET_IFNAME": "lo", **connections, **(environment or {})}
            left = self.left if seconds is None else min(seconds, self.left)
            return outside.run_ranks(ranks.enter, size, (place, work, args), left, surroundings, self.start)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
