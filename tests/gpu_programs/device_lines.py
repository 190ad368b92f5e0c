"""Which lines of the project run only on a GPU or over NCCL, found in its syntax, and which of them a program runs.

A line belongs to the device if it

* names CUDA, NCCL or NVTX (strings and attributes count; docstrings, imports and annotations do not);
* stands in the branch of a condition on the device (``backend == "nccl"``, ``is_cuda``, ``on_gpu``, ...), also after an
  ``if`` for other devices that returns;
* stands in a function or class that is named after the device, or that calls ``torch.cuda`` whatever comes;
* is in ``scripts/gpu_day``, the programs for a first day on GPUs.

Lines outside functions do not: they run wherever a module is imported. Nor does a branch that only other devices reach.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import re
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("megatron_pp", "scripts", "examples", "benchmarks")
_ON_THE_FIRST_DAY = ROOT / "scripts" / "gpu_day"  # nothing of it runs for the first time on a GPU
# Code that replaces a device on machines without one.
_PARITY = ROOT / "megatron_pp" / "tools" / "parity"
_CHECK = ROOT / "megatron_pp" / "tools" / "check"  # checks jobs on machines without a GPU
_STAND_INS = (_PARITY / "cpu_stand_in.py", _PARITY / "cpu" / "cpu_collectives.py", _CHECK)

_DEVICE = re.compile(r"cuda(?![_ ]?graph)|nccl|nvtx", re.IGNORECASE)  # Megatron's options of CUDA graphs need no device
_CONDITION = re.compile(rf"{_DEVICE.pattern}|\b(on|has)_gpus?\b", re.IGNORECASE)
_QUESTIONS = {"is_available", "device_count"}  # these also have an answer without a device
# The seam there, and code that has its own tests.
_ELSEWHERE = (_ON_THE_FIRST_DAY / "outside.py", _ON_THE_FIRST_DAY / "runner.py")
NOT_MEASURED = (*_STAND_INS, *_ELSEWHERE)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_MARK = "_device_line_runs"
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def project_files() -> list[Path]:
    return [
        path
        for folder in _FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(map(path.is_relative_to, _STAND_INS)) and device_lines(path)
    ]


@functools.cache
def device_lines(path: Path) -> dict[int, int]:
    """Return for each statement of the device its first line and its last one; for compound statements, of the head."""
    found: dict[int, int] = {}
    on_device = True if path.is_relative_to(_ON_THE_FIRST_DAY) and path not in _ELSEWHERE else None
    _Finder(found).functions(ast.parse(path.read_text()).body, on_device)
    return found


class _Finder:
    """Finds statements of the device. ``on_device``: only the device reaches a block (True), only others do (False), or
    both (None)."""

    def __init__(self, found: dict[int, int]) -> None:
        self.found = found

    def block(self, body: Sequence[ast.stmt], on_device: bool | None) -> None:
        for statement in body:
            self._statement(statement, on_device)
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVES):
                on_device = _or_else(_sides(statement.test)[1], on_device)

    def functions(self, body: Sequence[ast.stmt], on_device: bool | None) -> None:
        """Look at functions and classes of a module or class; other statements there run wherever it is imported."""
        for statement in body:
            if isinstance(statement, (*_Function, ast.ClassDef)):
                self._statement(statement, on_device)

    def _statement(self, statement: ast.stmt, on_device: bool | None) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Pass)) or _is_docstring(statement):
            return
        if isinstance(statement, (*_Function, ast.ClassDef)):
            named = True if _DEVICE.search(statement.name) else on_device
            if isinstance(statement, ast.ClassDef):
                self.functions(statement.body, named)
            else:
                self.block(statement.body, True if any(map(_calls_device, statement.body)) else named)
            return
        if on_device or (on_device is None and _names_device(statement)):
            self.found[statement.lineno] = _end_of_head(statement)
        then, otherwise = _sides(statement.test) if isinstance(statement, ast.If) else (None, None)
        self.block(getattr(statement, "body", []), _or_else(then, on_device))
        self.block(getattr(statement, "orelse", []), _or_else(otherwise, on_device))
        self.block(getattr(statement, "finalbody", []), on_device)
        for handler in getattr(statement, "handlers", []):
            self.block(handler.body, on_device)


def _or_else(known: bool | None, before: bool | None) -> bool | None:
    return before if known is None else known


def _sides(test: ast.expr) -> tuple[bool | None, bool | None]:
    """Return for each branch of a condition who reaches it: only the device (True), only others (False), both
    (None)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        then, otherwise = _sides(test.operand)
        return otherwise, then
    if isinstance(test, ast.BoolOp):
        thens, others = (list(sides) for sides in zip(*map(_sides, test.values), strict=True))
        # `a and b` is true only if every part is true; `a or b` is false only if every part is false.
        return (_any(thens), _all(others)) if isinstance(test.op, ast.And) else (_all(thens), _any(others))
    code = ast.unparse(test)
    if not _CONDITION.search(code) or "device_count" in code:
        return None, None
    is_other = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.NotEq, ast.IsNot))
    return not is_other, is_other


