"""Deletes a feature from a copy of the repository, and runs the tests that do not name it. The tests of the core and of
other features must pass.

python scripts/without_feature.py --list
python scripts/without_feature.py NAME [TEST_PATH ...] [--keep DIR]

It deletes the feature's folder, its row in megatron_pp/feature_table.py, and every file that imports a deleted file,
directly or through others, such as tools and test support of the feature. It also deletes tests that name the feature.
It prints the deleted files, and exits with pytest's exit code.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_pp.feature_table import FEATURES, Row  # noqa: E402

TESTS = ("tests/unit_tests/plan", "tests/unit_tests/config", "tests/unit_tests/features", "tests/unit_tests/runtime")
PACKAGES = ("megatron_pp", "testkit", "tests", "benchmarks", "scripts", "examples")
TABLE = "megatron_pp/feature_table.py"
MADE = shutil.ignore_patterns(".venv*", ".*_cache", "__pycache__", "*.egg-info", "build", "dist", "site", "runs")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("name", nargs="?", choices=[row.folder for row in FEATURES])
    parser.add_argument("tests", nargs="*", help=f"by default {' '.join(TESTS)}")
    parser.add_argument("--list", action="store_true", help="print the features' names, and exit")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the copy in DIR, and keep it")
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(row.folder for row in FEATURES))
        return 0
    if args.name is None:
        parser.error("give the name of a feature; --list prints the names")
    row = next(row for row in FEATURES if row.folder == args.name)
    with tempfile.TemporaryDirectory() as scratch:
        copy = args.keep or Path(scratch, "copy")
        copy_repository(copy)
        left_out = delete(row, copy)
        print(f"without {row.folder}: {len(left_out)} files are left out with it", *left_out, sep="\n    ", flush=True)
        return run_tests(copy, args.tests or TESTS)


def copy_repository(target: Path, source: Path = ROOT) -> None:
    """Copy the files that git tracks or does not ignore, in their present state. A source distribution and the image of
    the Dockerfile are no repositories of git: there, copy all that no command makes.
    """
    if not (source / ".git").exists():
        shutil.copytree(source, target, ignore=MADE, dirs_exist_ok=True)
        return
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=source, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        one, copy = source / name, target / name
        if one.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(one, copy)


def delete(row: Row, copy: Path) -> list[str]:
    """Delete the feature from ``copy``. Returns the files outside of its folder that were deleted with it."""
    table = copy / TABLE
    table.write_text(without_row(table.read_text(encoding="utf-8"), row), encoding="utf-8")
    folder = f"megatron_pp/features/{row.folder}"
    shutil.rmtree(copy / folder)
    shutil.rmtree(copy / "tests/unit_tests/features" / row.folder, ignore_errors=True)
    words = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words_of(row)))})(?!\w)")
    naming = {
        path.relative_to(copy).as_posix()
        for path in sorted(copy.glob("tests/**/test_*.py"))
        if words.search(path.read_text(encoding="utf-8"))
    }
    gone = naming | importers_of([module_of(folder), *map(module_of, naming)], copy)
    for name in gone:
        (copy / name).unlink(missing_ok=True)
    return sorted(gone)


def without_row(text: str, row: Row) -> str:
    """The table without the feature's row."""
    rows = next(
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FEATURES"
    )
    assert isinstance(rows, ast.Tuple)
    call = next(one for one in rows.elts if isinstance(one, ast.Call) and ast.literal_eval(one.args[0]) == row.folder)
    lines = text.splitlines(keepends=True)
    return "".join(lines[: call.lineno - 1] + lines[call.end_lineno :])


def words_of(row: Row) -> set[str]:
    """The words by which a test names the feature: its settings, schedules, instructions and folder."""
    families = {name for listed in row.families.values() for name in listed}
    operations = {op for op in row.ops if len(op) > 1}
    return {*row.spec, *row.config, *families, *operations, f"features.{row.folder}", f'"{row.folder}"'}


def importers_of(gone: Iterable[str], copy: Path) -> set[str]:
    """The files that import the modules ``gone``, or modules in them, directly or through other files."""
    public = public_names(copy / "megatron_pp/__init__.py")
    imported = {
        path.relative_to(copy).as_posix(): {public.get(name, name) for name in imports_of(path)}
        for package in PACKAGES
        for path in sorted((copy / package).rglob("*.py"))
    }
    found: set[str] = set()
    missing = set(gone)
    while True:
        new = {
            name
            for name, modules in imported.items()
            if name not in found and any(_is_of(one, of) for one in modules for of in missing)
        }
        if not new:
            return found
        found |= new
        missing |= {module_of(name) for name in new}


def public_names(package: Path) -> dict[str, str]:
    """``megatron_pp.NAME`` -> the module that has it."""
    if not package.exists():
        return {}
    assigned = [node for node in ast.parse(package.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    exports = next(node.value for node in assigned if getattr(node.targets[0], "id", "") == "_EXPORTS")
    return {f"megatron_pp.{name}": f"megatron_pp.{module}" for name, module in ast.literal_eval(exports).items()}


def _is_of(imported: str, module: str) -> bool:
    if imported.endswith("*"):
        return module.startswith(imported[:-1])
    return imported == module or imported.startswith(f"{module}.")


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(path: Path) -> Iterator[str]:
    """The modules that a file imports when it is loaded, without those for type checkers. ``package.*`` if it imports
    modules of a package by names that it composes, as the command line does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            of = node.args[0]
            if isinstance(of, ast.JoinedStr) and isinstance(of.values[0], ast.Constant):
                yield f"{of.values[0].value}*"
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            yield from _statements(node.orelse)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _statements(node.body)


def run_tests(copy: Path, paths: Sequence[str]) -> int:
    existing = [path for path in paths if (copy / path).exists()]
    options = ["-c", "pyproject.toml", "--rootdir", ".", "-q", "-m", "not slow"]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *existing], cwd=copy, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
