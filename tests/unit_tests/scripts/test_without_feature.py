"""Without a feature the core and the other features are whole: one feature a run, and a part of the tests that do not
name it, which the seed draws. With MEGATRON_PP_EXHAUSTIVE=1 every feature, and all of these tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import without_feature

from megatron_pp.feature_table import FEATURES, Row
from testkit.sweeps import drawn

# Of the fast tests; the script alone runs more. Each run has some of the core's and some of the features'.
CORE = ("tests/unit_tests/plan/ir", "tests/unit_tests/plan/lower", "tests/unit_tests/plan/verify")


def files_in(*folders: str) -> list[str]:
    return sorted(
        path.relative_to(without_feature.ROOT).as_posix()
        for folder in folders
        for path in (without_feature.ROOT / folder).rglob("test_*.py")
    )


TESTS = [*drawn(files_in(*CORE), 6), *drawn(files_in("tests/unit_tests/features"), 6)]


def folders(text: str) -> list[str]:
    table = next(
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FEATURES"
    )
    assert isinstance(table, ast.Tuple)
    return [ast.literal_eval(one.args[0]) for one in table.elts if isinstance(one, ast.Call)]


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.folder)
def test_the_row_alone_is_taken_out_of_the_table(row: Row) -> None:
    text = (without_feature.ROOT / without_feature.TABLE).read_text(encoding="utf-8")
    assert folders(without_feature.without_row(text, row)) == [one.folder for one in FEATURES if one != row]


def test_modules_that_import_the_feature_are_removed_with_it(tmp_path: Path) -> None:
    for name, text in {
        "megatron_pp/features/pairs/pair_runner.py": "",
        "testkit/of_pairs.py": "from megatron_pp.features.pairs import pair_runner",
        "tests/test_of_pairs.py": "from testkit.of_pairs import pair_runner",
        "tests/test_types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import testkit.of_pairs",
        "tests/test_other.py": "def late() -> None:\n    import testkit.of_pairs",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = without_feature.importers_of(["megatron_pp.features.pairs"], tmp_path)
    assert found == {"testkit/of_pairs.py", "tests/test_of_pairs.py"}


def test_a_copy_of_a_source_distribution_has_its_sources_alone(tmp_path: Path) -> None:
    for name in (".ci/run", "setup.py", "site/index.html", ".venv-3.12/bin/python", "tests/__pycache__/test_a.pyc"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    without_feature.copy_repository(tmp_path / "copy", tmp_path / "source")
    copied = [path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*")]
    assert sorted(copied) == [".ci", ".ci/run", "setup.py", "tests"]


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn([row.folder for row in FEATURES], 1))
def test_the_rest_is_whole_without_a_feature(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    returned = without_feature.main([name, *TESTS, "--keep", str(tmp_path / "copy")])
    assert returned == 0, capfd.readouterr().out[-3000:]


def test_features_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert without_feature.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [row.folder for row in FEATURES]
