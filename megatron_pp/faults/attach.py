"""Makes the guard of a communicator when its first step begins, and keeps it as long as its transport."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.transport import Transport
from megatron_pp.common.finalizers import call_if_alive, finalize_here
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import StepSettings
from megatron_pp.faults.consistency import RECEIVES, SENDS
from megatron_pp.faults.guard import FaultGuard
from megatron_pp.faults.position.places import Source
from megatron_pp.feature_table import FEATURES, PRIVATE_SETTINGS
from megatron_pp.plan.ir.spec import PlanSpec

if TYPE_CHECKING:
    from megatron_pp.faults.position.device_events import CompletedWork

logger = logging.getLogger("megatron_pp")

# The guards of this process are the keys.
GUARDS: ObjectTable[None] = ObjectTable()

# Fields that each rank decides for itself: ranks that differ in them neither hang nor mix up messages.
PRIVATE_FIELDS = {"release_after", "grad_sync", "param_sync", "split_backward", *PRIVATE_SETTINGS}
_SHOWN_AS = {
    "pipeline_size": "pipeline size (P)",
    "num_chunks": "model chunks per rank (V)",
    "num_microbatches": "num_microbatches (M)",
    "group_size": "microbatch_group_size_per_vp_stage",
    "policy": "policy (overlap_p2p_comm, batch_p2p_comm)",
    "channels": "p2p_channels",
    "variable_shapes": "variable_seq_lengths",
    "device": "rules of the device (device_sync, timers at log level 2, cuda_graph_impl)",
    **{name: shown for row in FEATURES for name, shown in row.shown.items()},
}


@contextmanager
def guarded(
    communicator: P2PCore,
    guard: FaultGuard | None,
    source: Source,
    key: Hashable,
    describe: Callable[[], Mapping[str, str]],
    number: int | None = None,
    after: str = "",
) -> Iterator[FaultGuard | None]:
    """The context of one step of ``communicator`` under its ``guard``, which keeps time for all transfers; see
    ``FaultGuard.step``. It gives None if there is nothing to guard."""
    if guard is None:
        yield None
        return
    try:
        with guard.step(source, key, describe, number, after=after):
            communicator.transport.use_agreement(guard.agreement)
            communicator.under_guard = True
            yield guard
    except BaseException:
        communicator.forget()  # the guard has aborted the transport
        raise
    finally:
        communicator.under_guard = False


def watched(communicator: P2PCore, config: Any, what: str) -> AbstractContextManager[Any]:
    """``FaultGuard.watch`` of the communicator's guard; a context that does nothing if there is no guard."""
    guard = guard_of(communicator, StepSettings.from_config(config))
    return nullcontext() if guard is None else guard.watch(what)


def close_guard(communicator: P2PCore) -> None:
    """End the threads of the communicator's guard, if it has one."""
    if communicator.transport.guard is not None:
        communicator.transport.guard.close()


def shared_values(spec: PlanSpec) -> tuple[tuple[str, Any], ...]:
    """The fields of a plan in which all ranks of a pipeline must be equal: (name, value) of each. One rank may change
    other fields alone; its peers do not know them."""
    return tuple((name, value) for name, value in spec.values().items() if name not in PRIVATE_FIELDS)


def describe_step(spec: PlanSpec, shapes: Any, dtype: Any) -> dict[str, str]:
    """The values that the ranks of a pipeline have to agree on, by names that a user knows."""
    described = {_SHOWN_AS.get(name, name): str(value) for name, value in shared_values(spec)}
    return {**described, "pipeline_dtype": str(dtype), SENDS: str(shapes.send), RECEIVES: str(shapes.receive)}


def guard_of(communicator: P2PCore, settings: StepSettings) -> FaultGuard | None:
    """The guard of the communicator's transport, which others may share; None for one rank, or ranks without a
    store."""
    transport = communicator.transport
    if transport.size == 1 or transport.store is None:
        return None
    guard: FaultGuard | None = transport.guard
    timeouts = settings.timeouts(transport.limit)
    if guard is None:
        if settings.p2p_timeout is not None or settings.compute_timeout is not None:
            from megatron_pp.faults import group_timeout

            group_timeout.warn_if_shorter(transport, settings)
        guard = transport.guard = _make_guard(transport, timeouts.transfer)
    guard.timeout, guard.patience = timeouts
    return guard


def _abort_all_groups() -> None:
    from megatron_pp.comm import abort

    abort.abort_all_groups()


def _completed_work(device: torch.device) -> CompletedWork:
    from megatron_pp.faults.position.device_events import CompletedWork

    return CompletedWork(device)


def _make_guard(transport: Transport, timeout: float) -> FaultGuard:
    if transport.backend == "nccl":
        from megatron_pp.faults import nccl_settings

        if (text := nccl_settings.warning()) is not None:
            logger.warning(text)
    # The guard's threads must not keep the transport, nor with it the process group, alive.
    abort: weakref.WeakMethod[Callable[[], object]] = weakref.WeakMethod(transport.abort)
    kept = weakref.ref(transport)
    guard = FaultGuard(
        transport.store,
        transport.name,
        transport.rank,
        transport.size,
        timeout,
        lambda: call_if_alive(abort),
        escalate=_abort_all_groups if transport.backend else None,
        is_gone=lambda: (known := kept()) is None or known.is_gone(),
        completed=None if transport.blocks_host else _completed_work(transport.device),
        global_rank=transport.global_rank(transport.rank),
        world_size=dist.get_world_size() if dist.is_initialized() else transport.size,
        members=[transport.global_rank(rank) for rank in range(transport.size)],
    )
    GUARDS[guard] = None
    # A weak reference: after a failure the guard holds frames that hold the transport. At exit it waits for threads.
    finalize_here(transport, call_if_alive, weakref.WeakMethod(guard.close), False).atexit = False
    return guard
