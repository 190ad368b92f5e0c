#!/usr/bin/env python
"""Run torch's own tests of its pipeline schedules twice, with torch's classes and with ours, and compare.

    python scripts/torch_own_tests.py ~/pytorch/test/distributed/pipelining [--only TEXT ...] [--ranks N]

The tests of the folder's `test_schedule_multiproc.py` train with schedules that are a parameter. They run on CPUs with
gloo. The tests of `ScheduleTest` in `test_schedule.py` do the same in one process. Schedules that the tests define
themselves, and `_PipelineScheduleRuntime`, are torch's in both runs. Each test has processes of its own. Needs
expecttest. The exit status is 1 if a test passes only with torch's classes, and 2 if the tests cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_pp.tools.parity.workers.processes import RunError, run_ranks  # noqa: E402

MODULE, ALONE = "test_schedule_multiproc", "test_schedule"
PASSED, SKIPPED = "passed", "skipped"


def tests_of(module: str, folder: Path, ours: bool) -> Any:
    """A module of the folder. With ``ours`` it imports our schedules in place of torch's."""
    from torch.distributed import pipelining

    if ours:
        importlib.import_module("megatron_pp.integrations.torch_pipelining").use_in(pipelining)
    sys.path.insert(0, str(folder))
    return importlib.import_module(module)


def prepare(folder: Path, ours: bool) -> Any:
    """The folder's class of tests, changed to run without GPUs. With ``ours`` it has our schedules."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed, common_utils

    def keep(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    for name in ("requires_accelerator_dist_backend", "requires_nccl", "skip_if_lt_x_gpu"):
        setattr(common_distributed, name, keep)
    vars(common_utils).update(TEST_MULTIACCELERATOR=True, TEST_MULTIGPU=True)
    barrier = dist.barrier
    vars(dist)["barrier"] = lambda group=None, **_: barrier(group)  # gloo's barrier does not accept device_ids
    tests = tests_of(MODULE, folder, ours)
    vars(tests)["device_type"] = "cpu"
    kind: Any = tests.ScheduleTest
    kind.device = torch.device("cpu")
    kind.backend_str = classmethod(lambda cls: "gloo")
    return kind


def outcome_of(name: str, folder: Path, ours: bool, ranks: int, deadline: float) -> str:
    """PASSED, SKIPPED, or the last line of a rank's error."""

    def body(rank: int) -> str:
        os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # otherwise the hint would be the last line
        import unittest

        import torch

        torch.set_num_threads(1)
        if name.startswith(ALONE + "."):
            return alone(tests_of(ALONE, folder, ours).ScheduleTest(name.partition(".")[2]))
        kind = prepare(folder, ours)
        kind.rank, kind.world_size = rank, ranks
        kind._init_pg(rank, ranks, f"{files}/store")
        try:
            kind._run_test_given_id(name)
        except unittest.SkipTest:
            return SKIPPED
        return PASSED

    with tempfile.TemporaryDirectory() as files:
        count = 1 if name.startswith(ALONE + ".") else ranks
        try:
            return SKIPPED if SKIPPED in run_ranks(body, count, Path(files), deadline) else PASSED
        except RunError as error:
            return str(error).strip().splitlines()[-1].strip()


def alone(test: Any) -> str:
    """Run a test in this process. Returns PASSED or SKIPPED. Raises RuntimeError with the test's error."""
    import unittest

    result = unittest.TestResult()
    test(result)
    for _, raised in (*result.errors, *result.failures):
        said = [line for line in raised.splitlines() if re.match(r"\w+: ", line)]
        raise RuntimeError(said[-1] if said else raised)
    return SKIPPED if result.skipped else PASSED


def names_of(folder: Path, ours: bool, ranks: int) -> list[str]:
    """The names of all tests. A process of its own imports them, because a program has either torch's classes or
    ours."""

    def body(rank: int) -> list[str]:
        several, single = dir(prepare(folder, ours)), dir(tests_of(ALONE, folder, ours).ScheduleTest)
        found = {"": several, f"{ALONE}.": single}
        return [where + name for where, names in found.items() for name in names if name.startswith("test_")]

    with tempfile.TemporaryDirectory() as files:
        return run_ranks(body, 1, Path(files), 120.0)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="test/distributed/pipelining of a checkout of torch")
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="tests whose names have one of these")
    parser.add_argument("--ranks", type=int, default=4, help="processes of each test; default: 4")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for each test; default: 120")
    args = parser.parse_args()
    folder = args.folder.resolve()
    for module in (MODULE, ALONE):
        if not (folder / f"{module}.py").is_file():
            parser.error(f"{folder} has no {module}.py; give test/distributed/pipelining of a checkout of torch")
    if importlib.util.find_spec("expecttest") is None:
        parser.error("torch's tests need expecttest, which is not installed: pip install expecttest")
    found: list[dict[str, str]] = []
    for ours in (False, True):
        names = [name for name in names_of(folder, ours, args.ranks) if any(text in name for text in args.only)]
        outcomes = {name: outcome_of(name, folder, ours, args.ranks, args.deadline) for name in names}
        counts = Counter(said if said in (PASSED, SKIPPED) else "failed" for said in outcomes.values())
        counted = ", ".join(f"{counts[said]} {said}" for said in (PASSED, SKIPPED, "failed"))
        print(f"{'ours' if ours else 'torch'}: {counted}", flush=True)
        for name, said in outcomes.items():
            if said != PASSED:
                print(f"    {name}: {said}", flush=True)
        found.append({_of_torch(name): said for name, said in outcomes.items()})
    lost = [name for name, said in found[0].items() if said == PASSED and found[1].get(name) != PASSED]
    print(f"{len(lost)} pass only with torch's classes" + "".join(f"\n    {name}" for name in lost))
    return int(bool(lost))


def _of_torch(name: str) -> str:
    """A test's name, with torch's name of a schedule in place of ours."""
    from megatron_pp.integrations.torch_pipelining.schedule import OUR_NAME

    theirs = {ours: torchs for torchs, ours in OUR_NAME.items()}
    return re.sub(r"PlanSchedule_(\w+?)(?=_|$)", lambda word: theirs.get(word[1], word[1]), name).lower()


if __name__ == "__main__":
    raise SystemExit(main())
