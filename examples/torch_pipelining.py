"""Run torch's own PipelineStages under one of our schedules, and the whole model in one process, and compare.

    torchrun --standalone --nproc-per-node 2 examples/torch_pipelining.py --schedule zb_v
    torchrun --standalone --nproc-per-node 4 examples/torch_pipelining.py --schedule zb_v --replicas 2

The second command has two pipelines, and shards their stages over both (FSDP2).
The model is that of llama_stages.py: torchtitan's Llama 3 if torchtitan 0.2 can be imported, otherwise its own. Every
rank also trains the whole model, and prints the largest difference of a loss or a gradient. See
docs/migrating/from_torch.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # makes the package importable without an installation

from examples.llama_stages import LAYERS, MICROBATCHES, batches, build_model, cut
from megatron_pp import stage_numbers
from megatron_pp.integrations.torch_pipelining import PlanSchedule
from megatron_pp.plan.orders import find_family


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_stages(model: nn.Module, schedule: str, virtual: int, mesh: DeviceMesh) -> list[PipelineStage]:
    """This rank's stages, as the schedule places them. With several replicas they are sharded over the replicas."""
    group, replicas = mesh["pp"].get_group(), mesh["dp"]
    count = group.size() * virtual
    assert count <= LAYERS, f"{LAYERS} layers cannot fill {count} stages"
    stages = []
    for number in stage_numbers(schedule, group.size(), virtual)[group.rank()]:
        module = cut(model, number, count)
        if replicas.size() > 1:
            fully_shard(module, mesh=replicas)
        stages.append(PipelineStage(module, number, count, torch.device("cpu"), group=group))
    return stages


def whole_step(model: nn.Module, tokens: Tensor, targets: Tensor, replicas: DeviceMesh) -> list[Tensor]:
    """Run the same step in one process. Returns the microbatches' losses. Parameters get the gradients of the mean over
    all replicas."""
    pairs = zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    losses = [loss_fn(model(x), y) for x, y in pairs]
    for loss in losses:
        loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(MICROBATCHES)
        dist.all_reduce(parameter.grad, group=replicas.get_group())
        parameter.grad.div_(replicas.size())
    return losses


def largest_difference(
    losses: list[Tensor], expected: list[Tensor], stages: list[PipelineStage], model: nn.Module
) -> float:
    found = [(mine - whole).abs() for mine, whole in zip(losses, expected, strict=True)] if losses else []
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            ours, theirs = parameter.grad, model.get_parameter(name).grad
            assert ours is not None
            assert theirs is not None
            ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
            found.append((ours - theirs).abs().max())
    return max(difference.item() for difference in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=1, help="of the pipeline (default: %(default)s)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if args.replicas < 1 or dist.get_world_size() % args.replicas:
        parser.error(f"--replicas {args.replicas} does not divide the {dist.get_world_size()} processes")
    mesh = init_device_mesh("cpu", (args.replicas, dist.get_world_size() // args.replicas), mesh_dim_names=("dp", "pp"))
    model = build_model()
    stages = make_stages(model, args.schedule, find_family(args.schedule).chunks or 2, mesh)
    schedule = PlanSchedule(stages, MICROBATCHES, loss_fn, schedule=args.schedule)
    mine = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.5)
    whole = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, args.steps + 1):
        number = step * args.replicas + mesh["dp"].get_local_rank()
        tokens, targets = (torch.cat(parts) for parts in zip(*batches(number), strict=True))
        mine.zero_grad()
        whole.zero_grad()
        inputs = (tokens,) if any(stage.is_first for stage in stages) else ()
        losses: list[Tensor] = []
        if any(stage.is_last for stage in stages):
            schedule.step(*inputs, target=targets, losses=losses)
        else:
            schedule.step(*inputs)
        expected = whole_step(model, tokens, targets, mesh["dp"])
        difference = largest_difference(losses, expected, stages, model)
        mean = sum(loss.item() for loss in expected) / MICROBATCHES
        mine.step()
        whole.step()
        rank = dist.get_rank()
        print(
            f"step {step} rank {rank}: {args.schedule}, loss {mean:.4f}, largest difference {difference:g}", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
