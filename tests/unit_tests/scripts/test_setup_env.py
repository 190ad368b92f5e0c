"""scripts/setup_env.sh: which interpreter it takes, and that an environment of another Python is not taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT_ROOT

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def set_up(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of the script without the variables of this run."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_PP_")}
    command = ["bash", str(PROJECT_ROOT / "scripts" / "setup_env.sh"), *arguments]
    return subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=60)


def interpreter(path: Path, answers: int = 0) -> Path:
    """A program in the place of a Python, which is of any version and works (0) or does not (1)."""
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\nexit {answers}\n")
    path.chmod(0o755)
    return path


def test_the_newest_patch_of_pyenv_that_works_is_found(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    interpreter(versions / "3.77.2" / "bin" / "python3")
    newest = interpreter(versions / "3.77.10" / "bin" / "python3")
    interpreter(versions / "3.77.11" / "bin" / "python3", answers=1)
    interpreter(versions / "3.7.12" / "bin" / "python3")
    found = set_up("--find", "3.77", PYENV_ROOT=str(tmp_path))
    assert (found.returncode, found.stdout) == (0, f"{newest}\n")


def test_an_interpreter_on_the_path_is_found(tmp_path: Path) -> None:
    on_path = interpreter(tmp_path / "bin" / "python3.77")
    found = set_up("--find", "3.77", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert (found.returncode, found.stdout) == (0, f"{on_path}\n")


def test_a_version_that_is_not_there_is_none() -> None:
    found = set_up("--find", "3.99")
    assert (found.returncode, found.stdout) == (1, "")


def test_an_unknown_version_is_reported_before_anything_is_made(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    made = set_up(MEGATRON_PP_PYTHON_VERSION="3.99", MEGATRON_PP_VENV=str(venv))
    assert made.returncode == 1
    assert "MEGATRON_PP_PYTHON_VERSION is 3.99, and there is no python3.99" in made.stderr
    assert not venv.exists()


@pytest.mark.parametrize("wanted", ["3.99", VERSION])
def test_an_environment_of_another_python_is_refused(wanted: str, tmp_path: Path) -> None:
    """One of the Python that is wanted goes on to the installation, which fails here: this one has no pip."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] && {{ echo installs >&2; exit 1; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made = set_up(MEGATRON_PP_PYTHON_VERSION=wanted, MEGATRON_PP_VENV=str(tmp_path))
    assert made.returncode == 1
    assert (f"is of Python {VERSION}; set MEGATRON_PP_VENV to another place" in made.stderr) == (wanted != VERSION)
    assert ("installs" in made.stderr) == (wanted == VERSION)
