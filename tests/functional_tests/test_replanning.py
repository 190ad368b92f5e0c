"""Real processes that change plans while they train, and a rank that dies amid the change: an error on each, soon."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_pp.errors import PipelineError
from megatron_pp.features.replanning import replan_thread
from megatron_pp.features.replanning.replan_thread import ReplanThread
from megatron_pp.features.replanning.replanning import Replanning
from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.toy import ToyData, toy_chunks, toy_config
from tests.harness.proposals import to

SIZE = 3
LEADER, CHANGE, READ = "before it publishes the decision", "as it changes", "as it reads the plan"


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rank_main(rank: int, folder: str, victim: int, where: str) -> None:
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    replan_thread.searched = to("gpipe")
    if rank == victim:
        if where == READ:
            mock.patch.object(ReplanThread, "_made", _die).start()
        elif where == LEADER:
            mock.patch.object(replan_thread._Leader, "_publish", _die).start()
        else:
            change = Replanning._change

            def dies(self: Replanning, *arguments: object) -> None:
                change(self, *arguments)  # type: ignore[arg-type]
                if self.plans:
                    _die()

            mock.patch.object(Replanning, "_change", dies).start()
    config = toy_config(pipeline_replan="every:2", p2p_timeout=20.0)
    communicator = communicator_for(dist.group.WORLD, config)
    chunks = toy_chunks(placement_of(config, SIZE, 1), rank, config)
    began = time.monotonic()
    try:
        for _ in range(200):
            began = time.monotonic()
            time.sleep(0.03)
            toy_step(chunks, ToyData(4), communicator)
        found = "no error"
    except PipelineError as error:
        found = f"{type(error).__name__}: {error}"
    Path(folder, f"rank{rank}").write_text(json.dumps([found, time.monotonic() - began]))
    close_communicators()


@pytest.mark.parametrize(("victim", "where"), [(1, CHANGE), (0, LEADER), (2, READ)])
def test_a_rank_that_dies_amid_a_change_is_the_error_of_all(tmp_path: Path, victim: int, where: str) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=rank_main, args=(rank, str(tmp_path), victim, where)) for rank in range(SIZE)]
    try:
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(60.0)
    finally:
        for one in ranks:
            one.kill()
    assert ranks[victim].exitcode == -signal.SIGKILL
    for rank in set(range(SIZE)) - {victim}:
        found, seconds = json.loads((tmp_path / f"rank{rank}").read_text())
        assert f"rank {victim}" in found, found
        assert seconds < 15.0
