"""Reads graphs of modules from files (``plan/io/serialize.py``), which have them as ``ModuleGraph.to_dict`` gives
them."""

from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from typing import Any

from megatron_pp.errors import FileFormatError
from megatron_pp.features.modules.graph import Module, ModuleGraph, module_graphs
from megatron_pp.features.modules.modules_plan import ModulesSpec, modules_spec
from megatron_pp.plan.ir.spec import PlanSpec

_FIELDS = ("forward_only", "variable_shapes", "release_after", "grad_sync", "device")
_MOST = 10**6  # no rank or chunk of a real job is as large


def spec_on(graph: Any, spec: PlanSpec) -> ModulesSpec:
    """``spec`` with the graph of modules from a file. Raises FileFormatError if the value of the file is not a graph,
    if the spec has other sizes than the graph, or if it has fields that plans of modules do not have. Raises PlanError
    as ``module_graphs`` does."""
    made = modules_spec(_graph(graph), spec.num_microbatches, **{name: getattr(spec, name) for name in _FIELDS})
    for name in (field.name for field in fields(PlanSpec)):
        if getattr(made, name) != getattr(spec, name):
            raise FileFormatError(
                f"the spec's {name} is {getattr(spec, name)!r}; on the graph of its modules it is "
                f"{getattr(made, name)!r}"
            )
    return made


def _graph(value: Any) -> ModuleGraph:
    modules, topology = (value.get(key) for key in ("modules", "topology")) if isinstance(value, dict) else (None, None)
    if not isinstance(modules, list) or not modules or not isinstance(topology, dict):
        raise FileFormatError("the spec's graph is no object with a list of modules and their topology")
    for name, targets in topology.items():
        if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
            raise FileFormatError(f"the topology's {name[:60]!r} must be a list of names of modules")
    graphs = module_graphs([_module(one) for one in modules], topology)
    if len(graphs) > 1:
        raise FileFormatError(f"the spec's graph is of {len(graphs)} pipelines that exchange nothing")
    return graphs[0]


def _module(value: Any) -> Module:
    if not isinstance(value, dict) or set(value) != {*Module._fields} or not _fits(value):
        raise FileFormatError(
            f"the graph's modules hold {str(value)[:60]}; each is an object with name, ranks (a list of replicas, "
            "lists of stages, lists of ranks), chunk and times (of a forward and a backward)"
        )
    ranks = tuple(tuple(map(tuple, replica)) for replica in value["ranks"])
    return Module(value["name"], ranks, value["chunk"], tuple(value["times"]))


def _fits(value: Mapping[str, Any]) -> bool:
    name = value["name"]
    times = value["times"]
    listed = [value["ranks"]]
    for _ in range(3):
        if not all(isinstance(one, list) for one in listed):
            return False
        listed = [*chain.from_iterable(listed)]
    numbers = all(type(number) is int and 0 <= number < _MOST for number in (*listed, value["chunk"]))
    timed = isinstance(times, list) and len(times) == 2 and all(type(time) in (int, float) for time in times)
    return numbers and timed and isinstance(name, str) and name.isprintable()
