"""The installed Megatron-core: its modules, its row in the table of releases, and calls that differ by release."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Any

import torch

from megatron_pp.config.settings import LOCAL_GRAPHS
from megatron_pp.errors import ScheduleInputError, UnknownMegatronError
from megatron_pp.integrations.megatron.releases import sources, versions


@dataclass(frozen=True)
class Megatron:
    """The installed Megatron-core.

    version        as Megatron prints it
    row            its row of the table
    multi_module   the classes of pipelines of several modules
    unknown_reads  names that its schedules use and this package does not know, as a sentence; None if there are none
    changed        a sentence with its functions that no known release has; None if there are none
    known_steps    the code of its functions for a microbatch; empty if one of them is not known
    """

    version: str
    row: versions.Row
    schedules: ModuleType
    parallel_state: ModuleType
    multi_module: tuple[type, ...] = ()
    unknown_reads: str | None = None
    changed: str | None = None
    known_steps: Mapping[str, CodeType] = field(default_factory=dict)

    def has_known_steps(self) -> bool:
        """Whether all functions for a microbatch are known, and the program has replaced none of them."""
        known, schedules = self.known_steps, self.schedules
        return bool(known) and all(
            getattr(getattr(schedules, name, None), "__code__", None) is code for name, code in known.items()
        )

    def require_initialised(self) -> None:
        """Raises ScheduleInputError unless the process groups of a pipeline exist."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise ScheduleInputError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group, then "
                "megatron.core.parallel_state.initialize_model_parallel, before get_forward_backward_func()"
            )
        if not self.parallel_state.model_parallel_is_initialized():
            raise ScheduleInputError(
                "megatron.core.parallel_state is not initialised; call parallel_state.initialize_model_parallel("
                "pipeline_model_parallel_size=...) before get_forward_backward_func()"
            )

    def default_groups(self) -> Any:
        """The process groups of `parallel_state`, in the default collection of this release."""
        build = getattr(self.schedules, "_build_default_pg_collection", None)
        return build() if build is not None else self._collect_groups()

    def _collect_groups(self) -> Any:
        state = self.parallel_state
        config = importlib.import_module("megatron.core.process_groups_config")
        early = self.row.groups_keyword == "grad_finalize_pgs"
        groups = config.GradFinalizeProcessGroups() if early else config.ProcessGroupCollection()
        groups.tp = state.get_tensor_model_parallel_group()
        groups.cp = state.get_context_parallel_group()
        groups.pp = state.get_pipeline_model_parallel_group()
        groups.embd = state.get_embedding_group(check_initialized=False)
        groups.pos_embd = state.get_position_embedding_group(check_initialized=False)
        groups.dp_cp = state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
        if self.row.joint_group:
            groups.tp_dp_cp = state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return groups

    def current_iteration(self) -> int | None:
        """The current iteration of `megatron.training`; None in other programs, or a release without it."""
        loop = sys.modules.get("megatron.training.global_vars")
        iteration = getattr(getattr(loop, "_GLOBAL_ARGS", None), "curr_iteration", None)
        return iteration if type(iteration) is int else None

    def create_graphs(self, config: Any) -> None:
        """Let Megatron capture the CUDA graphs of its layers, as its schedules do at their end."""
        if self.captures_layers(config):
            self.schedules.create_cudagraphs()

    def captures_layers(self, config: Any) -> bool:
        """Whether Megatron itself captures layers, in the order of their first step."""
        return getattr(config, self.row.graphs_field, None) in (True, LOCAL_GRAPHS)


def load_megatron() -> Megatron:
    """Import Megatron-core and compare the signatures of its schedules with the table. Modules that the program has
    removed and imported anew are read anew.

    Raises UnknownMegatronError if it is missing, older than the table, or has a signature that is not in the table.
    """
    try:
        core = importlib.import_module("megatron.core")
        schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    except ImportError as error:
        raise UnknownMegatronError(
            f"megatron-core cannot be imported ({error}); install it: pip install 'megatron-core>=0.14'"
        ) from error
    state, classes = importlib.import_module("megatron.core.parallel_state"), tuple(importable(_MULTI_MODULE))
    with _READING:  # after the imports: one may wait for a thread
        return _described(schedules, state, core.__version__, classes)


# Held by the thread that reads Megatron's sources. Two threads that parse at the same time may raise a SystemError, and
# what one keeps of Megatron's functions while it reads would be reported by the other as the program's.
_READING = threading.Lock()


@lru_cache(maxsize=1)
def _described(schedules: ModuleType, state: ModuleType, version: str, classes: tuple[type, ...]) -> Megatron:
    row, functions = versions.row_of(version), sources.functions_of(schedules)
    changed = unknown = None
    if not functions.are_of(row):
        from megatron_pp.integrations.megatron.releases import differences, reads

        differences.check_signatures(schedules, row, version)
        changed = differences.sentence(functions.changed, version)
        if not functions.known.keys() >= {*versions.ENTRIES, versions.COMMUNICATOR}:
            unknown = reads.unknown_reads(schedules, versions.release_of(version), version)
    steps = sources.known_steps(schedules, functions)
    return Megatron(version, row, schedules, state, classes, unknown, changed, steps)


# Classes of pipelines of several modules; not all releases have them.
_MULTI_MODULE = (
    ("megatron.core.process_groups_config", "MultiModuleProcessGroupCollection"),
    ("megatron.core.pipeline_parallel.multimodule_communicator", "MultiModulePipelineCommunicator"),
)


def importable(classes: Sequence[tuple[str, str]]) -> list[type]:
    """Those of ``classes``, given by module and name, that the installed release has."""
    found = []
    for module, name in classes:
        with contextlib.suppress(ImportError, AttributeError):
            found.append(getattr(importlib.import_module(module), name))
    return found
