"""How scripts/gpu_check.py runs its parts: deadlines, what is kept, what is refused. The parts are tried in
``tests/functional_tests/test_first_day.py``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_day import outside, runner, table
from gpu_day.bench import FAIL, NOT_RUN, NUMBERS, PASS, TINY, Bench, Machine, NotRun, Result, Sizes
from gpu_day.page import page
from gpu_day.parts import overlap
from gpu_day.runner import NOT_YET, OtherRunError, Run
from gpu_day.table import PARTS, Part
from made_parts import with_tables

SCRIPTS = Path(gpu_check.__file__).parent
CPU = Machine("gloo", 2)


def good(bench: Bench) -> None:
    bench.check(True, "it holds")


def bad(bench: Bench) -> None:
    bench.check(True, "this holds")
    bench.check(False, "this does not | at all")


def counted(bench: Bench) -> None:
    bench.table(["what", "GB/s"], [["one", 1.5], ["two", 1234.5]])


def raises(bench: Bench) -> None:
    bench.check(True, "it began")
    raise ValueError("the part's own")


def cannot(bench: Bench) -> None:
    raise NotRun("no such kernel")


def dies(bench: Bench) -> None:
    bench.check(True, "it began")
    os._exit(3)


def hangs(bench: Bench) -> None:
    """With a process of its own, which it leaves behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    bench.text(f"process {child.pid}")
    time.sleep(60.0)


def one(work: Callable[[Bench], None], **fields: Any) -> Part:
    return Part("race", "A part", fields.pop("deadline", 30.0), work, **fields)


def ran(part: Part, machine: Machine = CPU, seconds: float = 60.0, path: Path | None = None) -> Result | None:
    run = Run(machine, TINY, path)
    runner.run_parts(run, [part], seconds, lambda part, result: None)
    return run.results.get(part.name)


@pytest.mark.parametrize(
    ("work", "verdict", "failures"),
    [
        (good, PASS, []),
        (bad, FAIL, ["this does not | at all"]),
        (counted, NUMBERS, []),
        (raises, FAIL, ["ValueError: the part's own"]),
        (dies, FAIL, ["its process ended early"]),
        (cannot, NOT_RUN, []),
    ],
)
def test_a_part_has_a_verdict(work: Callable[[Bench], None], verdict: str, failures: list[str]) -> None:
    result = ran(one(work))
    assert result is not None
    assert (result.verdict, result.failures) == (verdict, failures)
    assert verdict != NOT_RUN or result.why == "no such kernel"


def test_a_part_that_hangs_is_ended_with_all_that_it_started() -> None:
    began = time.monotonic()
    result = ran(one(hangs, deadline=1.0))
    assert result is not None
    assert time.monotonic() - began < 30.0
    assert (result.verdict, result.failures) == (FAIL, ["not done within its 1 s"])
    assert not is_running(int(str(result.blocks[0]).split()[1]))


