"""The gradients of steps that copy activations to the host and back, and the memory that they save."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gpu_day import outside, ranks
from gpu_day.bench import Bench
from megatron_pp.comm.backends import group_transport
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import reference_run

KEPT, OFFLOADED = "gis_h", "pipe_offload"  # the order without copies, and with them
MICROBATCHES = 8


def run(bench: Bench) -> None:
    found = bench.ranks(_rank, bench.sizes.seq_length, bench.sizes.hidden)
    worst = max(one["difference"] for one in found)
    bench.check(worst == 0.0, f"the gradients of a step that offloads are one process's (difference {worst:g})")
    if bench.machine.has_gpus:
        peaks = {name: max(one["peak"][name] for one in found) for name in (KEPT, OFFLOADED)}
        bench.check(peaks[OFFLOADED] < peaks[KEPT], "a step that offloads needs less memory")
        bench.table(["schedule", "peak MiB"], [[name, peak] for name, peak in peaks.items()])


def _rank(rank: int, size: int, device: torch.device, seq_length: int, hidden: int) -> dict[str, Any]:
    found: dict[str, Any] = {"peak": {}}
    transport = group_transport(dist.group.WORLD)
    for name in (KEPT, OFFLOADED):
        step = ranks.Step(name, 2, MICROBATCHES, ranks.OVERLAP, seq_length, hidden)
        config = step.config()
        data = step.data(device)
        block = step.block(device)
        communicator = P2PCommunicator(dist.group.WORLD, config, transport)
        one_step = partial(run_rank, rank, size, step.chunks, data, config, communicator, block=block)
        mine = one_step()  # also makes channels and pinned memory
        if device.type == "cuda":
            found["peak"][name] = outside.peak_mib(device, one_step)
        whole = reference_run(size * step.chunks, data, block=block)
        found["difference"] = ranks.largest_difference(mine.grads, whole.grads)
    transport.close()
    return found
