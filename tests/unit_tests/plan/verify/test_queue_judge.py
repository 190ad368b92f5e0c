"""A judge that knows nothing of the package reads exported plans: they end on one hardware queue, and those for NCCL
also where all instructions wait for an idle device. What does not end it finds as ``verify`` does."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.io.serialize import JSON, format_plan
from megatron_pp.plan.ir.instruction import BATCH, RECV_OPS
from megatron_pp.plan.ir.spec import ANY_WAIT, BATCHED, ON_NCCL, ONE_QUEUE, PLAIN, POLICIES, Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.tools.cli import main
from testkit.inputs.plan_text import edited
from testkit.judges import queue_judge
from testkit.judges.queue_judge import INSTRUCTIONS, OPERATIONS, Judge
from testkit.sweeps import EXHAUSTIVE

FAMILIES = [name for name, family in SCHEDULES.items() if family.search is None]
FEATURES: dict[str, dict[str, Any]] = {"": {}, "pairs": {"overlap_pairs": True}, "offload": {"offload_chunks": 1}}
GRID = list(product((2, 4), (1, 2, 3), POLICIES, FEATURES))


def faults(plan: Plan, waiting: str = "") -> list[str]:
    return Judge(json.loads(format_plan(plan, JSON)), waiting).judge()


def test_the_queue_judge_imports_nothing_of_the_package(tmp_path: Path) -> None:
    """The judge runs as a script of its own, on plans that the command line writes."""
    path, written = Path(queue_judge.__file__), str(tmp_path / "plan.json")
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names
    assert main(["plan", "-s", "zb_v", "-P", "2", "-M", "4", "-o", written]) == 0
    ran = subprocess.run([sys.executable, "-I", str(path), written], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "no fault\n"), ran.stderr


@pytest.mark.parametrize(("n", "schedule"), list(enumerate(FAMILIES)))
def test_the_queue_judge_finds_no_schedule_that_hangs(n: int, schedule: str) -> None:
    """Sizes, policies and features take turns: each schedule has six of 54."""
    family, some = SCHEDULES[schedule], [GRID[(17 * n + 13 * k) % len(GRID)] for k in range(6)]
    for size, chunks, policy, feature in GRID if EXHAUSTIVE else some:
        fields = {} if schedule == "pipe_offload" and feature == "pairs" else FEATURES[feature]
        sizes = size, family.chunks or chunks, 2 * size
        spec = PlanSpec(schedule, *sizes, policy=policy, slices=2 if family.sliced else 1, **fields)
        assert faults(build_plan(spec)) == [], spec


@pytest.mark.parametrize("waiting", [OPERATIONS, INSTRUCTIONS])
@pytest.mark.parametrize(("n", "schedule"), list(enumerate(FAMILIES)))
def test_no_schedule_hangs_where_all_wait(n: int, schedule: str, waiting: str) -> None:
    """Plans for NCCL, of the same sizes, policies and features."""
    family, some = SCHEDULES[schedule], [GRID[(17 * n + 13 * k) % len(GRID)] for k in range(6)]
    for size, chunks, policy, feature in GRID if EXHAUSTIVE else some:
        fields = {} if schedule == "pipe_offload" and feature == "pairs" else FEATURES[feature]
        sizes = size, family.chunks or chunks, 2 * size
        slices = 2 if family.sliced else 1
        spec = PlanSpec(schedule, *sizes, policy=policy, slices=slices, device=ON_NCCL, **fields)
        assert faults(build_plan(spec), waiting) == [], spec


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1", "gis_h", "dualpipe_v"])
def test_plans_for_one_queue_alone_hang_where_all_wait(schedule: str) -> None:
    """The plans post receives ahead of operations that may wait for them. With two ranks, those of zb_h1 are posted
    ahead of waits and sends alone."""
    chunks = SCHEDULES[schedule].chunks or (1 if schedule in ("1f1b", "zb_h1") else 2)
    for size, microbatches in ((2, 4), (4, 8)):
        plan = build_plan(PlanSpec(schedule, size, chunks, microbatches, device=(ONE_QUEUE,)))
        hangs = [any("hangs at" in fault for fault in faults(plan, mode)) for mode in ("", OPERATIONS, INSTRUCTIONS)]
        assert hangs == [False, (schedule, size) != ("zb_h1", 2), True], (size, microbatches)


def test_a_mode_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'all'"):
        faults(build_plan(PlanSpec("gpipe", 2, 1, 2)), "all")


def test_the_judge_reports_operations_that_never_begin() -> None:
    plan = edited(build_plan(PlanSpec("interleaved_1f1b", 2, 2, 2)), 0, "move RECV_F1.1 behind RECV_F1.0")
    assert faults(plan) == [
        "rank 0 hangs at RECV_F of stage 2, microbatch 1",
        "rank 1 hangs at WAIT_F of stage 1, microbatch 0",
        "no rank meets RECV_F of stage 2, microbatch 0 of rank 0",
        "no rank meets RECV_F of stage 1, microbatch 0 of rank 1",
    ]


def test_the_judge_reports_crossing_messages() -> None:
    plan = edited(build_plan(PlanSpec("1f1b", 2, 1, 4, policy=PLAIN)), 0, "swap SEND_F0.0 SEND_F0.1")
    assert "SEND_F of stage 0, microbatch 1 of rank 0 is received as RECV_F of stage 1, microbatch 0" in faults(plan)


SPECS = [
    PlanSpec("interleaved_1f1b", 2, 2, 4),
    PlanSpec("interleaved_1f1b", 2, 3, 4),
    PlanSpec("breadth_first", 2, 2, 4),
    PlanSpec("dualpipe_v", 2, 2, 6),
    PlanSpec("1f1b", 3, 1, 4, policy=BATCHED),
    PlanSpec("interleaved_1f1b", 2, 2, 4, policy=PLAIN),
]


@pytest.mark.parametrize(("rule", "waiting"), [(ONE_QUEUE, ""), (ANY_WAIT, INSTRUCTIONS)])
def test_the_queue_judge_agrees_with_verify_on_changed_plans(rule: str, waiting: str) -> None:
    """A receive that is posted up to twelve instructions earlier; what other rules refuse is left out."""
    draw, found = random.Random(1), {True: 0, False: 0}
    for spec in SPECS * 120:
        plan, rank = build_plan(replace(spec, device=(rule,))), draw.randrange(spec.pipeline_size)
        program = list(plan.programs[rank])
        at = draw.choice([k for k, one in enumerate(program) if one.op in RECV_OPS or one.op == BATCH])
        one = program.pop(at)
        program.insert(max(0, at - draw.randrange(1, 13)), one)
        changed = replace(plan, programs=(*plan.programs[:rank], tuple(program), *plan.programs[rank + 1 :]))
        try:
            verify(changed, device=(rule,))
            hangs = False
        except PlanError as error:
            if "deadlock" not in str(error):
                continue
            hangs = True
        assert bool(faults(changed, waiting)) == hangs, f"{one} of rank {rank}, now at {program.index(one)}"
        found[hangs] += 1
    assert min(found.values()) > 10, found
