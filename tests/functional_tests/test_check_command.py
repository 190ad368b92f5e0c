"""``megatron-pp check`` on the small Megatron script of parity's tests.

It runs as a command in tests of its process, or of the process of Megatron's parser. Other tests call it in the test's
process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest

from megatron_pp.tools.check.jobs import megatron_flags
from megatron_pp.tools.cli.command_line import main
from testkit.faults.ends import as_in_the_foreground
from tests.conftest import PROJECT_ROOT
from tests.functional_tests.megatron_support import needs_megatron
from tests.functional_tests.test_check_refusals import asked_in_a_fork

pytestmark = needs_megatron

SMALL = PROJECT_ROOT / "testkit" / "megatron" / "small_training"
PRETRAIN = str(SMALL / "pretrain.py")
CHECKOUT = os.environ.get("MEGATRON_CHECKOUT", "")
RIGHT = """\
language_model: {num_layers: 8, hidden_size: 512, num_attention_heads: 8}
model_parallel: {pipeline_model_parallel_size: 4}
micro_batch_size: 1
global_batch_size: 16
seq_length: 1024
vocab_size: 32000
bf16: true
"""
RIGHT_FLAGS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 --lr 0.1 --train-iters 10 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 1000"
)


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    complaint: str

    @property
    def answer(self) -> dict[str, Any]:
        return json.loads(self.out)

    def findings(self, section: str, level: str = "") -> list[dict[str, Any]]:
        found = self.answer["sections"][section]["findings"]
        return [one for one in found if level in ("", one["level"])]


def check(command: str, folder: Path, **environment: str) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_pp", "check", *command.split()],
        env={**os.environ, "PYTHONPATH": f"{PROJECT_ROOT}:{SMALL}", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], Said]:
    """Runs ``check`` in this process and in the test's folder. Megatron's parser runs in the fork of a process that has
    imported torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(megatron_flags, "_asked", asked_in_a_fork)

    def called(command: str) -> Said:
        code = main(["check", *command.split()])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return called


def test_flags_are_read_by_the_scripts_own_parser(checked: Callable[[str], Said]) -> None:
    said = checked(f"--gpus 4 --json {PRETRAIN} --num-layers 8 --pipeline-model-parallel-size 2 --lr 0.001")
    job = said.answer["job"]
    assert (job["framework"], job["gpus"], job["validated"]) == ("megatron", 4, True)
    assert job["given"] == {"num_layers": 8, "pipeline_model_parallel_size": 2, "lr": 0.001}
    assert job["args"]["data_parallel_size"] == 2
    assert job["spelling"]["num_layers"] == "--num-layers"
    assert not said.findings("start", "error")


def test_check_reports_all_refusals_of_a_job(tmp_path: Path) -> None:
    """The answer has the refusals of the parser and of each check, with the settings that they concern."""
    flags = "--num-layers 7 --pipeline-model-parallel-size 2 --global-batch-size 7 --micro-batch-size 2 --lr x --foo 3"
    said = check(f"--gpus 2 --json {PRETRAIN} {flags}", tmp_path)
    assert said.code == said.answer["exit_code"] == 1
    texts = [one["text"] for one in said.findings("start", "error")]
    for words in ("invalid float value: 'x'", "does not know --foo", "divisible by the stages", "divisible by 2"):
        assert any(words in text for text in texts), texts
    assert "num_layers" in next(one for one in said.findings("start") if "stages" in one["text"])["settings"]


def test_check_reports_a_missing_script_in_one_sentence(checked: Callable[[str], Said]) -> None:
    said = checked("--gpus 2 nothing.py --num-layers 2")
    assert (said.code, said.out) == (2, "")
    assert said.complaint.startswith("megatron-pp check: nothing.py does not exist; check reads a script")
    assert json.loads(checked("--gpus 2 --json nothing.py").out)["exit_code"] == 2


