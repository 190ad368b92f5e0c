"""Megatron-core's pipelines of several modules (`MultiModulePipelineCommunicator`): which of them are served, and their
graph of ranks (`features/modules`). `modules_host.py` runs them.

Megatron's `BridgeCommunicator` cuts and joins tensors between unequal grids; the engine calls its functions for that.
Megatron's receiving leader broadcasts to its tensor-parallel group; here the sending leader sends to each rank of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import PlanError
from megatron_pp.features.modules.graph import Edge, Module, ModuleGraph, module_graphs
from megatron_pp.features.modules.modules_runner import cut_along
from megatron_pp.features.modules.modules_step import ModulesPipeline, unserved_setting
from megatron_pp.integrations.megatron.releases.release import Megatron

_SCHEDULE = "forward_backward_pipelining_without_interleaving"
_WHAT = "pipelines of several modules"
_OLDEST = (0, 18)  # before, `backward_step_multimodule` raises for what it receives from a stage of the same module


def reason_not_served(
    megatron: Megatron, schedule: str, arguments: Mapping[str, Any], overrides: Mapping[str, Any]
) -> str | None:
    """Why Megatron's own `schedule` runs this call, the same on all ranks; None if the engine runs it."""
    groups: Any = arguments.get(megatron.row.groups_keyword)
    communicator = arguments.get("p2p_communicator")
    model = arguments.get("model")
    config: Any = wrapped_attribute(model[0] if isinstance(model, (list, tuple)) and model else model, "config")
    if not hasattr(megatron.schedules, "backward_step_multimodule"):
        return f"{_WHAT} as this release has them"
    if megatron.row.release < _OLDEST:
        return f"{_WHAT} of megatron-core {megatron.version}, whose own backward of them fails (0.18 mends it)"
    if schedule != _SCHEDULE:
        return f"{_WHAT} in {schedule}"
    if [type(groups), type(communicator)] != list(megatron.multi_module):
        return (
            f"{_WHAT} without both a multi-module process group collection and communicator of Megatron's own classes"
        )
    settings = StepSettings.from_config(config, overrides)
    if (setting := unserved_setting(settings)) is not None:
        return f"{_WHAT} with {setting}"
    for field in ("overlap_p2p_comm", "overlap_moe_expert_parallel_comm"):
        if getattr(config, field, False):
            return f"{_WHAT} with config.{field}"
    if arguments.get("adjust_tensor_shapes_fn") is not None:
        return f"{_WHAT} with adjust_tensor_shapes_fn"
    if not config.variable_seq_lengths:
        return f"{_WHAT} without config.variable_seq_lengths"
    if groups.has_language_model() and groups.get_language_model_cp_size() > 1:
        return f"{_WHAT} with context parallelism"
    return _layout_of(communicator).unserved


@dataclass(frozen=True)
class _GridsOfModules:
    """The graph that a communicator of Megatron's is for, and why it is not served; None if it is."""

    modules: tuple[Module, ...]
    topology: tuple[tuple[str, tuple[str, ...]], ...]
    batch_dims: tuple[int, ...]  # the bridges' batch dimensions
    unserved: str | None


# Global, as process groups are: a program may make a communicator for each step.
_LAYOUTS: ObjectTable[_GridsOfModules] = ObjectTable()
_PIPELINES: dict[_GridsOfModules, ModulesPipeline] = {}


def _layout_of(communicator: Any) -> _GridsOfModules:
    found = _LAYOUTS.get(communicator)
    if found is None:
        grids = communicator.module_to_grid_map
        bridges = communicator.bridge_comms
        modules = [_module_of(name, grid) for name, grid in grids.items()]
        topology = tuple((name, tuple(targets)) for name, targets in communicator.topology.items())
        known = tuple(module for module in modules if module is not None)
        reason = _unserved_grids(communicator, modules)
        found = _LAYOUTS[communicator] = _GridsOfModules(
            known, topology, tuple(one._batch_dim for one in bridges), reason
        )
    return found


