"""The commands and programs on the README, docs/, CONTRIBUTING and the examples' pages run as printed.

The inspecting commands of a page run here one after the other, in a folder with only the files that the page names. A
Python block runs here if it is a whole program, or if `printed_tables.FIRST` has the lines before it. A table has
everything else, with the test that runs it or the reason why no test here can.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest

from megatron_pp.tools.cli import main
from testkit.pages import ROOT, code_blocks, run_commands, run_torchrun
from testkit.printed import Printed, names_from_elsewhere, pages, printed
from testkit.sweeps import drawn
from tests.functional_tests.megatron_support import in_megatrons_process, needs_megatron
from tests.functional_tests.printed_tables import BLANK, BY_TEST, EVIDENCE, FIRST, MINUTES, NOT_HERE, PARTS, SUITE

from testkit.megatron.cases import Case  # isort: skip

ALL = [one for page in pages() for one in printed(page)]
NEEDS_MEGATRON = re.compile(r"\bmegatron_core\b")
INSPECTS = re.compile(r"megatron-pp (plan|verify|simulate|advise|draw|report|check) ")
TORCHRUN = re.compile(r"(\w+=\S+ )*torchrun ")
ENDS_WITH = {
    "megatron-pp check --gpus 64 --gpu h100 examples/check/recipe.yaml": 1,
    "megatron-pp check --gpus 64 --gpu h100 recipe.yaml": 1,
}
"""Commands that find something, and their exit codes."""
MEASURED = """{"forward": [1, 1, 1, 1, 1, 1, 1, 1], "backward_input": [1, 1, 1, 1, 1, 1, 1, 1],
 "weight": [1, 1, 1, 1, 1, 1, 1, 1], "activation": [2, 2, 2, 2, 2, 2, 2, 2], "transfer": 0.1,
 "run": {"pipeline_size": 8, "micro_batch_size": 1, "seq_length": 4096}}"""


def by_test(one: Printed) -> str | None:
    return BY_TEST.get(one.page) or BY_TEST.get(one.name)


def is_elsewhere(one: Printed) -> bool:
    """Return whether a table says that another test runs it, or that no test can."""
    suite = one.language == "shell" and re.search(EVIDENCE[SUITE], one.text)
    return by_test(one) is not None or one.name in NOT_HERE or bool(suite)


def runs_here(one: Printed) -> bool:
    return not is_elsewhere(one) and (one.language == "shell" or _whole(one))


def _whole(one: Printed) -> bool:
    return one.page in FIRST or not (names_from_elsewhere(one.text) or NEEDS_MEGATRON.search(one.text))


SHELL = sorted({one.page for one in ALL if one.language == "shell" and runs_here(one)})
LONG = ["README.md", "docs/cli.md", "docs/measuring.md", "docs/quick_start.md"]
"""Pages whose commands take seconds: a run draws one of them."""
PYTHON = [one for one in ALL if one.language == "python" and runs_here(one)]
UNDER_MEGATRON = [
    one for one in ALL if one.language == "python" and NEEDS_MEGATRON.search(one.text) and by_test(one) is None
]


@pytest.mark.parametrize("page", [*(page for page in SHELL if page not in LONG), *drawn(LONG, 1)])
def test_the_commands_of_a_page_run_one_after_the_other_in_an_empty_folder(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    commands = [one.text for one in printed(page) if one.language == "shell" and runs_here(one)]
    _prepare(folder, " ".join(commands))
    monkeypatch.chdir(folder)
    for command in commands:
        if INSPECTS.match(command) and "|" not in command:
            code, said = _in_this_process(command)
            assert code == ENDS_WITH.get(command, 0), f"{command}: {capfd.readouterr().err}"
            assert said
        elif TORCHRUN.match(command):
            run_torchrun(command, folder)
        else:
            run_commands([command], folder)


def _prepare(folder: Path, commands: str) -> None:
    """Make the files that commands name. The example takes ten of its 50 steps; test_pages.py runs them all."""
    (folder / "examples").symlink_to(ROOT / "examples")
    if "example.py" in commands:
        program = code_blocks("docs/quick_start.md")["example.py"]
        assert "in range(50):" in program
        (folder / "example.py").write_text(program.replace("in range(50):", "in range(10):"))
    if " recipe.yaml" in commands:
        shutil.copy(ROOT / "examples" / "check" / "recipe.yaml", folder)
    if "measured.json" in commands:
        (folder / "megatron_pp_measured.json").write_text(MEASURED)


def _in_this_process(command: str) -> tuple[int, str]:
    """Run a `megatron-pp` command, and return its exit code and output; write the output to a file if the command does.
    `advise` searches for a second here; test_printed_numbers.py checks its whole answer."""
    words = shlex.split(command)
    if words[1] == "advise" and "--budget-s" not in words:
        words[2:2] = ["--budget-s", "1"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(words[1 : words.index(">")] if ">" in words else words[1:])
    if ">" in words:
        Path(words[-1]).write_text(said.getvalue())
    return code, said.getvalue()


@pytest.mark.parametrize("one", PYTHON, ids=lambda one: f"{one.page}-{one.name}")
def test_python_on_a_page_runs(one: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "page"}
    exec(FIRST.get(one.page, ""), space)
    exec(compile(one.text, one.page, "exec"), space)


def install_lines(case: Case) -> int:
    """Run the blocks under Megatron-core, page by page, uninstall the plug-in, and return how many blocks ran."""
    from megatron_pp.integrations import megatron_core

    spaces: dict[str, dict[str, object]] = {}
    for one in UNDER_MEGATRON:
        exec(compile(one.text, one.page, "exec"), spaces.setdefault(one.page, {"__name__": "page"}))
        assert megatron_core.is_installed(), one.page
    megatron_core.uninstall()
    return len(UNDER_MEGATRON)


@needs_megatron
def test_the_lines_that_install_the_engine_run_under_megatron() -> None:
    assert in_megatrons_process(install_lines) == len(UNDER_MEGATRON) > 3


def test_every_other_code_block_is_run_by_a_test_or_says_why_not() -> None:
    left = [
        one for one in ALL if not (is_elsewhere(one) or runs_here(one) or one in UNDER_MEGATRON or one.page in PARTS)
    ]
    assert left == [], "neither run nor in printed_tables.py"


def test_code_blocks_that_are_not_run_have_the_requirement_that_they_name() -> None:
    printed_now = {one.name for one in ALL}
    pages_now = {one.page for one in ALL}
    assert [name for name in NOT_HERE if name not in printed_now] == [], "no page prints it any more"
    assert [name for name in BY_TEST if name not in printed_now | pages_now] == []
    for name, why in NOT_HERE.items():
        assert re.search(EVIDENCE[why.reason], name), f"{name}: {why.reason}"
        assert why.test or why.reason not in (MINUTES, BLANK), f"{name}: no test runs anything like it"


@pytest.mark.parametrize(
    "test", sorted({*BY_TEST.values(), *PARTS.values(), *(why.test for why in NOT_HERE.values() if "/" in why.test)})
)
def test_the_tests_that_are_named_exist(test: str) -> None:
    path, _, name = test.partition("::")
    file = ROOT / "tests" / path
    assert file.exists()
    assert not name or f"def {name}(" in file.read_text()


def test_program_fragments_use_only_names_that_the_reader_defines() -> None:
    parts = [one for one in ALL if one.language == "python" and one.page in PARTS and not runs_here(one)]
    whole = [one for one in parts if not names_from_elsewhere(one.text) and by_test(one) is None]
    assert [one for one in whole if one not in UNDER_MEGATRON] == []
    assert {one.page for one in ALL if one.language == "python"} > set(PARTS) - set(FIRST)
