"""A thread that blocks in gloo can be unblocked by another thread of its process, whatever the peer does.

The most important case is a half-sent message: closing its connection does not wake a thread that waits for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

SMALL, LARGE = 10, 16_000_000  # numbers of float32: the first message fits into a socket's buffers, the second does not
ALL_THERE = "the peer was slow to go, and all of its message has come"


def _join(rank: int, port: int, world: int) -> Any:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return dist.group.WORLD


def _peer(pipe: Connection, port: int, world: int, does: str, size: int, goes: signal.Signals) -> None:
    """Post the other end of the transfer, or not; then be stopped or killed. A large message is half sent then."""
    import torch

    group = _join(world - 1, port, world)
    tensor = torch.ones(size)
    work = {"receive": group.recv, "send": group.send}[does]([tensor], 0, 7) if does != "nothing" else None
    pipe.send(os.getpid())
    time.sleep(0.3 if size == SMALL else 0.0)
    os.kill(os.getpid(), goes)
    del work


def _third(port: int) -> None:
    """Leave as soon as all processes have met, which closes this process's connections."""
    _join(1, port, 3)
    time.sleep(0.5)
    os._exit(0)


def _blocked(pipe: Connection, port: int, world: int, does: str, size: int) -> None:
    """Wait, be aborted after a while, and send the error to the test."""
    import torch

    from megatron_pp.comm.abort import abort_groups
    from megatron_pp.comm.gloo.waiting_threads import ChannelThreads

    group = _join(0, port, world)
    peer = world - 1
    tensor = torch.zeros(size) if does == "receive" else torch.ones(size)
    threads = ChannelThreads()
    begin: dict[str, Callable[[], Any]] = {
        "send": lambda: group.send([tensor], peer, 7),
        "receive": lambda: group.recv([tensor], peer, 7),
        "all_reduce": lambda: group.allreduce([tensor]),
    }
    aborted = threading.Event()

    def abort() -> None:
        time.sleep(1.5)
        aborted.set()
        abort_groups([group])
        threads.interrupt("test")

    threading.Thread(target=abort, daemon=True).start()
    error = ""
    try:
        work = begin[does]()  # raises here if the peer is already gone
        (work if size == SMALL else threads.follow("a channel", work)).wait()
        if does == "receive" and bool(tensor.all()):
            error = ALL_THERE
    except RuntimeError as raised:
        error = str(raised) or type(raised).__name__
    aborted.wait()
    pipe.send(error)
    pipe.recv()
    os._exit(0)


def _error_of_the_wait(does: str, peer_does: str, size: int, goes: signal.Signals, third: bool = False) -> str:
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here, there = context.Pipe()
    here_too, there_too = context.Pipe()
    processes = [
        context.Process(target=_blocked, args=(there, store.port, 2 + third, does, size), daemon=True),
        context.Process(target=_peer, args=(there_too, store.port, 2 + third, peer_does, size, goes), daemon=True),
        *([context.Process(target=_third, args=(store.port,), daemon=True)] if third else []),
    ]
    for process in processes:
        process.start()
    try:
        assert here_too.poll(60), "the peer did not begin"
        assert here.poll(30), "the wait never returned"
        return str(here.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("does", "peer_does", "size", "goes"),
    [
        ("receive", "nothing", SMALL, signal.SIGSTOP),
        ("send", "nothing", SMALL, signal.SIGSTOP),
        ("all_reduce", "nothing", SMALL, signal.SIGSTOP),
        ("send", "receive", LARGE, signal.SIGSTOP),
        ("receive", "send", LARGE, signal.SIGSTOP),
        ("send", "receive", LARGE, signal.SIGKILL),
        ("receive", "send", LARGE, signal.SIGKILL),
    ],
)
def test_a_blocked_wait_ends(does: str, peer_does: str, size: int, goes: signal.Signals) -> None:
    for _ in range(5):
        error = _error_of_the_wait(does, peer_does, size, goes)
        if error != ALL_THERE:
            break
    assert error != ALL_THERE, "the peer never went before the whole message had come"
    assert error, "the wait returned as if the transfer were done"


def test_a_blocked_wait_ends_although_a_peer_has_left() -> None:
    """gloo refuses a receive from it at once, so that the receive does not time out and closes no connection."""
    error = _error_of_the_wait("receive", "nothing", SMALL, signal.SIGSTOP, third=True)
    assert error, "the wait returned as if the transfer were done"
