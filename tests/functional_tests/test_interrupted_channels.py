"""If a rank is interrupted while gloo's channels are being made, its peer gets an error within p2p_timeout, although
the timeout of the process group is much longer."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pp.comm import channels as channel_groups
from megatron_pp.plan.costs.transports import GLOO_DETACHED_BYTES
from megatron_pp.testing.toy import HIDDEN, ToyData
from testkit.process_ranks import pipeline
from testkit.processes import RankFailedError
from testkit.thread_runs.step_runs import Rank

DATA = ToyData(4, seq_length=GLOO_DETACHED_BYTES // (4 * HIDDEN * 2) + 1)
WAITING, MAKING = "while it waits for the other end", "right before it makes its own end"


def press_ctrl_c(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def first_step(one: Rank, when: str, guarded: bool) -> None:
    # a shell's background job ignores SIGINT, and so do its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = one.rank
    store = dist.distributed_c10d._get_default_store()
    if rank == 0 and when == WAITING:
        threading.Timer(0.5, press_ctrl_c).start()
    elif rank == 0:
        channel_groups.ChannelGroups.connect = press_ctrl_c  # type: ignore[method-assign]
    elif when == WAITING:
        store.wait(["interrupted"], timedelta(seconds=30))
    try:
        if guarded:
            one.run()
        else:
            one.communicator.prepare([(0, 1)], GLOO_DETACHED_BYTES, GLOO_DETACHED_BYTES)
    except BaseException:
        store.set("ended" if rank else "interrupted", "")
        if rank == 0:  # for as long as the peer takes
            store.wait(["ended"], timedelta(seconds=30))
        raise


@pytest.mark.parametrize(
    ("when", "guarded", "error", "text"),
    [
        (WAITING, False, "P2PTimeoutError", r"began to make it and then left, after 2 s (config.p2p_timeout)"),
        (MAKING, False, "P2PTransferError", "was not made within 2 s (config.p2p_timeout)"),
        (MAKING, True, "PipelinePeerError", "pipeline rank 0 (global rank 0) raised KeyboardInterrupt"),
    ],
)
def test_the_peer_of_an_interrupted_rank_gets_an_error(when: str, guarded: bool, error: str, text: str) -> None:
    with pytest.raises(RankFailedError) as failed:
        pipeline(2, 1, 4, first_step, when, guarded, data=DATA, timeout=40.0, p2p_timeout=2.0)
    assert failed.value.errors[0][0] == "KeyboardInterrupt"
    kind, message = failed.value.errors[1]
    assert kind == error
    assert text in message
