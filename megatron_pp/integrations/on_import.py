"""Calls `install()` for a program that is about to start, as soon as the program has imported Megatron-core."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from megatron_pp.integrations.megatron.given import InstallSettings
from megatron_pp.integrations.megatron.releases.release import importable
from megatron_pp.integrations.megatron.stand_ins import current
from megatron_pp.integrations.megatron.steps.gpt_models import MODELS, place_models
from megatron_pp.integrations.megatron_core import install_with

_MODULES = ("megatron.core", "megatron.core.pipeline_parallel.schedules")


def install_on_import(settings: InstallSettings) -> None:
    """Call `install()` with these settings as soon as the program has imported Megatron's schedules, which may be now,
    and again each time that it has removed them and imports them anew.

    What `install()` raises is raised by that import.
    """
    WhenImported(_MODULES, partial(install_with, settings))
    for model, _ in MODELS:
        WhenImported((model,), take_models)  # it may import the schedules itself, and be incomplete then


def take_models() -> None:
    """Let Megatron's models be built for V schedules, if the engine is installed."""
    plugin = current()
    if plugin is not None:
        place_models(plugin.settings.overrides.get("pipeline_schedule"), importable(MODELS))


class WhenImported(MetaPathFinder):
    """Calls ``then`` as soon as all ``modules`` (full names) have run to their end, which may be now, and each time
    that some of them were removed and have been imported anew."""

    def __init__(self, modules: Iterable[str], then: Callable[[], None]) -> None:
        self.modules = frozenset(modules)
        self.missing = {name for name in self.modules if name not in sys.modules}
        self.then = then
        sys.meta_path.insert(0, self)
        if not self.missing:
            then()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the finders behind this one find, with a loader that reports the end of the import."""
        if fullname not in self.modules:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self.missing.add(fullname)
            spec.loader = _ReportingLoader(spec.loader, self)
        return spec

    def imported(self, name: str) -> None:
        """Called when the module of this name has run to its end."""
        self.missing.discard(name)
        if not self.missing:
            self.then()


class _ReportingLoader(Loader):
    """Loads as ``loader`` does. Afterwards the module has ``loader`` as its loader."""

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