def is_running(pid: int) -> bool:
    """A killed process may still have to be reaped, by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_parts_cut_short_by_the_time_limit_run_next_time() -> None:
    assert ran(one(hangs), seconds=1.0) is None
    assert ran(one(good), seconds=0.0) is None


@pytest.mark.parametrize(
    ("fields", "machine", "reason"),
    [
        ({"gpus": 8}, Machine("nccl", 4), "needs 8 GPUs; this machine has 4"),
        ({"gpus": 2}, Machine("nccl", 1), "needs 2 GPUs; this machine has 1"),
        ({"most": 1}, Machine("nccl", 2), "for a machine with 1 GPU; this one has 2"),
        ({"cuda": True}, CPU, "needs a GPU"),
        ({"packages": ("no_such.package", "torch")}, CPU, "needs no_such.package, which is not installed"),
    ],
)
def test_a_part_that_cannot_run_says_why_and_does_not_pass(
    fields: dict[str, Any], machine: Machine, reason: str
) -> None:
    assert ran(one(good, **fields), machine) == Result(NOT_RUN, reason)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_the_next_run_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    path = tmp_path / "data" / "results.json"
    first = Run(CPU, TINY, path)
    runner.run_parts(first, [one(counted), Part("steps", "Steps", 30.0, cannot)], 60.0, lambda part, result: None)
    again = Run(CPU, TINY, path)
    again.read()
    again.go_on()
    assert again.results.keys() == {"race", "steps"}
    assert again.results["race"].blocks == [[["what", "GB/s"], ["one", "1.5"], ["two", "1234"]]]
    assert again.done == {"race"}, "what could not run is asked again"
    assert list(path.parent.iterdir()) == [path]


PASSED = Result(PASS, "", 9.0, "2026-11-27", "0123456789", "1 x Other GPU", [("it holds", True)])


def recorded(path: Path, **results: Result) -> Run:
    Run(CPU, TINY, path, results).save()
    run = Run(CPU, TINY, path)
    run.read()
    return run


@pytest.mark.parametrize("work", [cannot, hangs])
def test_recorded_results_stay_if_a_part_cannot_run_or_is_cut_short(
    work: Callable[[Bench], None], tmp_path: Path
) -> None:
    run = recorded(tmp_path / "results.json", race=PASSED, overlap=PASSED)
    runner.run_parts(run, [one(work)], 1.0, lambda part, result: None)
    again = Run(CPU, TINY, run.path)
    again.read()
    assert again.results == {"race": PASSED, "overlap": PASSED}


def test_a_part_that_has_run_replaces_what_was_recorded_of_it_and_nothing_else(tmp_path: Path) -> None:
    run = recorded(tmp_path / "results.json", race=PASSED, overlap=PASSED)
    runner.run_parts(run, [one(bad)], 60.0, lambda part, result: None)
    again = Run(CPU, TINY, run.path)
    again.read()
    assert again.results["overlap"] == PASSED
    assert again.results["race"].verdict == FAIL
    assert again.results["race"].machine == run.words


def test_first_what_has_never_run_then_what_ran_elsewhere_or_at_another_commit(tmp_path: Path) -> None:
    names = [part.name for part in PARTS]
    here = replace(PASSED, commit=runner.commit(), machine=Run(CPU, TINY, None).words)
    run = recorded(
        tmp_path / "results.json",
        facts=PASSED,
        race=replace(here, commit="fedcba9876"),
        steps=replace(here, machine="another"),
        overlap=here,
        exposed=Result(NOT_RUN, "needs a GPU"),
    )
    run.go_on()
    order = [part.name for part in run.to_come()]
    assert order[-3:] == ["facts", "race", "steps"]
    assert order[:-3] == [name for name in names if name not in {"facts", "race", "steps", "overlap"}]


def test_results_over_another_backend_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Run(CPU, TINY, path).save()
    with pytest.raises(
        OtherRunError, match=r"holds results of format 2 over gloo, .* over nccl; --out writes elsewhere"
    ):
        Run(Machine("nccl", 8), TINY, path).read()


OTHER = ["", "[]", "{}", '{"format": 2, "backend": "gloo", "parts": {"race": {"no": 1}}}']


@pytest.mark.parametrize("text", OTHER)
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(OtherRunError, match="holds no results of this script"):
        Run(CPU, TINY, path).read()


def test_the_committed_page_is_made_from_the_committed_results(tmp_path: Path) -> None:
    docs = SCRIPTS.parent / "docs"
    run = Run(Machine("nccl", 0), Sizes(), docs / "data" / "gpu_results.json")
    run.read()
    made = page(run, tmp_path / "gpu_results.md")
    assert made == (docs / "gpu_results.md").read_text(), "run scripts/gpu_check.py --page"
    for table_of in ("gpu_parts.csv", "gpu_results.csv"):
        assert (tmp_path / "data" / table_of).read_text() == (docs / "data" / table_of).read_text()


def test_the_results_page_can_be_written_without_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    Run(Machine("nccl", 1), Sizes(), tmp_path / "data" / "results.json", {"race": PASSED}).save()
    assert gpu_check.main(["--page", "--out", str(out)]) == 0
    assert "| The deallocation race | pass | 9 |  | 1 x Other GPU | 2026-11-27 | 0123456789 |" in with_tables(
        out, out.read_text()
    )
    (tmp_path / "data" / "results.json").write_text("{}")
    assert gpu_check.main(["--page", "--out", str(out)]) == 2


def test_the_page_is_made_from_the_json_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    run = Run(Machine("nccl", 2), TINY, tmp_path / "data" / "results.json")
    results = {"facts": good, "race": bad, "overlap": counted, "exposed": cannot}
    parts = [Part(name, name, 30.0, work) for name, work in results.items()]
    runner.run_parts(run, parts, 60.0, lambda part, result: None)
    text = page(run, path)
    shown = re.sub(r"\| \d+ \|", "| SECONDS |", with_tables(path, text))
    assert "has measured on GPUs" in text
    assert "| The deallocation race | **fail** | SECONDS | this does not / at all |" in shown
    assert "| The deallocation race | this does not / at all | **NO** |" in shown
    assert "| The deallocation race | this holds | holds |" in shown
    assert "| Exposed communication | not run | SECONDS | no such kernel |" in shown
    assert f"| Offloaded activations | not run | SECONDS | {NOT_YET} |" in shown
    assert "| What safety costs | what two | GB/s 1234 |" in shown
    again = Run(run.machine, run.sizes, run.path)
    again.read()
    assert page(again, path) == text


# -- what a machine has ------------------------------------------------------------------------------------------------

MPS_CONTROL = """#!/bin/sh
echo "$CUDA_MPS_PIPE_DIRECTORY $1 $(test "$1" = -d || cat)" >> {log}
echo refused >&2
exit {code}
"""


def mps_control(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Path:
    """A stand-in for MPS's control program; the file of its calls."""
    program, log = folder / "nvidia-cuda-mps-control", folder / "calls"
    program.write_text(MPS_CONTROL.format(log=log, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


def test_mps_runs_only_within_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = mps_control(tmp_path, monkeypatch)
    with outside.mps() as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir()
    assert log.read_text().splitlines() == [f"{folder} -d ", f"{folder}  quit"]
    assert not Path(folder).exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_part_that_mps_does_not_start_for_is_not_run(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        mps_control(tmp_path, monkeypatch, code=1)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    result = ran(one(overlap.under_mps), Machine("nccl", 1))
    assert result is not None
    why = "MPS did not start: refused" if there else "there is no nvidia-cuda-mps-control"
    assert (result.verdict, result.why) == (NOT_RUN, why)


def test_clients_that_cannot_use_mps_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mps_control(tmp_path, monkeypatch)

    def refused(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(outside, "run_ranks", refused)
    result = ran(one(overlap.under_mps), Machine("nccl", 1))
    assert result is not None
    assert result.verdict == NOT_RUN
    assert result.why == "MPS starts, but its clients do not: RuntimeError: CUDA error: out of memory"


def test_jobs_run_in_parallel_and_keep_their_order() -> None:
    both = threading.Barrier(2)
    assert outside.at_once([lambda: both.wait(30.0) >= 0, lambda: both.wait(30.0) >= 0 and "second"], 2) == [
        True,
        "second",
    ]


BARE = """
import sys
from importlib.machinery import PathFinder

class Bare:
    \"\"\"Finds what Python, torch and this project have, and nothing else that is installed.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"no module named {name}", name=name)

sys.meta_path.insert(0, Bare())
import gpu_check
raise SystemExit(gpu_check.main(["--list"]))
"""


@pytest.mark.slow
def test_the_gpu_check_needs_only_torch() -> None:
    """What torch itself does not need is not there."""
    needed = {"torch", *_needs("torch")}
    missing = {
        module
        for module, owners in _owners().items()
        if not needed & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} and not module.startswith("_")
    }
    missing -= {"testkit", "tests", "scripts", "benchmarks", "examples", "megatron_pp", *sys.stdlib_module_names}
    assert {"pytest", "hypothesis"} <= missing
    program = BARE.replace("{missing}", repr(missing))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), str(SCRIPTS)])}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60.0)
    assert (run.returncode, run.stdout.count("\n")) == (0, len(PARTS)), run.stderr[-1000:]


