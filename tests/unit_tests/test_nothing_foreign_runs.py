"""No source of the project evaluates, or unpickles without restriction, what it reads: looked up in the syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "examples", "megatron_pp", "scripts")
SOURCES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py"))
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# File -> what it may do: run the script that the user names; copy objects between ranks of one job, as torch does.
ALLOWED = {
    # The checks of the Megatron that the user's script imports, and the function of the script that adds its flags.
    "megatron_pp/tools/check/jobs/collecting.py": {"running text: compile"},
    "megatron_pp/tools/check/jobs/megatron_process.py": {"running text: compile", "running text: exec"},
    "megatron_pp/tools/cli/run.py": {"running text: compile", "running text: exec"},
    "megatron_pp/integrations/megatron/steps/v_logs.py": {"unpickling: pickle"},
    "megatron_pp/tools/parity/workers/keeper.py": {"unpickling: pickle"},  # the outcome of the worker it has started
    "megatron_pp/tools/parity/workers/processes.py": {"unpickling: pickle"},  # results of the ranks that it has started
    "megatron_pp/tools/parity/script.py": {"unpickling: pickle"},  # writes one, and reads none
}
READS_YAML = {"load", "load_all", "full_load", "unsafe_load"}


def _faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"unpickling: {m}" for m in modules if m.partition(".")[0] in UNPICKLES)
        elif isinstance(node, ast.Call):
            yield from _faults_of_call(node)


def _faults_of_call(call: ast.Call) -> Iterator[str]:
    function = call.func
    if isinstance(function, ast.Name) and function.id in RUNS_TEXT:
        yield f"running text: {function.id}"
    if not isinstance(function, ast.Attribute):
        return
    owner = ast.unparse(function.value)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if (owner, function.attr) == ("torch", "load") and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if (owner, function.attr) in {("np", "load"), ("numpy", "load")} and given.get("allow_pickle", "False") != "False":
        yield "numpy.load with allow_pickle"
    if owner == "yaml" and function.attr in READS_YAML:
        yield f"yaml.{function.attr}"
    if (owner, function.attr) in {("os", "system"), ("os", "popen")} or given.get("shell") == "True":
        yield "a shell"


def test_no_source_runs_foreign_code_beyond_the_allowed_list() -> None:
    found = {str(path.relative_to(ROOT)): set(_faults(ast.parse(path.read_text("utf-8")))) for path in SOURCES}
    assert len(found) > 400
    assert {name: faults for name, faults in found.items() if faults} == ALLOWED


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("eval(x)", "running text: eval"),
        ("import pickle", "unpickling: pickle"),
        ("from pickle import loads", "unpickling: pickle"),
        ("torch.load(f)", "torch.load without weights_only=True"),
        ("torch.load(f, weights_only=flag)", "torch.load without weights_only=True"),
        ("np.load(f, allow_pickle=True)", "numpy.load with allow_pickle"),
        ("yaml.load(f)", "yaml.load"),
        ("subprocess.run(c, shell=True)", "a shell"),
    ],
)
def test_the_source_check_finds_each_kind_of_foreign_code(text: str, what: str) -> None:
    right = "model.eval(); re.compile(p); torch.load(f, weights_only=True); json.load(f); yaml.safe_load(f)"
    assert list(_faults(ast.parse(f"{text}\n{right}"))) == [what]
