"""A program that ends while a thread of the package is inside a C++ call of torch:
``python -m tests.functional_tests.ending_program WHAT``.

abort      the guard's watchdog is aborting the communicator
transfer   a channel's thread waits for a message, whose sender is killed while the interpreter finalises
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist

from megatron_pp.faults.guard import FaultGuard
from megatron_pp.faults.store.failures import EXCEPTION, Failure
from megatron_pp.faults.store.fault_store import FaultStore
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.communicators import communicator_for
from megatron_pp.testing.toy import toy_config


class Finalisation:
    """Kills the peer and then sleeps for 1 s, so that the thread returns from C++ while the interpreter finalises."""

    def __init__(self) -> None:
        self.peer = 0

    def __del__(self) -> None:
        if self.peer:
            os.kill(self.peer, signal.SIGKILL)
        time.sleep(1.0)


finalisation = Finalisation()


def abort() -> None:
    """Take 0.7 s in a C++ call, as an abort with many peers does."""
    store, this = dist.HashStore(), threading.current_thread()
    if this is not threading.main_thread():
        called.set()
        with suppress(dist.DistError):
            store.wait(["never"], timedelta(seconds=0.7))


called = threading.Event()


def end_amid_abort() -> None:
    store = dist.HashStore()
    guard = FaultGuard(store, "p", 0, 2, 30.0, abort)
    failure = Failure(EXCEPTION, "p", 1, 1, "F0.0", "forward", "ValueError", "bad")
    FaultStore(store, "p", 1, 2, 1).publish_failure(failure)
    with guard.step(SimpleNamespace(plan=build_plan(PlanSpec("1f1b", 2, 1, 4)), position=0)):
        called.wait(20.0)
        raise SystemExit(3)


def end_amid_transfer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        finalisation.peer = os.fork()
        rank = int(finalisation.peer == 0)
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        if rank == 1:
            signal.pause()
        communicator_for(dist.group.WORLD, toy_config()).post_recv([1_000_000], 1, "A")
        raise SystemExit(3)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    {"abort": end_amid_abort, "transfer": end_amid_transfer}[sys.argv[1]]()