def _any(sides: list[bool | None]) -> bool | None:
    return False if False in sides else (True if True in sides else None)


def _all(sides: list[bool | None]) -> bool | None:
    return sides[0] if len(set(sides)) == 1 else None


def _names_device(statement: ast.stmt) -> bool:
    return _DEVICE.search(ast.unparse(_head(statement))) is not None


def _calls_device(statement: ast.stmt) -> bool:
    """Return whether the head of a function's statement calls ``torch.cuda`` whatever the device is."""
    if isinstance(statement, (*_Function, ast.ClassDef, ast.If)):
        return False
    return any(_is_device_call(node) for node in _unconditional(_head(statement)))


def _unconditional(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.IfExp, ast.BoolOp, ast.Lambda)):
            yield from _unconditional(child)


def _is_device_call(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return ast.unparse(node.func).startswith("torch.cuda.") and node.func.attr not in _QUESTIONS


def _head(statement: ast.stmt) -> ast.AST:
    """Return the statement without its blocks."""
    for name in ("test", "iter", "subject"):
        if hasattr(statement, "body") and hasattr(statement, name):
            return getattr(statement, name)  # type: ignore[no-any-return]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return ast.Tuple([item.context_expr for item in statement.items], ast.Load())
    if isinstance(statement, ast.AnnAssign):
        return statement.value or ast.Pass()
    return ast.Pass() if isinstance(statement, ast.Try) else statement


def _end_of_head(statement: ast.stmt) -> int:
    body = getattr(statement, "body", None)
    return statement.end_lineno or statement.lineno if not body else max(statement.lineno, body[0].lineno - 1)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class LineLog:
    """Records which of the device's statements in some files run. Their modules must be imported while ``marking``,
    which compiles them so that they record each of these statements when it runs, in any thread.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.ran: dict[str, set[int]] = {str(path): set() for path in files}

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Mark modules that are imported in this context. Raises RuntimeError if one of them was imported before."""
        before = {name for name, module in sys.modules.items() if getattr(module, "__file__", None) in self.ran}
        if before:
            raise RuntimeError(f"imported before, so not marked: {sorted(before)}")
        finder = _MarkingFinder(self.ran)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)

    def missing(self, path: Path) -> list[int]:
        """Return the first lines of the device's statements in ``path`` that did not run."""
        return sorted(device_lines(path).keys() - self.ran[str(path)])


class _MarkingFinder(MetaPathFinder):
    def __init__(self, ran: dict[str, set[int]]) -> None:
        self.ran = ran

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin in self.ran:
            spec.loader = _MarkingLoader(fullname, spec.origin, self.ran[spec.origin])
            return spec
        return None


class _MarkingLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, ran: set[int]) -> None:
        super().__init__(fullname, path)
        self.ran = ran

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        tree = _Marks(device_lines(path)).visit(ast.parse(path.read_text()))
        return compile(tree, self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_MARK] = self.ran.add
        super().exec_module(module)


class _Marks(ast.NodeTransformer):
    """Puts a call that records its line before each statement that begins in ``lines``."""

    def __init__(self, lines: Container[int]) -> None:
        self.lines = lines

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [one for statement in block for one in self._marked(statement)])
        return node

    def _marked(self, statement: ast.stmt) -> list[ast.stmt]:
        if statement.lineno not in self.lines or isinstance(statement, (*_Function, ast.ClassDef)):
            return [statement]
        return [*ast.parse(f"{_MARK}({statement.lineno})").body, statement]


def lines_that_run(
    rank: int, size: int, folder: Path, programs: Sequence[str], files: Sequence[Path]
) -> dict[str, set[int]]:
    """Run all ``SCENARIOS`` of the module ``programs[rank]``, each in its own folder, and return ``LineLog.ran`` of
    ``files``. The process must not have imported the modules that they import.
    """
    log = LineLog(files)
    with log.marking():
        for scenario in importlib.import_module(programs[rank]).SCENARIOS:
            gc.freeze()  # scenarios collect garbage; they need not look through the objects of libraries
            own = folder / scenario.__name__
            own.mkdir()
            scenario(own)
    return log.ran
