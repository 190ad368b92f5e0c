"""Loads the installed Megatron-core and, in the same process, the Megatron-core of a source checkout.

Both packages are named `megatron`. Each is imported while the other's modules are out of `sys.modules`, so that engines
of both can take turns in one run. `--megatron-source PATH` of scripts/benchmark.py gives the checkout to this process
and to the ranks that it starts, in the environment variable SOURCE_VARIABLE.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.report import BenchmarkError
from benchmarks.work import Unavailable

SOURCE_VARIABLE = "MEGATRON_PP_BENCHMARK_MEGATRON_SOURCE"
MAIN = "megatron-main"
_CORE = "megatron.core"
_VERSION_FILE = Path("megatron", "core", "package_info.py")


@dataclass(frozen=True)
class Library:
    """One Megatron-core: its loaded modules by name."""

    modules: dict[str, ModuleType]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """In this context ``import megatron...`` gives this library, also imports within functions.

        For the installed library the context does nothing, so that ranks that are threads can use it."""
        if sys.modules.get(_CORE) is self.modules[_CORE]:
            yield
            return
        before = _take_modules()
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.modules.update(_take_modules())
            sys.modules.update(before)

    def module(self, name: str) -> Any:
        return self.modules[f"{_CORE}.{name}"]


def source() -> Path | None:
    """The checkout that the user gave, None without one. Raises BenchmarkError if it is not a checkout."""
    given = os.environ.get(SOURCE_VARIABLE)
    if not given:
        return None
    if not Path(given, _VERSION_FILE).is_file():
        raise BenchmarkError(f"{given} has no file {_VERSION_FILE}; give a checkout of Megatron-LM")
    return Path(given)


@functools.cache
def load(engine: str) -> Library:
    """The library of ``engine``: "megatron" is the installed package, "megatron-main" the checkout. Raises
    Unavailable."""
    if engine != MAIN:
        return _imported()
    folder = source()
    if folder is None:
        raise Unavailable("no checkout of Megatron-LM was given (--megatron-source)")
    from megatron_pp.tools.parity.cpu_stand_in import triton_stand_in

    before = _take_modules()
    path = list(sys.path)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        with triton_stand_in():
            return _imported()
    finally:
        _take_modules()
        sys.modules.update(before)
        sys.path[:] = path


def _imported() -> Library:
    """The library that ``import megatron`` gives now, with the modules that benchmarks need imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("pipeline_parallel.schedules", "pipeline_parallel.p2p_communication", "transformer", "enums"):
                importlib.import_module(f"{_CORE}.{name}")
    except ImportError as error:
        raise Unavailable(f"Megatron-core is not importable: {error} (pip install megatron-core)") from error
    return Library({name: sys.modules[name] for name in _module_names()})


def _take_modules() -> dict[str, ModuleType]:
    """Remove Megatron's modules from ``sys.modules`` and return them."""
    return {name: sys.modules.pop(name) for name in _module_names()}


def _module_names() -> list[str]:
    return [name for name in list(sys.modules) if name == "megatron" or name.startswith("megatron.")]


def versions() -> dict[str, str]:
    """The version of the package, and the version and commit of the checkout if there is one. Reports record them."""
    found: dict[str, str] = {}
    with contextlib.suppress(PackageNotFoundError):
        found["megatron-core"] = version("megatron-core")
    folder = source()
    if folder is not None:
        numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", (folder / _VERSION_FILE).read_text(), re.MULTILINE)
        found["Megatron-LM"] = f"{'.'.join(numbers)} at {_commit(folder)}"
    return found


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h of %cs", "--abbrev=10"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "an unknown commit"
