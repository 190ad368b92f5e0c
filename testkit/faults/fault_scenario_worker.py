"""One rank's part in an episode: it makes process groups, runs steps, and destroys the groups."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.faults.causes import stall_detector
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime.communicators import close_communicators
from megatron_pp.testing.toy import ToyBlock, ToyData, ToyResult, reference_run
from megatron_pp.weight_grad import split_weight_grad
from testkit.faults.fault_injection import FaultyBlock, Trigger, faulty_iterator
from testkit.faults.fault_scenarios import Episode, Report, resident_bytes
from testkit.process_ranks import rank_of


def run_episode(episode: Episode, rank: int, size: int, store: Any, on_fire: Callable[[], None]) -> Report:
    """Run the episode on this rank. All ranks and episodes share ``store``. ``on_fire`` is called right before a
    fault."""
    start = time.monotonic()
    stall_detector.STOPPED_SECONDS = episode.stopped_seconds
    device = _device(episode, rank)
    dist.init_process_group(
        episode.backend,
        store=dist.PrefixStore(f"episode {episode.number}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=episode.group_timeout),
    )
    run = _Run(episode, rank, device, on_fire)
    error, raised_at = None, 0.0
    try:
        run.steps(size)
    except Exception as raised:
        raised_at = time.monotonic()
        attributes = {k: v for k, v in vars(raised).items() if not k.startswith("_")}
        error = (type(raised).__name__, str(raised), attributes)
    wrong, samples = tuple(run.wrong), tuple(run.samples)
    done = run.trigger.step - (error is not None)
    del run
    close_communicators()
    dist.destroy_process_group()
    gc.collect()
    return Report(rank, done, time.monotonic() - start, error, raised_at, wrong, samples=samples)


def _device(episode: Episode, rank: int) -> torch.device:
    if episode.backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class _Data(ToyData):
    """The toy data on a device."""

    device = torch.device("cpu")

    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().microbatch(mb)
        return x.to(self.device), target.to(self.device)


class _Run:
    """The steps of an episode on one rank, and their results."""

    def __init__(self, episode: Episode, rank: int, device: torch.device, on_fire: Callable[[], None]) -> None:
        self.episode = episode
        self.device = device
        here = episode.fault is not None and episode.fault.rank == rank
        self.trigger = Trigger(episode.fault if here else None, on_fire)
        self.data = _Data(episode.microbatches, episode.seq_length)
        object.__setattr__(self.data, "device", device)
        self.wrong: list[int] = []
        self.samples: list[int] = []

    def steps(self, size: int) -> None:
        """Run all steps of the episode, and compare each with one process."""
        episode, data = self.episode, self.data
        fields = {"p2p_timeout": episode.p2p_timeout, "pipeline_schedule": episode.schedule, **episode.fields}
        group = dist.new_group(list(range(size)), timeout=timedelta(seconds=episode.group_timeout))
        one = rank_of(episode.chunks, episode.microbatches, group=group, data=data, **fields)
        stages = one.placement.stages[one.rank]
        blocks = {stage: FaultyBlock(stage, chunk, self.trigger) for chunk, stage in enumerate(stages)}
        model = one.model(lambda stage: blocks[stage].to(self.device))
        if find_family(episode.schedule).splits_weight:
            split_weight_grad(model)
        whole = reference_run(size * episode.chunks, data, block=lambda stage: ToyBlock(stage).to(self.device))
        grads = {name: grad for name, grad in whole.grads.items() if int(name.partition(".")[0]) in stages}
        for step in range(1, episode.steps + 1):
            self.trigger.step = step
            for block in blocks.values():
                block.begin_step()
                block.zero_grad(set_to_none=True)
            iterators = [faulty_iterator(data, chunk, self.trigger) for chunk in range(len(model))]
            found = one.result(model, one.step(model, iterators=iterators))
            if found.difference(ToyResult(whole.losses if found.losses else [], grads)) != 0.0:
                self.wrong.append(step)
            if episode.sample_every and step % episode.sample_every == 0:
                gc.collect()
                self.samples.append(resident_bytes())
