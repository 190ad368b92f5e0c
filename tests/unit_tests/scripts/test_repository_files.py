"""Files that a code host, an editor, a commit or Docker reads: they parse, and what they call exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_pp import __version__

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CONSTRAINTS = (ROOT / "scripts" / "constraints.txt").read_text()
# Programs of an environment that scripts/setup_env.sh makes with the extras of the job.
IN_ENVIRONMENT = {".venv/bin/python", ".venv/bin/lint-imports"}
CI_EXAMPLES = sorted((ROOT / "examples" / "ci").glob("*.yml"))
FIRST_ON_NODE_24 = {"actions/checkout": 5, "actions/setup-python": 6, "actions/upload-artifact": 6}
# Texts in which this project's own paths are looked for.
TEXTS = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "RELEASING.md",
    "CODE_OF_CONDUCT.md",
    "Dockerfile",
    ".github/PULL_REQUEST_TEMPLATE.md",
)
PATHS = re.compile(r"(?<![\w/.])(?:scripts|docs|tests|megatron_pp|\.ci)/[\w./-]*\w")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def supported() -> set[str]:
    return set(re.findall(r"range\((\d+), (\d+)\)\)", (ROOT / "setup.py").read_text())[0])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_what_exists(path: Path) -> None:
    commands = [step["run"] for step in steps_of(parsed(path)) if "run" in step]
    assert commands
    for command in commands:
        program = shlex.split(command)[0]
        if program not in IN_ENVIRONMENT:
            script = ROOT / program
            assert script.is_file(), command
            assert script.stat().st_mode & 0o100, f"{program} cannot be executed"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_can_change_nothing_and_ends(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 90
    for step in steps_of(workflow):
        assert "${{" not in step.get("run", ""), "an input in the text of a command would be run"
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "some/action@v1"))


@pytest.mark.parametrize("path", [*WORKFLOWS, *CI_EXAMPLES], ids=lambda path: path.name)
def test_actions_run_on_a_node_that_runners_have(path: Path) -> None:
    """GitHub's runners have no Node 20 since September 2026."""
    found = re.findall(r"uses: ([\w-]+/[\w-]+)@v(\d+)", path.read_text(encoding="utf-8"))
    assert [(name, int(major)) for name, major in found if int(major) < FIRST_ON_NODE_24[name]] == []


def test_every_supported_python_is_tested_and_gets_a_wheel() -> None:
    first, behind = (int(number) for number in sorted(supported(), key=int))
    wanted = [f"3.{minor}" for minor in range(first, behind)]
    jobs = parsed(ROOT / ".github" / "workflows" / "checks.yml")["jobs"]
    for name in ("tests", "wheel"):
        assert jobs[name]["strategy"]["matrix"]["python"] == wanted


def test_the_extras_of_a_workflow_exist() -> None:
    text = (ROOT / "setup.py").read_text()
    for path in WORKFLOWS:
        for step in steps_of(parsed(path)):
            words = shlex.split(step.get("run", ""))
            if words[:1] == ["scripts/setup_env.sh"]:
                assert [extra for extra in words[1:] if f'"{extra}": [' not in text] == []


def test_commits_are_checked_by_the_tools_of_the_constraints() -> None:
    (hooks,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert hooks["repo"] == "local"
    for hook in hooks["hooks"]:
        for package in hook.get("additional_dependencies", ()):
            assert re.search(rf"^{re.escape(package)}$", CONSTRAINTS, re.MULTILINE), package
        for script in re.findall(r"scripts/[\w./]+", hook["entry"]):
            assert (ROOT / script).is_file()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_the_host_asks_for(path: Path) -> None:
    form = parsed(path)
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True, "contact_links": []}
        return
    assert {"name", "description", "body"} <= form.keys()
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    for field in form["body"]:
        assert field["type"] in {"dropdown", "textarea", "input", "checkboxes"}
        assert field["attributes"]["label"]


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_a_text_names_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [path for path in PATHS.findall(text) if not (ROOT / path).exists()] == []
    prose = re.sub(r"`[^`]*`", "", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)", prose) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_editorconfig_has_the_line_length_of_ruff() -> None:
    length = re.search(r"^line-length = (\d+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert length is not None
    assert f"max_line_length = {length[1]}" in (ROOT / ".editorconfig").read_text()


def test_the_number_of_the_release_is_the_same_everywhere() -> None:
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## .*\b{re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_a_release_has_each_heading_and_entry_of_the_changelog_once() -> None:
    """A rebase that keeps both sides repeats them without a conflict."""
    for release in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        found = re.findall(r"^(?:#|\*\*|- ).+", release, re.MULTILINE)
        assert [line for line in found if found.count(line) > 1] == []
