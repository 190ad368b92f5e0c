"""Scripts say what they are for when asked, before they set anything up or begin to work, and refuse what they do not
know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT_ROOT

SCRIPTS = PROJECT_ROOT / "scripts"
OF_A_PROGRAM = ("gpu_check.sh", "pretrain_gpt_megatron.sh", "train.sh")
"""Their help is that of the Python program that they start."""
TAKE_NO_FLAGS = ("check_wheel.sh", "setup_env.sh", "test_megatron_versions.sh")
WITHOUT_TORCH = ("megatron_flags_table.py", "megatron_reads.py", "turns_table.py")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Where no environment can be made, and no program of one runs."""
    environment = {**os.environ, "MEGATRON_PP_PYTHON": "no_such_python", "PYTHON": "no_such_python"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, env=environment)


@pytest.mark.parametrize("name", sorted({path.name for path in SCRIPTS.glob("*.sh")} - set(OF_A_PROGRAM)))
def test_a_shell_script_prints_the_comment_at_its_head(name: str, tmp_path: Path) -> None:
    done = run(["bash", str(SCRIPTS / name), "--help"], tmp_path)
    second = (SCRIPTS / name).read_text().splitlines()[1]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == second.removeprefix("# ")
    assert "#!/" not in done.stdout
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize("name", TAKE_NO_FLAGS)
def test_a_shell_script_refuses_flags(name: str, tmp_path: Path) -> None:
    done = run(["bash", str(SCRIPTS / name), "--wrong"], tmp_path)
    assert done.returncode in (1, 2), done.stderr
    assert "--wrong" in done.stderr
    assert "(--help)" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_a_script_refuses_flags_before_it_works(name: str, tmp_path: Path) -> None:
    done = run([sys.executable, str(SCRIPTS / name), "--wrong"], tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("usage: ")
