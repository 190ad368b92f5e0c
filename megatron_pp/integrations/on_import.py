"""`install()` for a program that is about to start: once it has itself imported Megatron-core, from wherever."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from megatron_pp.integrations.megatron_core import install_with, take_models
from megatron_pp.integrations.settings import InstallSettings

_MODEL = ("megatron.core.models.gpt.gpt_model",)
_MODULES = ("megatron.core", "megatron.core.pipeline_parallel.schedules")


def install_on_import(settings: InstallSettings) -> None:
    """`install()` with these settings, when the program has imported Megatron's schedules; now, if it has already.

    What `install()` raises is raised by that import.
    """
    WhenImported(_MODULES, partial(install_with, settings))
    WhenImported(_MODEL, take_models)  # it may import the schedules itself, and be incomplete then


class WhenImported(MetaPathFinder):
    """Calls ``then`` once, when all ``modules`` (full names) have run to their end; now, if they have already."""

    def __init__(self, modules: Iterable[str], then: Callable[[], None]) -> None:
        self.missing = {name for name in modules if name not in sys.modules}
        self.then = then
        if self.missing:
            sys.meta_path.insert(0, self)
        else:
            then()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that reports the end of the import."""
        if fullname not in self.missing:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ReportingLoader(spec.loader, self)
        return spec

    def imported(self, name: str) -> None:
        """The module of this name has run to its end."""
        self.missing.discard(name)
        if not self.missing and self in sys.meta_path:
            sys.meta_path.remove(self)
            self.then()


class _ReportingLoader(Loader):
    """Loads as ``loader`` does, and leaves that one behind as the module's."""

    def __init__(self, loader: Loader, observer: WhenImported) -> None:
        self.loader = loader
        self.observer = observer

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.observer.imported(module.__name__)
