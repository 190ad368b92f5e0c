"""The communicator of a pipeline group, kept from step to step.

Megatron makes a communicator per call of a schedule. Ours owns NCCL communicators for its one-way channels, so one is
made per group and config and found again; it goes when the group does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.comm.transport import SoloTransport
from megatron_pp.errors import CommunicatorClosedError
from megatron_pp.faults.attach import close_guard

_FIELDS = (
    "pipeline_dtype",
    "variable_seq_lengths",
    "mtp_standalone",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "p2p_channels",
    "p2p_timeout",
    "p2p_debug",
    "virtual_pipeline_model_parallel_size",
    "pipeline_schedule",
)

# Process groups are process-wide, and so is what hangs on them. A communicator holds its group, so that weak keys
# alone would not let go of a destroyed one.
_KEPT: WeakKeyDictionary[Any, dict[tuple[Any, ...], P2PCommunicator]] = WeakKeyDictionary()
# Threads may run a pipeline each. Never held while a communicator is made: that may wait for other ranks, whose threads
# come in another order.
_LOCK = threading.Lock()


def communicator_for(pp_group: Any, config: Any) -> P2PCommunicator:
    """The communicator of ``pp_group`` for the communication fields of ``config``; made on first use, which on NCCL is
    collective. Threads may call it at once, each for a group of its own."""
    _forget_destroyed_groups()
    with _LOCK:
        kept = _KEPT.setdefault(pp_group, {})
    key = tuple(getattr(config, field, None) for field in _FIELDS)
    found = kept.get(key)
    if any(c.closed for c in kept.values()):
        raise CommunicatorClosedError(
            "the pipeline's process group was aborted after a failure; to go on, call "
            "torch.distributed.destroy_process_group "
            "and make the groups anew"
        )
    if found is None:
        transport = next((c.transport for c in kept.values() if _same_channels(c.config, config)), None)
        found = kept[key] = P2PCommunicator(pp_group, config, transport)
    found.config = config  # timers and the like may have changed; what the communicator was built from has not
    return found


def close_communicators() -> None:
    """End the threads of all communicators, and forget them. For the end of a program, or before process groups are
    destroyed."""
    with _LOCK:
        all_kept = list(_KEPT.values())
        _KEPT.clear()
    for kept in all_kept:
        _close(kept.values())


def _forget_destroyed_groups() -> None:
    with _LOCK:
        gone = [group for group, kept in _KEPT.items() if any(c.group_is_gone() for c in list(kept.values()))]
        forgotten = [_KEPT.pop(group) for group in gone]
    for kept in forgotten:
        _close(kept.values())


def _close(communicators: Iterable[P2PCommunicator]) -> None:
    for communicator in communicators:
        close_guard(communicator)
        close = getattr(communicator.transport, "close", None)
        if close is not None:
            close()


def _same_channels(one: Any, other: Any) -> bool:
    return getattr(one, "p2p_channels", "one_way") == getattr(other, "p2p_channels", "one_way")


def lone_communicator(config: Any, model: torch.nn.Module) -> P2PCommunicator:
    """For a pipeline of one rank without any process group."""
    parameter = next(iter(model.parameters()), None)
    return P2PCommunicator(None, config, SoloTransport(torch.device("cpu") if parameter is None else parameter.device))
