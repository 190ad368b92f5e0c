"""Megatron's checks are recorded instead of raised. The tests use a module of arguments that has each kind of check.

The process that reads the flags is forked from a process that has imported torch. ``test_check_command.py`` starts it
as ``megatron-pp check`` does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_pp.tools.check.findings import ERROR, NOTE, RISK
from megatron_pp.tools.check.jobs import megatron_flags
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.megatron_flags import read_script
from megatron_pp.tools.check.jobs.megatron_process import read_request
from megatron_pp.tools.check.jobs.read import Given, read_job
from testkit.processes import run_processes
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = needs_megatron

ARGUMENTS = """
import argparse
import os


def positive(text):
    if int(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def add_megatron_arguments(parser):
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "num-layers"):
        parser.add_argument(f"--{name}", type=positive, default=1)
    for name in ("old-flag", "sequence-parallel", "fused", "mended", "ends", "needs-variable"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--no-overlap", action="store_false", dest="overlap")
    parser.add_argument("--yaml-cfg", default=None)
    parser.add_argument("--tokenizer-type", default=None)
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    args.world_size = int(os.environ["WORLD_SIZE"])
    return args


def validate_args(args, defaults={}):
    for name, value in defaults.items():
        setattr(args, name, value)
    size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    assert args.world_size % size == 0, f"world size ({args.world_size}) is not divisible by {size}"
    assert not args.old_flag
    if args.num_layers % args.pipeline_model_parallel_size != 0:
        raise ValueError("layers must be divisible by stages")
    if args.fused:
        raise RuntimeError("fusion is not available. Please install grouped_gemm")
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        print("Disabling sequence parallelism because tensor model parallelism is disabled")
        args.sequence_parallel = False
    if os.environ.get("NVTE_TEST", "0") != "1" and args.needs_variable:
        raise ValueError("NVTE_TEST should be set to 1")
    if args.mended:
        args.broken = {}["missing"]
        args.num_layers = args.broken + 1
    if args.ends:
        print("--ends is no longer valid")
        exit()
    args.data_parallel_size = args.world_size // size
    return args
"""
SCRIPT = """
from megatron.training.arguments import parse_args, validate_args


def add_own(parser):
    parser.add_argument("--of-my-own", type=int)
    return parser


if __name__ == "__main__":
    train(extra_args_provider=add_own, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").touch()  # it is found before the installed Megatron
    (tmp_path / "megatron" / "training" / "arguments.py").write_text(ARGUMENTS)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def answer_of(rank: int, size: int, request: dict[str, Any]) -> Any:
    """The answer that the process prints."""
    return json.loads(json.dumps(read_request(request)))


def asked_in_a_fork(request: dict[str, Any], patience: float) -> Any:
    (answer,) = run_processes(answer_of, 1, (request,), backend=None, timeout=60.0, start_method="forkserver")
    return answer


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_flags, "_asked", asked_in_a_fork)


def read(script: Path, flags: str, gpus: int = 8) -> Job:
    return read_script([str(script), *flags.split()], gpus)


def texts(job: Job, level: str) -> list[str]:
    return [one.text for one in job.found if one.level == level]


def test_each_refusal_names_its_settings(script: Path) -> None:
    job = read(script, "--tensor-model-parallel-size 3 --pipeline-model-parallel-size 2 --num-layers 7 --old-flag")
    found = {one.text.partition(" (--")[0]: one.settings for one in job.found if one.level == ERROR}
    assert found == {
        "Megatron refuses: world size (8) is not divisible by 6": ("world_size",),
        "Megatron refuses: this must hold: not args.old_flag": ("old_flag",),
        "Megatron refuses: layers must be divisible by stages": ("num_layers", "pipeline_model_parallel_size"),
    }
    assert job.validated


def test_all_parser_errors_are_reported_and_other_flags_are_read(script: Path) -> None:
    job = read(script, "--num-layers 0 --tensor-model-parallel-size x --pipeline-model-parallel-size 2 --numm-layers 4")
    errors = "\n".join(texts(job, ERROR))
    for words in (
        "--num-layers: 0 is not above 0",
        "invalid positive value: 'x'",
        "does not know --numm-layers (did you",
    ):
        assert words in errors
    assert job.given == {"pipeline_model_parallel_size": 2}
    assert job.unknown == ("--numm-layers",)


def test_flags_and_defaults_of_the_script_are_known(script: Path) -> None:
    job = read(script, "--of-my-own 3")
    assert (job.given, job.unknown) == ({"of_my_own": 3}, ())
    assert job.args["tokenizer_type"] == "GPT2BPETokenizer"
    assert not texts(job, ERROR) + texts(job, RISK)


def test_flags_of_a_script_whose_function_is_elsewhere_may_be_right(script: Path) -> None:
    imported = SCRIPT.replace("def add_own", "from missing import add_own\n\n\ndef other")
    script.write_text(imported.replace("--of-my-own", "--another"))
    job = read(script, "--of-my-own 3")
    assert not texts(job, ERROR)
    assert "it may be one of the flags that the script adds" in texts(job, RISK)[0]


def test_check_quotes_megatrons_reason_for_a_changed_flag(script: Path) -> None:
    job = read(script, "--sequence-parallel")
    changed = next(one for one in job.found if one.name == "megatron-changes-sequence-parallel")
    why = "Disabling sequence parallelism because tensor model parallelism is disabled"
    assert changed.text == f"Megatron changes --sequence-parallel to False: {why}"
    assert (changed.level, changed.settings) == (NOTE, ("sequence_parallel",))


def test_a_package_that_is_missing_here_is_no_error(script: Path) -> None:
    job = read(script, "--fused")
    assert not texts(job, ERROR)
    assert any(one.name == "package-not-here" for one in job.found)


def test_failing_checks_and_refusing_checks_are_told_apart(script: Path) -> None:
    job = read(script, "--mended")
    assert "Megatron's checks fail: KeyError: 'missing'" in texts(job, ERROR)[0]
    assert not job.validated
    errors = texts(read(script, "--mended --old-flag"), ERROR)
    assert all("old_flag" in text for text in errors), "what fails behind a refusal may be its consequence"


def test_check_reports_a_megatron_check_that_exits_the_process(script: Path) -> None:
    assert any("ends the job here" in text for text in texts(read(script, "--ends"), ERROR))


def test_check_does_not_change_the_callers_environment(script: Path) -> None:
    before = dict(os.environ)
    assert read(script, "", gpus=6).args["data_parallel_size"] == 6
    assert dict(os.environ) == before


def test_a_variable_that_is_not_set_here_is_a_risk_and_one_of_the_jobs_file_counts(script: Path) -> None:
    found = [one for one in read(script, "--needs-variable").found if "NVTE_TEST" in one.text]
    assert [one.level for one in found] == [RISK]
    job = script.with_name("job.sh")
    job.write_text("export NVTE_TEST=1\ntorchrun train.py --needs-variable --num-layers 2\n")
    assert not [one for one in read_job(Given([str(job)], 8)).found if "NVTE_TEST" in one.text]


def test_a_script_with_a_parser_of_its_own_may_know_a_flag(script: Path) -> None:
    script.write_text("import my_project\n\nmy_project.train()\n")
    job = read(script, "--of-my-own 3")
    assert not texts(job, ERROR)
    assert "may have its own parser" in texts(job, RISK)[0]