def pipeline_of(communicator: Any) -> ModulesPipeline:
    """The pipeline of a communicator. All ranks of the job make it in their first step, and keep it."""
    layout = _layout_of(communicator)
    found = _PIPELINES.get(layout)
    if found is None or found.group not in dist.distributed_c10d._world.pg_map:
        found = ModulesPipeline(layout.modules, dict(layout.topology), parts=_BridgeParts(communicator))
        if found.graph is not None and not hasattr(communicator, "is_module_pp_first_stage"):
            found.graph = with_leading_sources(found.graph)
        _PIPELINES[layout] = found
    return found


def with_leading_sources(graph: ModuleGraph) -> ModuleGraph:
    """The graph with other leading ranks, on which `config.grad_sync_func` is not called: as in Megatron-core 0.17 to
    0.19, the ranks of the first stage of a module that takes no other module's output.
    """
    targets = {name for _, names in graph.topology for name in names}
    sources = [module for module in graph.modules if module.name not in targets]
    ranks = {rank for module in sources for replica in module.ranks for rank in replica[0]}
    return dataclasses.replace(graph, leading=tuple(rank in ranks for rank in graph.members))


def _unserved_grids(communicator: Any, modules: Sequence[Module | None]) -> str | None:
    grids = communicator.module_to_grid_map
    ranks = {rank for grid in grids.values() for rank in range(grid.rank_offset, grid.rank_offset + grid.size)}
    if ranks != set(range(dist.get_world_size())):
        return f"{_WHAT} in a job with ranks outside of all modules"
    if any(module is None for module in modules):
        return f"{_WHAT} on grids with dimensions beyond tp, cp, pp and dp of more than one rank"
    found = [module for module in modules if module is not None]
    by_name = {module.name: module for module in found}
    for bridge in communicator.bridge_comms:
        source = by_name[bridge.src_module_name]
        target = by_name[bridge.dest_module_name]
        leaders = [replica[-1][-1] for replica in source.ranks], [replica[0][0] for replica in target.ranks]
        if leaders != (list(bridge.src_tp_leaders), list(bridge.dest_tp_leaders)):
            return f"{_WHAT} with bridges between other ranks than a stage's last and first"
    try:
        module_graphs(found, communicator.topology)
    except PlanError as error:
        return f"{_WHAT} of this topology ({error})"
    return None


def _module_of(name: str, grid: Any) -> Module | None:
    """The module on `grid`, a `HyperCommGrid`; None if its ranks are not replicas of a line of stages."""
    replicas = grid._gen_rank_enum([one for one in grid.dim_names if one not in ("dp", "gtp_remat")])
    lines = grid._gen_rank_enum(["pp"])
    stage_of = {rank: k for line in lines for k, rank in enumerate(line)}
    ranks = tuple(
        tuple(tuple(rank for rank in replica if stage_of[rank] == k) for k in range(len(lines[0])))
        for replica in replicas
    )
    in_lines = sorted(list(line) for replica in ranks for line in zip(*replica, strict=True))
    groups = sorted(map(list, grid._gen_rank_enum([one for one in grid.dim_names if one in ("tp", "cp")])))
    known = in_lines == sorted(map(list, lines)) and groups == sorted(list(s) for replica in ranks for s in replica)
    return Module(name, ranks) if known else None


class _BridgeParts:
    """Cuts and joins tensors by Megatron's own functions, from the bridge that an edge belongs to."""

    def __init__(self, communicator: Any) -> None:
        self.bridges = {(one.src_module_name, one.dest_module_name): one for one in communicator.bridge_comms}

    def cut(self, edge: Edge, tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = self.bridges[edge.module, edge.bridge]._split_tensor_at_batch_dim(tensor, count)
        return parts

    def joined(self, edge: Edge, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tuple(parts), dim=self.bridges[edge.module, edge.bridge]._batch_dim)

    def cut_gradient(self, edge: Edge, grad: torch.Tensor, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
        """The gradient of each part. Megatron cuts a gradient equally, which fails if the parts were unequal."""
        return cut_along(self.bridges[edge.module, edge.bridge]._batch_dim, grad, shapes)
