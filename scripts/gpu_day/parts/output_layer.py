"""A step whose output layer is split over all ranks, compared with the same model in one process with the whole
layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpu_day.bench import Bench
from megatron_pp import PipelineStage, SplitOutputLayer
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.toy import HIDDEN, ToyBlock, toy_config

SCHEDULES = ("vocab_1f1b", "vocab_1f1b_alg1")
SEQ, BATCH, VOCAB, MICROBATCHES = 3, 2, 11, 4
TOLERANCE = 1e-10  # in float64; sums over the vocabulary have another order


class Stage(torch.nn.Module):
    """A block of the model, and the rank's rows of the output layer."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__()
        self.block = ToyBlock(rank).double().to(device)
        self.output = SplitOutputLayer(HIDDEN, VOCAB, rank, size, dtype=torch.float64).to(device)
        with torch.no_grad():
            self.output.weight.copy_(_weight()[self.output.rows.start : self.output.rows.stop])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def run(bench: Bench) -> None:
    found = bench.ranks(_rank, size=min(4, max(2, bench.machine.gpus)))
    for name in SCHEDULES:
        worst = max(one[name] for one in found)
        what = f"{name}, P={len(found)}: gradients of the split output layer and the blocks are the whole model's"
        bench.check(worst < TOLERANCE, f"{what} (relative difference {worst:.1g})")


def _weight() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    found = []
    for _ in range(MICROBATCHES):
        x = torch.randn(SEQ, BATCH, HIDDEN, generator=draw, dtype=torch.float64)
        found.append((x.to(device), torch.randint(VOCAB, (SEQ, BATCH), generator=draw).to(device)))
    return found


def _rank(rank: int, size: int, device: torch.device) -> dict[str, float]:
    return {name: _difference(name, rank, size, device) for name in SCHEDULES}


def _difference(schedule: str, rank: int, size: int, device: torch.device) -> float:
    """The largest difference between a gradient of this rank and the whole model's, relative to the gradient's largest
    element."""
    config = toy_config(pipeline_dtype=torch.float64, pipeline_schedule=schedule, overlap_p2p_comm=True)
    stage = Stage(rank, size, device)

    def forward_step(data: object, model: PipelineStage) -> object:
        x, labels = next(data)  # type: ignore[call-overload]
        return model.inner.output(model(x), labels), lambda losses: (losses.mean(), {})  # type: ignore[operator]

    communicator = P2PCommunicator(dist.group.WORLD, config)
    get_forward_backward_func(size)(
        forward_step_func=forward_step,
        data_iterator=iter(_batches(device)),
        model=PipelineStage(stage, config, stage=rank),
        num_microbatches=MICROBATCHES,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        p2p_communicator=communicator,
    )
    communicator.transport.close()
    weight, blocks = _whole(size, device)
    rows = stage.output.rows
    pairs = [(stage.output.weight.grad, weight[rows.start : rows.stop])]
    parameters = zip(stage.block.parameters(), blocks[rank].parameters(), strict=True)
    pairs += [(mine.grad, whole.grad) for mine, whole in parameters]
    return max(float((mine - whole).abs().max() / whole.abs().max()) for mine, whole in pairs)


def _whole(size: int, device: torch.device) -> tuple[torch.Tensor, list[ToyBlock]]:
    """The gradient of the whole output layer, and the blocks with their gradients, from one process."""
    blocks = [ToyBlock(stage).double().to(device) for stage in range(size)]
    weight = _weight().to(device).requires_grad_()
    for x, labels in _batches(device):
        for block in blocks:
            x = block(x)
        loss = F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten())
        (loss / MICROBATCHES).backward()
    assert weight.grad is not None
    return weight.grad, blocks
