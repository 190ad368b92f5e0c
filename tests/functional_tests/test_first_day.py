"""The parts of scripts/gpu_check.py: all pass over gloo in real processes, and each fails with a planted fault.

``tests/gpu_programs/device_scenarios.py`` runs them on virtual devices, every line of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_check
from gpu_day import table
from gpu_day.bench import FAIL
from made_parts import with_tables

from testkit.sweeps import drawn
from tests.functional_tests.megatron_support import SCRIPTS, needs_megatron
from tests.gpu_programs import first_day

# A run draws six of the quick parts, and one of the two parts under Megatron.
QUICK = drawn(["facts", "ahead", "links", "race", "first_steps", "offload", "output_layer", "faults", "overlap"], 6)
UNDER_MEGATRON = {
    "megatron": "PP 2, V 2, TP 2, DP 1, 3 steps",
    "megatron_times": "| Megatron's own schedules on the same GPUs | Megatron's schedule 1F1B | ours ms ",
}
"""The parts with Megatron-core, and what the page then says."""
OF_MEGATRON = drawn(UNDER_MEGATRON, 1)


def started(out: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(SCRIPTS / "gpu_check.sh"), "--cpu", "--out", str(out), *flags],
        env={**os.environ, "MEGATRON_PP_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def results(out: Path) -> dict[str, str]:
    """Return the saved verdicts, by part."""
    saved = json.loads((out.parent / "data" / f"{out.stem}.json").read_text())
    return {name: result["verdict"] for name, result in saved["parts"].items()}


def shown(out: Path) -> str:
    """Return the page with its tables."""
    return with_tables(out, out.read_text())


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the parts of both tests below in one call, and return the folder of its results."""
    out = tmp_path_factory.mktemp("tried") / "results.md"
    run = started(out, "--only", *QUICK, *(OF_MEGATRON if find_spec("megatron") else ()))
    printed, _ = run.communicate(timeout=500.0)
    assert run.returncode == 0, printed
    return out


@pytest.mark.slow
def test_parts_pass_over_gloo(tried: Path) -> None:
    assert {name: results(tried)[name] for name in QUICK} == dict.fromkeys(QUICK, "pass")


SPAWNING = """
import sys
import gpu_check
from gpu_day.bench import Bench

if __name__ == "__main__":
    Bench.start = property(lambda bench: "spawn")
    sys.exit(gpu_check.main(["--cpu", "--only", "facts"]))
"""


@pytest.mark.slow
def test_ranks_can_be_spawned_as_they_are_on_gpus(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), str(SCRIPTS)])}
    run = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=240.0)
    assert (run.returncode, run.stdout.split()[:2]) == (0, ["facts", "pass"]), run.stdout + run.stderr[-2000:]


@pytest.mark.slow
@needs_megatron
def test_megatrons_gpt_passes_over_gloo(tried: Path) -> None:
    """With the distributed optimizer and overlapped collectives: equal bits under both engines, or their times."""
    assert results(tried) == dict.fromkeys((*QUICK, *OF_MEGATRON), "pass")
    for part in OF_MEGATRON:
        assert UNDER_MEGATRON[part] in shown(tried)


@pytest.mark.slow
def test_an_interrupted_gpu_check_continues(tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    run = started(out, "--seconds", "400")
    saved = tmp_path / "data" / "results.json"
    until = time.monotonic() + 240.0
    while not saved.exists() and time.monotonic() < until:  # after the first part
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    printed, _ = run.communicate(timeout=60.0)
    first = results(out)
    assert run.returncode == 1
    assert first["facts"] == "pass"
    assert "TO COME: " in printed
    assert "| Offloaded activations | not run | 0 | not yet measured |" in shown(out)
    again = multiprocessing.get_context("forkserver").Process(target=look_again, args=(out, tmp_path / "printed"))
    again.start()
    again.join(240.0)
    printed = (tmp_path / "printed").read_text()
    assert "TO COME: " in printed
    assert results(out).items() >= first.items()
    assert "facts " not in printed.partition("TO COME")[0]


def look_again(out: Path, printed: Path) -> None:
    """Call scripts/gpu_check.py a second time, which must run no part again and lose no result."""
    with printed.open("w") as file, redirect_stdout(file):
        gpu_check.main(["--cpu", "--out", str(out), "--seconds", "1"])


FAULTS = [name for name, planted in first_day.FAULTS.items() if planted.parts]


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("fault", drawn(FAULTS, 4))
def test_a_part_fails_with_its_fault(fault: str, tmp_path: Path) -> None:
    """The parts run on eight virtual GPUs, or on one if they are for one."""
    places, parts = first_day.FAULTS[fault]
    out = tmp_path / "results.md"
    alone = any(part.most == 1 for part in table.chosen(parts))
    with first_day.machine(1 if alone else 8, *places):
        assert gpu_check.main(["--out", str(out), "--only", *parts]) == 1
    assert results(out) == dict.fromkeys(sorted(parts, key=_place), FAIL)


def _place(name: str) -> int:
    return [part.name for part in table.PARTS].index(name)


def test_every_part_has_a_fault_that_it_fails_with() -> None:
    failing = {name for planted in first_day.FAULTS.values() for name in planted.parts}
    assert failing == {part.name for part in table.PARTS}
