"""Runs Megatron's checks so that each failed check is recorded instead of raised. One run then finds all of them.

`collect_refusals()` is called before Megatron is imported. It changes how Megatron's modules with checks are compiled.
Only the functions that check are changed, in three ways:

| Megatron writes      | becomes                                                                             |
| -------------------- | ----------------------------------------------------------------------------------- |
| ``assert test, text``| ``if not test: record(text)``                                                       |
| ``raise Error(text)``| ``record(text)``                                                                    |
| any other statement  | the same statement; its exception is recorded, and the next statement runs          |

A statement that raises after the first refusal may raise because of this refusal. Its error is recorded as a
consequence.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

MODULES = (
    "megatron.training.arguments",
    "megatron.training.yaml_arguments",
    "megatron.core.transformer.transformer_config",
    "megatron.core.model_parallel_config",
    "megatron.core.num_microbatches_calculator",
)
_CHECKS = ("validate", "_validate", "_check", "__post_init__", "core_transformer_config_from_args", "_init_")
"""The names of the functions that check begin with one of these."""
_RECORD = "__megatron_pp_record__"
_FAILED = "__megatron_pp_failed__"
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)


@dataclass(frozen=True)
class Refusal:
    """One refusal by a check of Megatron.

    text       Megatron's text; "" if it has none
    condition  the condition that must hold, as Python code
    settings   the settings that the condition reads
    place      file and line of the check
    """

    text: str
    condition: str
    settings: tuple[str, ...]
    place: str


@dataclass
class Refusals:
    """All refusals of a run. ``failed`` has other errors before the first refusal; ``consequences`` has errors after
    it, which the refusal may have caused."""

    found: list[Refusal] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    consequences: list[str] = field(default_factory=list)

    def record(self, text: object, condition: str, settings: tuple[str, ...], place: str) -> None:
        one = Refusal(str(text), condition, settings, place)
        if all((one.text, one.condition) != (other.text, other.condition) for other in self.found):
            self.found.append(one)

    def fail(self, error: BaseException, settings: tuple[str, ...], place: str) -> None:
        if isinstance(error, (AssertionError, ValueError, RuntimeError, NotImplementedError)) and str(error):
            self.record(error, "", settings, place)
            return
        text = f"{type(error).__name__}: {error} ({place})"
        kept = self.consequences if self.found else self.failed
        if text not in kept:
            kept.append(text)


def collect_refusals() -> Refusals:
    """Makes Megatron's checks record their refusals in the returned object. Megatron must not be imported yet."""
    found = Refusals()
    sys.meta_path.insert(0, _Finder(found))
    return found


class _Finder:
    def __init__(self, found: Refusals) -> None:
        self.found = found

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin, self.found)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, found: Refusals) -> None:
        super().__init__(name, path)
        self.found = found

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the changed source. It neither reads nor writes a file of compiled code."""
        tree = ast.parse(self.get_data(self.path), self.path)
        changed = ast.fix_missing_locations(_Checks(self.path).visit(tree))
        return compile(changed, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_RECORD], vars(module)[_FAILED] = self.found.record, self.found.fail
        super().exec_module(module)


class _Checks(ast.NodeTransformer):
    """Changes the functions that check, as the table above says."""

    def __init__(self, path: str) -> None:
        self.path = path

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name.startswith(_CHECKS):
            node.body = [self._changed(statement, node.body) for statement in node.body]
        return node

    def _changed(self, node: ast.stmt, beside: Sequence[ast.stmt]) -> ast.stmt:
        if isinstance(node, ast.Assert):
            refused = self._recorded(node.msg or ast.Constant(""), node.test, node)
            node = ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), node.test), [refused], []), node)
            return self._guarded(node)
        if isinstance(node, ast.Raise) and node.exc is not None:
            return self._guarded(self._recorded(_text_of(node.exc), None, node))
        if isinstance(node, _SIMPLE):
            return self._guarded(node)
        settings = settings_of(node.test) if isinstance(node, ast.If) else ()
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list) and not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.With, ast.Try)):
                changed = [self._changed(one, inner) for one in inner]
                if name == "body" and isinstance(node, ast.If):
                    changed = [_with_settings(one, node.test, settings) for one in changed]
                setattr(node, name, changed)
        return self._guarded(node) if isinstance(node, (ast.If, ast.For)) else node

    def _recorded(self, text: ast.expr, test: ast.expr | None, node: ast.stmt) -> ast.stmt:
        condition = "" if test is None else ast.unparse(test)
        settings = settings_of(test) if test is not None else settings_of(text)
        return _call(_RECORD, [text, *self._about(condition, settings, node)], node)

    def _guarded(self, node: ast.stmt) -> ast.stmt:
        """The statement in a try that records its exception. SystemExit is not caught."""
        failed = _call(_FAILED, [ast.Name("error", ast.Load()), *self._about(None, settings_of(node), node)], node)
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "error", [failed])
        return ast.copy_location(ast.Try([node], [handler], [], []), node)

    def _about(self, condition: str | None, settings: tuple[str, ...], node: ast.stmt) -> list[ast.expr]:
        names = ast.Tuple([ast.Constant(name) for name in settings], ast.Load())
        place = ast.Constant(f"{self.path}:{node.lineno}")
        return [*([] if condition is None else [ast.Constant(condition)]), names, place]


def _call(name: str, arguments: list[ast.expr], node: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Expr(ast.Call(ast.Name(name, ast.Load()), arguments, [])), node)


def _text_of(error: ast.expr) -> ast.expr:
    """The expression of the text of an exception that is raised."""
    return error.args[0] if isinstance(error, ast.Call) and error.args else error


def _with_settings(node: ast.stmt, test: ast.expr, settings: tuple[str, ...]) -> ast.stmt:
    """Gives an error that is raised under a condition the settings that the condition reads."""
    for one in ast.walk(node):
        if not (isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == _RECORD):
            continue
        condition = one.args[1]
        names = one.args[2]
        if isinstance(condition, ast.Constant) and not condition.value and isinstance(names, ast.Tuple):
            condition.value = f"not ({ast.unparse(test)})"
            known = [each.value for each in names.elts if isinstance(each, ast.Constant)]
            names.elts += [ast.Constant(name) for name in settings if name not in known]
    return node


def settings_of(node: ast.AST) -> tuple[str, ...]:
    """The names that a piece of Megatron's code reads: attributes of ``args`` and of a config, and local names."""
    found = []
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id in ("args", "self"):
            found.append(one.attr)
        elif isinstance(one, ast.Name):
            found.append(one.id)
    return tuple(dict.fromkeys(found))