def test_check_writes_its_answer_for_github_junit_and_code_quality(
    checked: Callable[[str], Said], tmp_path: Path
) -> None:
    flags = "--num-layers 7 --pipeline-model-parallel-size 2"
    said = checked(f"--gpus 2 --github --junit check.xml {PRETRAIN} {flags}")
    assert said.code == 1
    assert "::error title=start%3A megatron-refuses-num-layers::Megatron refuses: layers should" in said.out
    suite = Xml.parse(tmp_path / "check.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    assert suite.find("testcase[@name='start']/failure").get("message").startswith("error: Megatron refuses")
    said = checked("--gpus 2 --github --junit check.xml nothing.py")
    assert said.code == 2
    assert said.out.startswith("::error title=megatron-pp check::nothing.py does not exist")
    assert Xml.parse(tmp_path / "check.xml").getroot().get("errors") == "1"


def test_check_has_an_exit_code_for_each_outcome(checked: Callable[[str], Said], tmp_path: Path) -> None:
    """The cases are no finding, only risks, and risks with --strict. Tests above check the other two exit codes."""
    (tmp_path / "gpt.yaml").write_text(RIGHT)
    assert checked("--gpus 4 gpt.yaml").code == 0
    (tmp_path / "gpt.yaml").write_text(RIGHT + "made_up: 3\n")
    said = checked("--gpus 4 gpt.yaml")
    assert said.code == 3
    assert "not known and was not read: made_up" in said.out
    assert checked("--gpus 4 --strict gpt.yaml").code == 1


def test_check_compares_numbers_with_the_flag_numbers(tmp_path: Path) -> None:
    flags = "--num-layers 8 --pipeline-model-parallel-size 2 --lr 0.001 --global-batch-size 8"
    said = check(f"--gpus 2 --json --numbers {PRETRAIN} {flags}", tmp_path, PLANTED_FAULT="log")
    assert [one["name"] for one in said.findings("numbers")] == ["numbers-differ"]
    assert said.code == 1
    (tmp_path / "gpt.yaml").write_text(RIGHT)
    said = check("--gpus 4 --json --numbers gpt.yaml", tmp_path)
    assert [one["name"] for one in said.findings("numbers")] == ["numbers-not-compared"]


def test_check_reports_the_release_that_was_given(checked: Callable[[str], Said], tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(RIGHT)
    assert checked("--gpus 4 --json --release 0.17.0 gpt.yaml").answer["job"]["release"] == "0.17.0"


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_CHECKOUT names no checkout of Megatron-LM")
def test_megatrons_own_checks_are_collected(tmp_path: Path) -> None:
    flags = (
        "--num-layers 30 --hidden-size 1000 --num-attention-heads 15 --seq-length 2048 --max-position-embeddings 1024 "
        "--micro-batch-size 2 --global-batch-size 33 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
        "--lr 0.1 --train-iters 10 --bf16 --tokenizer-type NullTokenizer --vocab-size 1000"
    )
    said = check(f"--gpus 16 --json {CHECKOUT}/pretrain_gpt.py {flags}", tmp_path)
    texts = "\n".join(one["text"] for one in said.findings("start", "error"))
    for words in ("divisible", "hidden_size % args.num_attention_heads", "max_position_embeddings (1024)", "size (33)"):
        assert words in texts
    assert said.answer["job"]["validated"]
    said = check(f"--gpus 4 --json {CHECKOUT}/pretrain_gpt.py {RIGHT_FLAGS} --sequence-parallel", tmp_path)
    assert not said.findings("start", "error")
    changed = [one for one in said.findings("layout") if one["name"] == "megatron-changes-sequence-parallel"]
    assert "because tensor model parallelism is disabled" in changed[0]["text"]


def test_ctrl_c_ends_check_without_an_answer(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n")
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").touch()
    (tmp_path / "megatron" / "training" / "arguments.py").write_text(
        f"import time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\ntime.sleep(100)\n"
    )
    command = [sys.executable, "-m", "megatron_pp", "check", "--gpus", "2", "slow.py", "--num-layers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)}
    begun = subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_the_foreground,
    )
    end = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    begun.send_signal(signal.SIGINT)
    _, complaint = begun.communicate(timeout=30)
    assert (begun.returncode, complaint.strip()) == (130, "megatron-pp check: ended by Ctrl-C")


def test_megatron_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n")
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").touch()
    (tmp_path / "megatron" / "training" / "arguments.py").write_text("import time\ntime.sleep(100)\n")
    said = check("--gpus 2 --patience 1 slow.py --num-layers 2", tmp_path)
    assert said.code == 2
    assert "did not read the flags of slow.py within 1 s; --patience SECONDS gives it more time" in said.complaint
