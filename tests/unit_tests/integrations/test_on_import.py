"""What happens at the end of an import: when all modules have run, wherever they come from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from unittest import mock

import pytest

from megatron_pp.integrations.on_import import WhenImported

NAMES = ("imported_library", "imported_library.part")


@pytest.fixture(autouse=True)
def library(tmp_path: Path) -> Iterator[Path]:
    """A package whose part is imported while the package itself is not complete."""
    folder = tmp_path / "imported_library"
    folder.mkdir()
    (folder / "__init__.py").write_text("import imported_library.part\nversion = 3\n")
    (folder / "part.py").write_text("from imported_library import part as itself\n")
    with (
        mock.patch.dict(sys.modules),
        mock.patch.object(sys, "path", [str(tmp_path), *sys.path]),
        mock.patch.object(sys, "meta_path", list(sys.meta_path)),
    ):
        importlib.invalidate_caches()
        yield folder


class Calls:
    """Notes what the package was like at each call."""

    def __init__(self, error: Exception | None = None) -> None:
        self.versions: list[int] = []
        self.error = error

    def __call__(self) -> None:
        self.versions.append(sys.modules["imported_library"].version)
        if self.error is not None:
            raise self.error


def test_the_import_hook_runs_once_when_all_modules_are_imported() -> None:
    calls = Calls()
    WhenImported(NAMES, calls)
    assert calls.versions == []
    importlib.import_module("imported_library")
    assert calls.versions == [3]
    importlib.import_module("imported_library.part")
    assert calls.versions == [3]


def test_the_import_hook_runs_again_if_modules_are_removed_and_imported_anew(library: Path) -> None:
    """Or reloaded; where another observer waits for the same ones too."""
    calls, others = Calls(), Calls()
    WhenImported(NAMES, calls)
    WhenImported(NAMES[:1], others)
    importlib.import_module("imported_library")
    for name in NAMES:
        del sys.modules[name]
    (library / "__init__.py").write_text("version = 4444\n")
    importlib.invalidate_caches()
    importlib.import_module("imported_library")
    assert (calls.versions, others.versions) == ([3, 4444], [3, 4444])
    importlib.reload(sys.modules["imported_library"])
    assert others.versions == [3, 4444, 4444]


def test_modules_keep_their_own_loaders(library: Path) -> None:
    WhenImported(NAMES, Calls())
    for name in NAMES:
        module = importlib.import_module(name)
        assert type(module.__loader__) is SourceFileLoader
        assert module.__spec__ is not None
        assert module.__spec__.loader is module.__loader__
        assert module.__loader__.get_source(name) == Path(str(module.__file__)).read_text()


def test_the_import_hook_runs_immediately_if_the_modules_are_imported() -> None:
    importlib.import_module("imported_library")
    calls = Calls()
    WhenImported(NAMES, calls)
    assert calls.versions == [3]


def test_the_import_hook_waits_if_an_import_fails(library: Path) -> None:
    calls = Calls()
    WhenImported(NAMES, calls)
    (library / "__init__.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("imported_library")
    assert calls.versions == []
    (library / "__init__.py").write_text("version = 4444")
    importlib.invalidate_caches()
    importlib.import_module("imported_library.part")
    assert calls.versions == [4444]


def test_an_error_of_the_import_hook_is_raised_by_the_import() -> None:
    WhenImported(NAMES, Calls(LookupError("not today")))
    with pytest.raises(LookupError, match="not today"):
        importlib.import_module("imported_library")


def test_a_missing_module_raises_the_usual_import_error() -> None:
    WhenImported(["imported_library.other"], Calls())
    with pytest.raises(ModuleNotFoundError, match=r"imported_library\.other"):
        importlib.import_module("imported_library.other")
