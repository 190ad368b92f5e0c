#!/usr/bin/env python
"""Run Megatron-LM's own tests of its schedules twice, without and with `install()`, and compare.

    python scripts/megatron_own_tests.py ~/Megatron-LM [-k EXPRESSION]

The tests are the checkout's tests/unit_tests/pipeline_parallel/test_schedules.py. They run with the checkout's own
`megatron` on 8 processes, with gloo on the CPU, or with NCCL on 8 GPUs. A test has passed if it passed on every rank.
Needs pytest-mock. The exit status is 1 if a test passes only without `install()`, or if none passes. It is 2 if the
tests cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path("tests/unit_tests/pipeline_parallel/test_schedules.py")
RANKS = 8


class Outcomes:
    """A pytest plugin that records the outcome of each test: "passed", "skipped", or the last line of its error."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.split("::")[-1]
            text = str(report.longrepr).strip().splitlines()
            self.found[name] = text[-1] if report.outcome == "failed" else report.outcome


def prepare(checkout: Path) -> None:
    """Import the checkout's Megatron once for all ranks. Without a GPU it is redirected to the CPU."""
    import torch

    sys.path.insert(0, str(ROOT))
    shim = importlib.import_module("megatron_pp.tools.parity.cpu_stand_in")
    sys.path.insert(0, str(checkout))
    if not torch.cuda.is_available():
        shim.redirect()
        with shim.triton_stand_in():
            importlib.import_module("megatron.core.pipeline_parallel.schedules")
    importlib.import_module("megatron_pp.integrations.megatron_core")


def take_tests_of(checkout: Path) -> None:
    """Make `tests` mean the checkout's package, since both projects have one. Its `Utils` imports more of Megatron."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path.remove(str(ROOT))
    arguments: Any = types.ModuleType("megatron.training.argument_utils")
    arguments.__getattr__ = lambda name: None  # only other tests use it, to make configs from flags
    sys.modules.setdefault(arguments.__name__, arguments)
    os.chdir(checkout)


def allow_groups_of_each_rank() -> None:
    """Let ranks call `new_group` with different lists of ranks, as the tests do. NCCL accepts that; gloo would wait."""
    import torch.distributed as dist

    plain = dist.new_group

    def new_group(ranks: list[int] | None = None, **more: Any) -> Any:
        wanted: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(wanted, ranks)
        distinct = [w for i, w in enumerate(wanted) if w not in wanted[:i]]
        return [plain(one, **more) for one in distinct][distinct.index(ranks)]

    dist.new_group = new_group  # type: ignore[assignment]


def run_rank(rank: int, size: int, port: int, checkout: Path, more: list[str], installs: bool, folder: str) -> Any:
    """The outcomes on one rank, by test. Its output goes to a file of ``folder``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT=str(port))
    output = open(_log(folder, rank), "w")  # noqa: SIM115 (until the process ends)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    import pytest
    import torch

    if not torch.cuda.is_available():
        allow_groups_of_each_rank()
    if installs:
        importlib.import_module("megatron_pp.integrations.megatron_core").install()
    take_tests_of(checkout)
    outcomes = Outcomes()
    options = ["--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-q", "--tb=short"]
    pytest.main([*options, "--rootdir", str(checkout), str(checkout / TESTS), *more], plugins=[outcomes])
    return outcomes.found


def _log(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.log"


def run(checkout: Path, more: list[str], installs: bool, deadline: float) -> dict[str, str]:
    """Test -> "passed", or its outcome on the first rank where it did not pass."""
    processes = importlib.import_module("testkit.processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (port, checkout, more, installs, folder)
        try:
            found = processes.run_processes(
                run_rank, RANKS, arguments, timeout=deadline, backend=None, start_method="fork"
            )
        except RuntimeError as failed:  # a rank raised, or the deadline has passed
            print(_log(folder, 0).read_text()[-2000:], file=sys.stderr)
            raise SystemExit(str(failed)) from failed
    merged: dict[str, str] = {}
    for outcomes in found:
        for name, outcome in outcomes.items():
            if merged.get(name, "passed") == "passed":
                merged[name] = outcome
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for each of the two runs")
    options, more = parser.parse_known_args()
    checkout = options.checkout.resolve()
    if not (checkout / TESTS).is_file():
        parser.error(f"{checkout} has no {TESTS}; give a checkout of Megatron-LM")
    if importlib.util.find_spec("pytest_mock") is None:
        parser.error("Megatron-LM's tests need pytest-mock, which is not installed: pip install pytest-mock")
    prepare(checkout)
    found = []
    for words, installs in (("without install()", False), ("with install()", True)):
        start = time.monotonic()
        outcomes = run(checkout, more, installs, options.deadline)
        found.append(outcomes)
        counts = [list(outcomes.values()).count(kind) for kind in ("passed", "skipped")]
        counted = f"{counts[0]} passed, {counts[1]} skipped, {len(outcomes) - sum(counts)} failed"
        print(f"{words}: {counted} ({time.monotonic() - start:.0f} s)", flush=True)
    without, under = found
    differing = {name: outcome for name, outcome in under.items() if without.get(name) != outcome}
    for name, outcome in differing.items():
        print(f"{name}\n    without install(): {without.get(name)}\n    with install(): {outcome}")
    if "passed" not in without.values():
        print(
            "no test passed without install(), so nothing was compared: "
            + next(iter(without.values()), "no test was found")
        )
        return 1
    return 1 if any(without.get(name) == "passed" for name in differing) else 0


if __name__ == "__main__":
    sys.exit(main())
