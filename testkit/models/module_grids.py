"""Modules on grids of ranks in the order of Megatron's ``HyperCommGrid``: tensor-parallel ranks are neighbours, then
come the stages, then the replicas."""

from __future__ import annotations

from megatron_pp.features.modules.graph import Module, ModuleGraph, module_graphs


def module_on(name: str, offset: int = 0, *, pp: int = 1, dp: int = 1, tp: int = 1) -> Module:
    """The module on ranks from ``offset``."""

    def stage(replica: int, k: int) -> tuple[int, ...]:
        first = offset + tp * (k + pp * replica)
        return tuple(range(first, first + tp))

    return Module(name, tuple(tuple(stage(replica, k) for k in range(pp)) for replica in range(dp)))


def encoders_before(language: Module, *encoders: Module) -> list[ModuleGraph]:
    """The graphs of encoders whose outputs all go to ``language``."""
    return module_graphs([*encoders, language], {encoder.name: [language.name] for encoder in encoders})
