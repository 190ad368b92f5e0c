"""The source distribution and the wheel: built, installed into an empty environment, and used from another folder."""

from __future__ import annotations

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import megatron_pp

ROOT = Path(__file__).resolve().parents[2]
URL = "https://git.example/megatron_pp"
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site", "runs", "shared")
TRAINING_STEP = """
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run
data = ToyData(4)
result = run_in_threads(2, 2, data, overlap_p2p_comm=True)
print("difference", result.difference(reference_run(4, data)))
"""
EVERY_HELP = """
from contextlib import suppress
from megatron_pp.tools.cli import main
for command in ([], ["plan"], ["verify"], ["simulate"], ["advise"], ["draw"], ["report"]):
    with suppress(SystemExit):
        main([*command, "--help"])
"""


class Installed(NamedTuple):
    """The two archives, and a Python environment in which only the wheel was installed."""

    sdist: Path
    wheel: Path
    python: Path
    folder: Path  # an empty folder, in which commands run

    def run(self, *command: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the command in that environment, and assert that its exit code is ``code``."""
        done = called([self.python.parent / command[0], *command[1:]], self.folder)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def show_libraries(self) -> None:
        """Add this environment's packages, torch among them, behind those of that environment."""
        site = next(self.python.parents[1].glob("lib/python*/site-packages"))
        (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")


def called(command: Sequence[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Nothing is downloaded: setuptools builds from here, and the wheel comes without its dependencies."""
    base = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, base / "source", ignore=NOT_SOURCES)
    (base / "empty").mkdir()
    steps: list[tuple[list[str | Path], Path]] = [
        ([sys.executable, "-m", "build", "--no-isolation", "--outdir", base / "dist"], base / "source"),
        ([sys.executable, "-m", "venv", "--without-pip", base / "venv"], base),
    ]
    python = base / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile"]
    for command, folder in steps:
        done = called(command, folder, MEGATRON_PP_URL=URL)
        assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = (list((base / "dist").glob(f"*.{ending}")) for ending in ("tar.gz", "whl"))
    done = called([*pip, wheel], base / "empty")
    assert done.returncode == 0, done.stdout + done.stderr
    return Installed(sdist, wheel, python, base / "empty")


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    held = {name for name in names if ".dist-info/" not in name}
    tracked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "megatron_pp").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == tracked
    assert {"megatron_pp/py.typed", "megatron_pp/tools/draw/page/timeline.js"} < held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_distribution_can_be_read_tested_and_built_again(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = "setup.py pyproject.toml LICENSE README.md docs/cli.md scripts/test.sh scripts/constraints.txt"
    here = Path(__file__).relative_to(ROOT)
    assert {*needed.split(), str(here), "examples/gpt/gpt.py", "megatron_pp/py.typed"} <= names
    assert [name for name in names if re.search(r"__pycache__|\.pyc$|^\.venv|^runs/", name)] == []


def test_the_metadata_says_what_it_is(installed: Installed) -> None:
    metadata = metadata_of(installed.wheel)
    assert (metadata["Name"], metadata["Version"]) == ("megatron-pp", megatron_pp.__version__)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.10")
    assert {"torch>=2.6", "rich>=13", "typing_extensions>=4.10"} <= set(metadata.get_all("Requires-Dist", []))
    supported = {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)}
    assert supported <= set(metadata.get_all("Classifier", []))
    assert f"Issues, {URL}/issues" in metadata.get_all("Project-URL", [])
    extras = set(metadata.get_all("Provides-Extra", []))
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE))
    assert extras <= documented


def test_the_page_of_the_package_index_has_no_link_to_a_file_beside_it(installed: Installed) -> None:
    text = str(metadata_of(installed.wheel).get_payload())
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert f"{URL}/blob/v{megatron_pp.__version__}/docs/megatron.md" in links
    assert [link for link in links if not link.startswith(("http", "#"))] == []
    own = [link.removeprefix(f"{URL}/") for link in links if link.startswith(URL)]
    assert [link for link in own if not (ROOT / re.sub("^(?:raw|blob)/[^/]+/|#.*", "", link)).is_file()] == []


def test_the_installed_package_works_without_torch_and_rich(installed: Installed) -> None:
    # This comes before any other package is installed: there is neither torch nor rich.
    shown = installed.run("python", "-c", EVERY_HELP).stdout
    commands = ["plan", "verify", "simulate", "advise", "draw", "report"]
    assert re.findall(r"usage: megatron-pp ?(\w*)", shown) == ["", *commands]
    assert installed.run("megatron-pp", "--version").stdout == f"megatron-pp {megatron_pp.__version__}\n"
    missing = installed.run("megatron-pp", "verify", code=2)
    assert missing.stderr == "megatron-pp verify: No module named 'rich'; install it by `pip install rich`\n"

    installed.show_libraries()
    where = installed.run("python", "-c", "import megatron_pp; print(megatron_pp.__file__)").stdout
    assert Path(where.strip()).is_relative_to(installed.python.parents[1])
    installed.run("megatron-pp", "plan", "-s", "zb_v", "-P", "2", "-M", "4", "-o", "mine.csv")
    assert "deadlock-free" in installed.run("megatron-pp", "verify", "-s", "mine.csv").stdout
    installed.run("megatron-pp", "draw", "-s", "mine.csv", "-o", "mine.html")
    assert "difference 0.0" in installed.run("python", "-c", TRAINING_STEP).stdout
