"""Runs a script as ``python SCRIPT`` does, or a module as ``python -m MODULE`` does, within this process.

What the program raises, ``SystemExit`` among it, is raised here. Unlike ``runpy``, its ``__main__`` stays in
``sys.modules``, as threads and exit handlers that outlive its last line may pickle what it defines.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Raises OSError where there is no such file."""
    file = os.path.abspath(path)
    with io.open_code(file) as script:
        source = script.read()
    _begin(os.path.dirname(os.path.realpath(path)), [path, *arguments])
    _run(compile(source, file, "exec", dont_inherit=True), file, loader=SourceFileLoader("__main__", file))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Raises ImportError where there is no such module, or it has no code."""
    _begin(os.getcwd(), ["-m", *arguments])  # as Python has them while it looks for the module
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise ImportError(f"{name} is no module that can be run")
    sys.argv[0] = spec.origin or name
    _run(code, spec.origin, loader=spec.loader, package=spec.parent, cached=spec.cached, spec=spec)


def _begin(folder: str, argv: list[str]) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder  # what Python has put there is the folder of this command, or the current one
    sys.argv[:] = argv


def _run(
    code: CodeType,
    file: str | None,
    loader: Any,
    package: str | None = None,
    cached: str | None = None,
    spec: ModuleSpec | None = None,
) -> None:
    main = ModuleType("__main__")
    attributes = {"file": file, "loader": loader, "package": package, "cached": cached, "spec": spec}
    vars(main).update({f"__{name}__": value for name, value in attributes.items()}, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, vars(main))
