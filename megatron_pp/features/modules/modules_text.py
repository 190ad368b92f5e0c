"""Modules as text: ``vision=0/1; llm=2,3; vision>llm``.

``NAME=RANKS`` is a module: replicas apart by ``/``, their stages by ``,``, a stage's tensor-parallel ranks by ``+``.
``NAME#1=RANKS`` is in model chunk 1 of its ranks; a stage of ``NAME*2/4=RANKS`` takes 2 for a forward and 4 for a
backward. ``A>B`` is a bridge: the output of A goes to B.
"""

import re

from megatron_pp.errors import PlanError
from megatron_pp.features.modules.graph import Module, ModuleGraph, module_graphs

_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_MODULE = re.compile(
    r"(?P<name>\w+)(?:#(?P<chunk>\d{1,6}))?"
    rf"(?:\*(?P<forward>{_NUMBER})/(?P<backward>{_NUMBER}))?"
    r"\s*=\s*(?P<ranks>\d{1,6}(?:[+,/]\d{1,6})*)"
)
_BRIDGE = re.compile(r"(\w+)\s*>\s*(\w+)")


def graphs_in(text: str) -> list[ModuleGraph]:
    """The graphs of the modules in ``text``. Raises PlanError for what is neither a module nor a bridge, and as
    ``module_graphs``."""
    modules: list[Module] = []
    topology: dict[str, list[str]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        if bridge := _BRIDGE.fullmatch(part):
            topology.setdefault(bridge[1], []).append(bridge[2])
        elif found := _MODULE.fullmatch(part):
            made = Module(found["name"], _ranks_in(found["ranks"]), int(found["chunk"] or 0))
            if found["forward"]:
                made = made._replace(times=(float(found["forward"]), float(found["backward"])))
            modules.append(made)
        else:
            raise PlanError(f"{part!r} is neither a module, as llm=2,3, nor a bridge, as vision>llm")
    if not modules:
        raise PlanError("there is no module, as llm=2,3")
    return module_graphs(modules, topology)


def _ranks_in(text: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(
        tuple(tuple(map(int, stage.split("+"))) for stage in replica.split(",")) for replica in text.split("/")
    )
