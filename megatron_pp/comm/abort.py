"""Make the operations of a process group fail that block, or will block, another thread of this process.

What was tried on torch 2.13, two processes, the waiting thread inside ``work.wait()`` without a timeout:

gloo, ``ProcessGroup.abort`` and ``shutdown``: no effect, and ``Work.abort`` exists in C++ only. But a wait that times
out wakes everybody: gloo then closes all connections of the group ("Application timeout caused pair closure" here,
"Connection closed by peer" there). Any wait will do, so the abort is a receive that nobody answers, given one
millisecond. It takes 3 to 13 ms, collectives on the group fail as well, and ``destroy_process_group`` and
``init_process_group`` work afterwards.

gloo, a transfer that is half on the wire, and a send that was written to a connection which the peer had just reset:
are not woken, neither by that nor by the death of the peer. gloo wakes the operations that are queued; one that is
being transferred has left its queue, and those that wait for the socket are passed over (``Pair::signalException`` in
gloo/transport/tcp/pair.cc). ``wait`` returns when its own timeout is over, by default the group's half hour. Hence
``gloo.py``.

NCCL: ``ProcessGroup.abort`` (``ncclCommAbort``) makes the kernels leave and the synchronisation of the stream return,
without an error on the waiting thread; the communicator refuses further calls, and the guard looks at its verdict when
the step ends. Read in c10d's source; to be run on GPUs. ``nccl_settings.py`` says what torch does there by itself.
"""

from __future__ import annotations

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

# A tag on which nobody sends, below the ones that carry activations and gradients.
_ABORT_TAG = 0x4D0000
_AT_ONCE = timedelta(milliseconds=1)
_NCCL_PATIENCE = 5.0  # seconds


def abort_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort each of ``groups``: what is blocked on it in this process raises or returns, and later calls fail. Never
    raises."""
    nccl: list[dist.ProcessGroup] = []
    for group in groups:
        if _backend(group, "cuda", "nccl") is not None:
            nccl.append(group)
        if _backend(group, "cpu", "gloo") is not None:
            _abort_gloo(group)
    _abort_nccl(nccl)


def abort_all_groups() -> None:
    """Abort every process group that this process is a member of, the default one last."""
    world = dist.distributed_c10d._world
    abort_groups(sorted(world.pg_names, key=lambda group: group is world.default_pg))


def _backend(group: dist.ProcessGroup, device: str, name: str) -> object | None:
    """The group's backend for ``device``, if it is the one called ``name``."""
    try:
        backend = group._get_backend(torch.device(device))
    except RuntimeError:
        return None
    return backend if backend.name() == name else None


def _abort_gloo(group: dist.ProcessGroup) -> None:
    """One receive that times out closes the connections to all peers. A connection that is closed already, because its
    peer was quicker, refuses the receive and closes nothing: so every peer is asked.
    """
    # gloo has one set of connections per network interface and picks it by tag.
    interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    for tag in range(_ABORT_TAG, _ABORT_TAG + interfaces):
        for peer in range(group.size()):
            if peer != group.rank():
                with contextlib.suppress(RuntimeError):  # the timeout is what was wanted
                    group.recv([torch.empty(1)], peer, tag).wait(_AT_ONCE)


def _abort_nccl(groups: list[dist.ProcessGroup]) -> None:
    """All at once, each from a thread of its own: an abort returns when its kernels have left the GPU, and may wait for
    another communicator's (pytorch#119797). NCCL's own way to abort several, ``ncclGroupStart``, is no help: it is for
    calls of one thread, and torch makes each abort on a thread of its own (``ProcessGroupNCCL::abort``), which is
    waited for as long as the group's timeout.
    """
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
