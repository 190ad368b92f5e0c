"""Real processes that change plans while they train, and a rank that dies amid the change: an error on each, soon."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_pp.errors import PipelineError
from megatron_pp.features.replanning import replan_thread
from megatron_pp.features.replanning.replan_thread import ReplanThread
from megatron_pp.features.replanning.replanning import Replanning
from megatron_pp.runtime.communicators import close_communicators
from tests.harness.process_ranks import pipeline
from tests.harness.processes import RankFailedError
from tests.harness.proposals import to
from tests.harness.step_runs import Rank

SIZE = 3


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_as_it_changes(self: Replanning, *arguments: Any) -> None:
    _CHANGE(self, *arguments)
    if self.plans:
        _die()


_CHANGE = Replanning._change
# The rank, and what it does as it dies.
DEATHS: dict[str, tuple[int, Any, str, Any]] = {
    "as it changes": (1, Replanning, "_change", _dies_as_it_changes),
    "before it publishes the decision": (0, replan_thread._Leader, "_publish", _die),
    "as it reads the plan": (2, ReplanThread, "_made", _die),
}


def train(one: Rank, death: str) -> tuple[str, float]:
    """The error, and the seconds that its step took."""
    replan_thread.searched = to("gpipe")
    victim, place, name, dies = DEATHS[death]
    if one.rank == victim:
        mock.patch.object(place, name, dies).start()
    model = one.model()
    began = time.monotonic()
    try:
        for _ in range(200):
            began = time.monotonic()
            time.sleep(0.03)
            one.step(model)
        found = "no error"
    except PipelineError as error:
        found = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    close_communicators()
    dist.destroy_process_group()  # else its members take leave of each other
    return found, seconds


@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_dies_amid_a_change_is_the_error_of_all(death: str) -> None:
    victim = DEATHS[death][0]
    with pytest.raises(RankFailedError) as failed:
        pipeline(SIZE, 1, 4, train, death, patience=40.0, pipeline_replan="every:2", p2p_timeout=20.0)
    assert failed.value.errors == {victim: ("ProcessDied", "the process ended without a result")}
    assert failed.value.results.keys() == set(range(SIZE)) - {victim}
    for found, seconds in failed.value.results.values():
        assert f"rank {victim}" in found, found
        assert seconds < 15.0
