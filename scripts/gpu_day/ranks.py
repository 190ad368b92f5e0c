"""Joins ranks to a process group, and compares steps of the toy model on them with one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.comm.backends import group_transport
from megatron_pp.faults.nccl_settings import leave_failures_to_the_guard
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.orders import find_family
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import TOY_SCHEDULES, ToyBlock, ToyData, reference_run, toy_config
from megatron_pp.weight_grad import split_weight_grad

EQUAL = "one process's bits"
OVERLAP: dict[str, bool] = {"overlap_p2p_comm": True}
POLICIES: dict[str, dict[str, bool]] = {"overlap": OVERLAP, "batched": {"batch_p2p_comm": True}, "plain": {}}


@dataclass(frozen=True)
class Place:
    """Where the ranks run: ``devices[rank]``. ``store`` is the file at which they meet."""

    backend: str
    devices: tuple[str, ...]
    store: str

    @property
    def shared(self) -> bool:
        return len(set(self.devices)) < len(self.devices)


def enter(rank: int, size: int, place: Place, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Join the process group and run ``work(rank, size, device, *args)``.

    NCCL refuses two ranks on one GPU only within a host. So each rank that shares a GPU claims a host of its own.
    """
    device = torch.device(place.devices[rank])
    leave_failures_to_the_guard()
    if place.backend == "nccl":
        if place.shared:
            os.environ["NCCL_HOSTID"] = f"megatron-pp-{rank}"
        torch.cuda.set_device(device)
    store = dist.FileStore(place.store, size)
    dist.init_process_group(place.backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        return work(rank, size, device, *args)
    finally:
        dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class DeviceData(ToyData):
    """Toy data on a device."""

    device: str = "cpu"

    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().microbatch(mb)
        return x.to(self.device), target.to(self.device)


@dataclass(frozen=True)
class Step:
    """A training step of the toy model. ``fields`` are fields of its config."""

    schedule: str
    chunks: int = 1
    microbatches: int = 4
    fields: dict[str, Any] = field(default_factory=dict)
    seq_length: int = 256
    hidden: int = 64
    variable: bool = False

    def data(self, device: torch.device) -> DeviceData:
        sizes = self.microbatches, self.seq_length, 2, self.variable, self.hidden
        return DeviceData(*sizes, device=str(device))

    def config(self, **more: Any) -> Any:
        fields = {
            "pipeline_schedule": self.schedule,
            "hidden_size": self.hidden,
            "virtual_pipeline_model_parallel_size": self.chunks if self.chunks > 1 else None,
            "variable_seq_lengths": self.variable,
        }
        return toy_config(**{**fields, **self.fields, **more})

    @property
    def prepare(self) -> Any:
        """The function that prepares the model's chunks for a step, or None."""
        return split_weight_grad if find_family(self.schedule).splits_weight else None

    def block(self, device: torch.device) -> Callable[[int], torch.nn.Module]:
        return lambda stage: ToyBlock(stage, self.hidden).to(device)


def steps_of(
    names: Sequence[str],
    policies: Sequence[str],
    microbatches: int,
    seq_length: int = 256,
    hidden: int = 64,
    **fields: Any,
) -> dict[str, Step]:
    """A step of each schedule in ``names``, or of all if it is empty, under each policy. Keys: "schedule, policy"."""
    sizes = seq_length, hidden
    return {
        f"{schedule}, {policy}": Step(
            schedule, family.chunks or 2, microbatches, {**POLICIES[policy], **fields}, *sizes
        )
        for schedule, family in TOY_SCHEDULES.items()
        if not names or schedule in names
        for policy in policies
    }


def differences(rank: int, size: int, device: torch.device, steps: dict[str, Step]) -> dict[str, float]:
    """For each step, the largest difference between this rank's gradients and those of one process."""
    found = {}
    # All steps share a transport, as in a program: it makes each channel's NCCL communicator once.
    assert dist.group.WORLD is not None
    transport = group_transport(dist.group.WORLD)
    for name, step in steps.items():
        config = step.config()
        data = step.data(device)
        block = step.block(device)
        communicator = P2PCommunicator(dist.group.WORLD, config, transport)
        mine = run_rank(rank, size, step.chunks, data, config, communicator, block=block, prepare=step.prepare)
        whole = reference_run(size * step.chunks, data, block=block)
        found[name] = largest_difference(mine.grads, whole.grads)
    transport.close()
    return found


def as_text(difference: float) -> str:
    return EQUAL if difference == 0.0 else f"differs by {difference:g}"


def outcome(work: Callable[[], list[Any]]) -> str:
    """The outcome of ``work`` in words: the texts or differences that its ranks returned, or the error that it
    raised."""
    try:
        found = work()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if isinstance(found[0], str):
        return "; ".join(sorted(set(found)))
    return as_text(max(wrong(found).values(), default=0.0))


def largest_difference(mine: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> float:
    """The largest difference of this rank's gradients. Infinite if one is not finite."""
    worst = max(float((grad - whole[name]).abs().max()) for name, grad in mine.items())
    return worst if worst == worst else float("inf")


def wrong(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The steps that differ on any rank, with their difference."""
    return {name: worst for of_rank in found for name, worst in of_rank.items() if worst != 0.0}


def transfer_seconds(communicator: P2PCommunicator, shape: tuple[int, ...], device: torch.device) -> float:
    """The shortest of several transfers of one tensor from rank 0 to rank 1, in seconds. All ranks call this."""
    best = float("inf")
    tensor = torch.ones(shape, device=device)
    for _ in range(4):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        if communicator.rank == 0:
            communicator.send_forward(tensor, is_last_stage=False)
        elif communicator.rank == 1:
            communicator.recv_forward(shape, is_first_stage=False)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
