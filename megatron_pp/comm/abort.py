"""Makes operations of a process group fail that block, or would later block, another thread of this process.

Measured on torch 2.13, two processes, one thread inside ``work.wait()`` without a timeout:

gloo: ``ProcessGroup.abort`` and ``shutdown`` have no effect, and ``Work.abort`` exists in C++ only. But a wait that
times out closes all connections of the group. That wakes every waiting thread ("Application timeout caused pair
closure" on this rank, "Connection closed by peer" on its peers). So the abort is a receive that no peer answers, with a
timeout of 1 ms. It takes 3 to 13 ms; ``destroy_process_group`` and ``init_process_group`` work afterwards.

gloo does not wake a transfer that is half on the wire, nor a send that was written to a connection which the peer had
just reset; not even when the peer dies. It wakes queued operations only: ``Pair::signalException``
(gloo/transport/tcp/pair.cc) skips operations that wait for the socket. ``gloo/waiting_threads.py`` deals with these.

NCCL: ``ProcessGroup.abort`` (``ncclCommAbort``) ends the kernels. The synchronisation of the stream returns without an
error, and streams go on without the data. The communicator refuses further calls. So the guard looks for a failure when
the step ends, and before parameters change (``FaultGuard.before_update``). ``nccl_settings.py`` describes torch's own
watchdog.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

logger = logging.getLogger("megatron_pp")

_ABORT_TAG = 0x4D0000  # nothing is sent on it
_AT_ONCE = timedelta(milliseconds=1)
_NCCL_PATIENCE = 5.0  # seconds
_GLOO = ("gloo",)
_NCCL = ("nccl", "nccl2", "nccl-lazy")
"""Names that torch's backends on NCCL have themselves. A group of ``init_process_group("nccl")`` has an nccl2 in torch
2.15, unless TORCH_DIST_USE_NCCL2=0."""


def abort_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort each of ``groups``: operations that are blocked on it in this process raise or return, and later calls
    fail. Never raises."""
    nccl: list[dist.ProcessGroup] = []
    for group in groups:
        if _has_backend(group, "cuda", _NCCL):
            nccl.append(group)
        if _has_backend(group, "cpu", _GLOO):
            _abort_gloo(group)
    _abort_nccl(nccl)


def abort_all_groups() -> None:
    """Abort every process group that this process is a member of, the default one last."""
    world = dist.distributed_c10d._world
    abort_groups(sorted(world.pg_names, key=lambda group: group is world.default_pg))


def _has_backend(group: dist.ProcessGroup, device: str, names: tuple[str, ...]) -> bool:
    try:
        return group._get_backend(torch.device(device)).name() in names
    except RuntimeError:
        return False


def _abort_gloo(group: dist.ProcessGroup) -> None:
    """Post one receive from every peer. One that times out closes the connections to all peers. One on a connection
    that its peer has closed already is refused and closes nothing; hence one for each peer."""
    # gloo has one set of connections per network interface and picks it by tag.
    interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    for tag in range(_ABORT_TAG, _ABORT_TAG + interfaces):
        for peer in range(group.size()):
            if peer != group.rank():
                with contextlib.suppress(RuntimeError):  # the timeout is intended
                    group.recv([torch.empty(1)], peer, tag).wait(_AT_ONCE)


def _abort_nccl(groups: list[dist.ProcessGroup]) -> None:
    """Abort all groups together, each from its own thread: an abort returns when its kernels have left the GPU, and
    may wait for kernels of another communicator (pytorch#119797). ``ncclGroupStart`` cannot combine the aborts: it
    works for calls of one thread, and ``ProcessGroupNCCL::abort`` starts a thread of its own."""
    threads = [threading.Thread(target=_abort_one, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _NCCL_PATIENCE
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    still = sum(thread.is_alive() for thread in threads)
    if still:
        logger.warning("aborting %d NCCL communicator(s) takes longer than %.0f s", still, _NCCL_PATIENCE)


def _abort_one(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except Exception as error:  # a communicator that is already gone is as good as aborted
        logger.warning("aborting an NCCL communicator: %s", error)
