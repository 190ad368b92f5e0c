"""The communicator of a pipeline group, kept from step to step.

Megatron makes a communicator for each call of a schedule. Ours owns NCCL communicators for its one-way channels, which
are expensive to make. So one is kept for each group and config until the group is destroyed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from megatron_pp.comm.backends import group_transport
from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.transport import Transport
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import CommunicatorClosedError
from megatron_pp.faults.attach import close_guard

# The fields of a config that a communicator is built from.
_built_from = attrgetter(
    *("pipeline_dtype", "shapes_vary", "policy", "batch_p2p_sync", "p2p_channels", "p2p_max_ctas", "p2p_timeout"),
    "p2p_debug",
)
_PLAIN = (bool, int, float, str, torch.dtype)
_of_transport = attrgetter("p2p_channels", "p2p_max_ctas")  # communicators with the same values share a transport

# Global, as process groups are. A communicator holds its group, so weak keys alone would keep a destroyed group alive.
KEPT: ObjectTable[dict[tuple[Any, ...], P2PCore]] = ObjectTable()
# Communicators of the process that this one was forked from. They are kept and never used: the destructor of gloo's
# process groups waits for threads that a forked process does not have.
_OF_PARENT: list[dict[tuple[Any, ...], P2PCore]] = []
os.register_at_fork(after_in_child=lambda: _OF_PARENT.extend(KEPT.emptied()))
# Each thread may run a pipeline. The lock is not held while a communicator is made, because that may wait for other
# ranks, whose threads may make theirs in another order.
_LOCK = threading.Lock()


def communicator_for(pp_group: Any, config: Any) -> P2PCore:
    """The communicator of ``pp_group`` for the communication fields of ``config``. The first call makes it, which on
    NCCL is collective. Several threads may call this at the same time, each for its own group."""
    _close(lambda transport: transport.is_gone())
    with _LOCK:
        kept = KEPT.setdefault(pp_group, {})
    settings = StepSettings.from_config(config)
    key = _built_from(settings)
    found = kept.get(key)
    for closed in [c for c in kept.values() if c.closed]:
        if closed.transport.guard is not None:
            closed.transport.guard.raise_unreported()
        raise CommunicatorClosedError(
            "the pipeline's process group was aborted after a failure; to continue, call "
            "torch.distributed.destroy_process_group and make the groups anew"
        )
    if found is None:
        same = (c.transport for c in kept.values() if _of_transport(c.settings) == _of_transport(settings))
        transport = next(same, None)
        if transport is None:
            transport = group_transport(pp_group, settings.one_way, settings.warm_up_p2p, settings.p2p_max_ctas)
        values: Any = settings  # not the config, whose functions hold the model and the optimizer
        plain = values._make(value if isinstance(value, _PLAIN) else None for value in values)
        found = kept[key] = P2PCore(transport, plain, pp_group)
    return found


def close_communicators() -> None:
    """End the threads of all communicators, and forget them. For the end of a program, or before process groups are
    destroyed."""
    _close(lambda transport: True)


def _close(unneeded: Callable[[Transport], bool]) -> None:
    """Close and forget the communicators of every group with an ``unneeded`` transport."""
    with _LOCK:
        groups = [group for group, kept in KEPT.items() if any(unneeded(c.transport) for c in list(kept.values()))]
        closing = [communicator for group in groups for communicator in KEPT.pop(group).values()]
    for communicator in closing:
        close_guard(communicator)
        communicator.transport.close()
