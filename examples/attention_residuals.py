"""Train Attention Residuals (arXiv 2603.15031) in a pipeline and in one process, step by step, and compare.

    torchrun --standalone --nproc-per-node 2 examples/attention_residuals.py --chunks 2

Every stage is a block. Its input is a weighted mean of all blocks before it, and it learns the weights. So all later
stages use a block; ``config.skip_tensors = "blocks"`` declares that. The first rank prints how many blocks the plan
sends. Every rank also trains the whole model, and prints the largest difference of a loss or a gradient.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # makes the package importable without an installation

from megatron_pp import PipelineStage, TransformerConfig, get_forward_backward_func, parallel_state
from megatron_pp.feature_table import CACHES
from megatron_pp.features.skip_tensors.routes import BLOCKS, stage_blocks, traffic_of
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec

HIDDEN, SEQUENCE, SAMPLES, MICROBATCHES = 16, 8, 2, 4


class Stage(nn.Module):
    """A block of one feed-forward layer. Its inputs are the stream and, by name, the blocks of all stages before it."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.makes = f"block{stage}" if stage < num_stages - 1 else ""
        self.query = nn.Parameter(torch.zeros(HIDDEN))  # zeros: it begins with the plain mean
        self.norm = nn.RMSNorm(HIDDEN)
        self.layer = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, stream: Tensor, **blocks: Tensor) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        sources = torch.stack([*blocks.values(), stream])
        weights = (self.norm(sources) @ self.query).softmax(0)
        block = self.layer((weights.unsqueeze(-1) * sources).sum(0))
        return (stream + block, {self.makes: block}) if self.makes else stream + block


def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        x = torch.randn(SEQUENCE, SAMPLES, HIDDEN, generator=generator, dtype=torch.float64)
        yield x, x.roll(1, 0)


def loss_of(target: Tensor, output: Tensor) -> tuple[Tensor, float]:
    loss = (output - target).square().mean()
    return loss, loss.item()


def forward_step(data: Iterator[tuple[Tensor, Tensor]], stage: PipelineStage) -> tuple[Tensor, object]:
    x, target = next(data)
    return stage(x), lambda output: loss_of(target, output)


def whole_step(step: int, model: list[Stage]) -> list[float]:
    """Run the step in one process. Returns the losses."""
    losses = []
    for x, target in batches(step):
        blocks: dict[str, Tensor] = {}
        for stage in model[:-1]:
            x, made = stage(x, **blocks)
            blocks |= made
        loss, value = loss_of(target, model[-1](x, **blocks))
        (loss / MICROBATCHES).backward()
        losses.append(value)
    return losses


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1, help="model chunks a rank; default: %(default)s")
    parser.add_argument("--cache", choices=CACHES, default="received", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="default: %(default)s")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    size, rank, chunks = dist.get_world_size(), dist.get_rank(), args.chunks
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(1, size, virtual)
    torch.manual_seed(0)
    model = [Stage(stage, size * chunks).double() for stage in range(size * chunks)]
    config = TransformerConfig(
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers=size * chunks,
        num_attention_heads=1,
        hidden_size=HIDDEN,
        pipeline_dtype=torch.float64,
        overlap_p2p_comm=True,
        skip_tensors=BLOCKS,
        skip_cache=args.cache,
    )
    mine = Placement("loop", size, chunks).stages[rank]
    stages = [
        PipelineStage(copy.deepcopy(model[stage]), config, chunk, stage=stage) for chunk, stage in enumerate(mine)
    ]
    if rank == 0:
        more = {"skip_tensors": stage_blocks(size * chunks), "skip_cache": args.cache}
        spec = PlanSpec(config.schedule_name, size, chunks, MICROBATCHES, **more)
        print(f"blocks sent per microbatch, and on the busiest hop: {tuple(traffic_of(build_plan(spec).programs))}")
    for step in range(1, args.steps + 1):
        reports = get_forward_backward_func(size, virtual)(
            forward_step_func=forward_step,
            data_iterator=[batches(step) for _ in stages] if virtual else batches(step),
            model=stages if virtual else stages[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=SAMPLES,
        )
        expected = whole_step(step, model)
        differences = [abs(a - b) for a, b in zip(reports, expected, strict=True)] if reports else []
        for number, stage in zip(mine, stages, strict=True):
            pairs = zip(stage.parameters(), model[number].parameters(), strict=True)
            differences += [(gradient(a) - gradient(b)).abs().max().item() for a, b in pairs]
        loss, difference = sum(expected) / MICROBATCHES, max(differences)
        print(f"step {step} rank {rank}: loss {loss:.4f}, largest difference {difference:.1e}", flush=True)
        for module in (*stages, *model):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(0.5 * gradient(parameter))
                    parameter.grad = None
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
