"""One rank's part in an episode: groups up, steps, groups down."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.orders import find_family
from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.toy import ToyData, gradients_of, reference_run, toy_config
from megatron_pp.weight_grad import split_weight_grad
from tests.harness.fault_injection import FaultyBlock, Trigger, faulty_iterator
from tests.harness.fault_scenarios import Episode, Report, resident_bytes


def run_episode(episode: Episode, rank: int, size: int, store: Any, on_fire: Callable[[], None]) -> Report:
    """Run it; ``store`` is shared by all ranks and episodes, ``on_fire`` is called right before a fault."""
    start = time.monotonic()
    device = _device(episode, rank)
    dist.init_process_group(
        episode.backend,
        store=dist.PrefixStore(f"episode {episode.number}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=episode.group_timeout),
    )
    run = _Run(episode, rank, size, device, on_fire)
    error, raised_at = None, 0.0
    try:
        run.steps()
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
    """The model, the communicator and the steps."""

    def __init__(
        self, episode: Episode, rank: int, size: int, device: torch.device, on_fire: Callable[[], None]
    ) -> None:
        self.episode = episode
        self.device = device
        self.rank = rank
        self.size = size
        here = episode.fault is not None and episode.fault.rank == rank
        self.trigger = Trigger(episode.fault if here else None, on_fire)
        self.config = toy_config(
            p2p_timeout=episode.p2p_timeout,
            pipeline_schedule=episode.schedule,
            virtual_pipeline_model_parallel_size=episode.chunks if episode.chunks > 1 else None,
            **episode.fields,
        )
        self.data = _Data(episode.microbatches, episode.seq_length)
        object.__setattr__(self.data, "device", device)
        self.stages = placement_of(self.config, size, episode.chunks).stages[rank]
        self.wrong: list[int] = []
        self.samples: list[int] = []
        whole = reference_run(
            size * episode.chunks, self.data, block=lambda stage: self._block(stage, 0, Trigger(None, on_fire))
        )
        self.expected_losses = whole.losses
        self.expected_grads = {k: v for k, v in whole.grads.items() if int(k.partition(".")[0]) in self.stages}

    def _block(self, stage: int, chunk: int, trigger: Trigger) -> FaultyBlock:
        return FaultyBlock(stage, chunk, trigger).to(self.device)

    def steps(self) -> None:
        """All steps of the episode, each compared with the reference."""
        group = dist.new_group(list(range(self.size)), timeout=timedelta(seconds=self.episode.group_timeout))
        communicator = communicator_for(group, self.config)
        blocks = [self._block(stage, chunk, self.trigger) for chunk, stage in enumerate(self.stages)]
        chunks = [PipelineStage(block, self.config, chunk) for chunk, block in enumerate(blocks)]
        if find_family(self.episode.schedule).splits_weight:
            split_weight_grad(chunks)
        for step in range(1, self.episode.steps + 1):
            self.trigger.step = step
            for block in blocks:
                block.begin_step()
                block.zero_grad(set_to_none=True)
            losses = self._step(communicator, chunks)
            self._compare(step, losses, gradients_of(dict(zip(self.stages, chunks, strict=True))))
            if self.episode.sample_every and step % self.episode.sample_every == 0:
                gc.collect()
                self.samples.append(resident_bytes())

    def _step(self, communicator: P2PCommunicator, chunks: list[PipelineStage]) -> list[float]:
        iterators = [faulty_iterator(self.data, chunk, self.trigger) for chunk in range(len(chunks))]
        reports = toy_step(chunks, self.data, communicator, iterators=iterators)
        return [float(report["loss"]) for report in reports]

    def _compare(self, step: int, losses: list[float], grads: dict[str, torch.Tensor]) -> None:
        same = grads.keys() == self.expected_grads.keys()
        same = same and all(torch.equal(grad, self.expected_grads[name]) for name, grad in grads.items())
        if not same or (losses and losses != self.expected_losses):
            self.wrong.append(step)