def _owners() -> dict[str, set[str]]:
    """Module -> the installed packages that have it. `packages_distributions` of Python 3.10 knows only packages that
    list their modules in a file; the files of the others are looked through."""
    found: dict[str, set[str]] = {module: set(owners) for module, owners in packages_distributions().items()}
    known = {owner for owners in found.values() for owner in owners}
    for package in (one for one in distributions() if one.metadata["Name"] not in known):
        for file in package.files or ():
            module = file.parts[0] if len(file.parts) > 1 else file.stem
            if file.suffix == ".py" and module.isidentifier():
                found.setdefault(module, set()).add(package.metadata["Name"])
    return found


def _needs(package: str) -> set[str]:
    """The packages that ``package`` needs, and those that they need."""
    found: set[str] = set()
    left = [package]
    while left:
        try:
            lines = requires(left.pop()) or []
        except PackageNotFoundError:
            continue
        names = {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line, maxsplit=1)[0]).lower() for line in lines}
        extra = {
            re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line, maxsplit=1)[0]).lower()
            for line in lines
            if "extra ==" in line
        }
        left += sorted(names - extra - found)
        found |= names - extra
    return found


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "."], "must be a file FILE.md in a folder that exists"),
        (["--out", "no/such/folder/results.md"], "must be a file FILE.md in a folder that exists"),
        (["--out", "results.txt"], "must be a file FILE.md in a folder that exists"),
        (["--seconds", "0"], "--seconds 0: must be above 0"),
        (["--seconds", "nan"], "--seconds nan: must be above 0"),
        (["--only", "rice"], "invalid choice: 'rice'"),
    ],
)
def test_wrong_values_are_refused_before_anything_runs(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "run_parts", lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--cpu", *flags])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_gpu_check_reports_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "torch finds no GPU here; --cpu tries the script" in capsys.readouterr().err


def test_parts_done_are_run_again_where_they_are_named_or_all_is_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[str] = []
    parts = (one(good), Part("steps", "Steps", 30.0, bad))
    monkeypatch.setattr(table, "PARTS", parts)
    monkeypatch.setattr(runner, "PARTS", parts)

    def run_parts(run: Run, parts: list[Part], *rest: Any) -> None:
        began.append(" ".join(part.name for part in parts))
        runner.run_parts(run, parts, *rest)

    monkeypatch.setattr(gpu_check, "run_parts", run_parts)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    out = ["--cpu", "--out", str(tmp_path / "results.md")]
    codes = [gpu_check.main([*out, *more]) for more in ([], [], ["--only", "race"], ["--fresh"])]
    assert began == ["race steps", "", "race", "race steps"]
    assert codes == [1, 1, 1, 1], "a failure stays until the part has run again"
    assert "FAILED: steps: this does not | at all" in capsys.readouterr().out
    saved = json.loads((tmp_path / "data" / "results.json").read_text())
    assert list(saved["parts"]) == ["race", "steps"]
    assert gpu_check.main(["--list"]) == 0


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (one(good), Part("steps", "Steps", 30.0, good))
    monkeypatch.setattr(table, "PARTS", parts)
    monkeypatch.setattr(runner, "PARTS", parts)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def interrupted(part: Part, result: Result) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "say", interrupted)
    out = tmp_path / "results.md"
    assert gpu_check.main(["--cpu", "--out", str(out)]) == 1
    assert list(json.loads((tmp_path / "data" / "results.json").read_text())["parts"]) == ["race"]
    assert "| The deallocation race | pass |" in with_tables(out, out.read_text())


ENDED = """
import os
import re
import signal
import time
from multiprocessing.context import ForkProcess

import gpu_check
from gpu_day import outside

start = ForkProcess.start


def ended(process):
    start(process)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


ForkProcess.start = ended
signal.signal(signal.SIGTERM, gpu_check._ended)
outside.own_process(lambda send: time.sleep(60.0), 60.0, print)
"""


@pytest.mark.slow
def test_a_signal_as_a_part_starts_ends_the_part() -> None:
    """multiprocessing waits for all its processes at the end of a program."""
    path = os.pathsep.join(map(str, (SCRIPTS.parent, SCRIPTS)))
    run = subprocess.run(
        [sys.executable, "-c", ENDED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=40.0,
    )
    assert run.stderr.endswith("KeyboardInterrupt\n"), run.stderr
    assert not is_running(int(run.stdout))


def test_every_deadline_fits_a_call() -> None:
    """Together they do not: the next call goes on."""
    assert max(part.deadline for part in PARTS) <= gpu_check.SECONDS / 4
    assert gpu_check.SECONDS < 1200.0
