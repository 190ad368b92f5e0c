"""For interpreters that a drawn test starts: after torch is imported, backwards run in a thread of autograd."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _WithTorch:
    """The loader that imports torch and changes it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = PathFinder.find_spec(name)
        load = spec.loader.exec_module

        def load_and_follow(module: ModuleType) -> None:
            load(module)
            from testkit.autograd_draw import follow

            follow()

        spec.loader.exec_module = load_and_follow
        return spec  # type: ignore[no-any-return]


sys.meta_path.insert(0, _WithTorch())
