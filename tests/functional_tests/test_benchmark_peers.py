"""The installed Megatron-core and a checkout's run beside each other in one process, each with modules of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from testkit.processes import run_processes

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def both_megatrons(rank: int, size: int, checkout: str) -> None:
    from benchmarks.engines import ENGINES, available_steps, surroundings
    from benchmarks.megatron_library import MAIN, load, versions
    from benchmarks.stages import AddWeight
    from benchmarks.stubbed import stubbed_group
    from benchmarks.work import PLUG_IN, Work

    package = importlib.import_module("megatron.core")
    stages: list[AddWeight] = []

    def make_stage(stage: int) -> AddWeight:
        stages.append(AddWeight((1, 1, 8)))
        return stages[-1]

    def run(work: Work, engines: Sequence[str] = ENGINES) -> set[str]:
        with stubbed_group(0, work.pipeline_size, "calls") as (group, transport):
            steps, remarks = available_steps(work, 0, group, make_stage, transport, engines)
            for engine, step in steps.items():
                with surroundings(engine):
                    step()
        assert all(remarks[engine] for engine in remarks.keys() - steps.keys())
        return set(steps)

    assert run(Work("1f1b", 1, 1, 4, (1, 1, 8), "plain")) == {"ours", "megatron", MAIN}
    assert [stage.weight.grad.tolist() for stage in stages] == [[[[1.0] * 8]]] * 3
    assert {"ours", "megatron", MAIN, "torch"} <= run(Work("interleaved_1f1b", 2, 2, 4, (1, 1, 8)))

    # Without install() Megatron's own schedule would run, which refuses overlap without virtual stages.
    assert run(Work("1f1b", 2, 1, 4, (1, 1, 8), "overlap"), [PLUG_IN]) == {PLUG_IN}

    installed, other = load("megatron"), load(MAIN)
    with other.current():
        assert importlib.import_module("megatron.core").__file__ == f"{checkout}/megatron/core/__init__.py"
    assert sys.modules["megatron.core"] is package
    name = "pipeline_parallel.schedules"
    assert installed.module(name).__file__ != other.module(name).__file__
    assert versions()["Megatron-LM"].endswith(" at an unknown commit")


def test_two_megatrons_in_one_process(tmp_path: Path) -> None:
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "megatron").symlink_to(Path(spec.origin).parents[1])
    from benchmarks.megatron_library import SOURCE_VARIABLE

    environment = {SOURCE_VARIABLE: str(tmp_path)}
    run_processes(
        both_megatrons,
        1,
        (str(tmp_path),),
        backend=None,
        timeout=180.0,
        environment=environment,
        start_method="forkserver",
    )
