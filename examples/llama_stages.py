"""Train a Llama of torch's own modules in a pipeline and in one process, step by step, and compare.

    torchrun --standalone --nproc-per-node 2 examples/llama_stages.py --schedule zb_v

The model is torchtitan's Llama 3 if torchtitan 0.2 can be imported. Otherwise it is the Llama of this file, which has
the same parts. Every rank also trains the whole model, and prints the largest difference of a loss or a gradient. See
docs/torch_modules.md.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # makes the package importable without an installation

from megatron_pp import (
    PipelineStage,
    TransformerConfig,
    get_forward_backward_func,
    parallel_state,
    split_weight_grad,
    stage_numbers,
)
from megatron_pp.plan.orders import find_family

VOCABULARY, HIDDEN, HEADS, LAYERS = 2048, 256, 16, 6  # torchtitan's debug model
SAMPLES, SEQUENCE, MICROBATCHES = 2, 16, 4


class Block(nn.Module):
    """Causal attention with rotary positions, and SwiGLU, each after an RMSNorm. Tensors are [samples, sequence,
    hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.wqkv, self.wo = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.w13, self.w2 = nn.Linear(HIDDEN, 6 * HIDDEN, bias=False), nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.wqkv(self.attention_norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        gate, value = self.w13(self.ffn_norm(x)).chunk(2, -1)
        return x + self.w2(nn.functional.silu(gate) * value)


def rotated(x: Tensor) -> Tensor:
    """``x`` [samples, heads, sequence, head] with rotary positions (arXiv 2104.09864)."""
    sequence, half = x.shape[-2], x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(sequence), rates)
    turned = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


class Llama(nn.Module):
    """A Llama, or a stage of one. Parts that are None are left out, as in torchtitan: a stage lacks the parts of other
    stages."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(layer): Block() for layer in range(LAYERS)})
        self.norm = nn.RMSNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.tok_embeddings, *self.layers.values(), self.norm, self.output):
            x = x if part is None else part(x)
        return x


def build_model() -> nn.Module:
    """The whole model, with the same weights on every rank."""
    torch.manual_seed(0)
    try:
        args = importlib.import_module("torchtitan.models.llama3.model.args")
        titan = importlib.import_module("torchtitan.models.llama3.model.model")
    except ImportError:
        return Llama()
    arguments = args.TransformerModelArgs(
        dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, vocab_size=VOCABULARY, max_seq_len=SEQUENCE
    )
    model: Any = titan.Transformer(arguments)
    with torch.no_grad():
        model.init_weights()
    return model


def cut(model: nn.Module, number: int, count: int) -> nn.Module:
    """A copy of stage ``number`` of ``count``: the parts of the other stages are removed."""
    stage: Any = copy.deepcopy(model)
    for layer in range(LAYERS):
        if not number * LAYERS // count <= layer < (number + 1) * LAYERS // count:
            del stage.layers[str(layer)]
    if number > 0:
        stage.tok_embeddings = None
    if number < count - 1:
        stage.norm = stage.output = None
    return stage


def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens and targets of each microbatch, both int64 [samples, sequence]. They are the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(targets: Tensor, logits: Tensor) -> tuple[Tensor, float]:
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, loss.item()


def forward_step(data: Iterator[tuple[Tensor, Tensor]], stage: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    tokens, targets = next(data)
    return stage(tokens), lambda logits: loss_of(targets, logits)


def make_stages(model: nn.Module, schedule: str, virtual: int) -> list[PipelineStage]:
    """This rank's stages, as the schedule places them."""
    size = dist.get_world_size()
    config = TransformerConfig(
        num_layers=size * virtual,  # only the config's layout reads it, which this model does not use
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_schedule=schedule,
        overlap_p2p_comm=True,
    )
    numbers = stage_numbers(schedule, size, virtual)[dist.get_rank()]
    stages = [PipelineStage(cut(model, number, size * virtual), config, stage=number) for number in numbers]
    if find_family(schedule).splits_weight:
        split_weight_grad(stages)
    return stages


def pipelined_step(step: int, stages: list[PipelineStage]) -> list[float]:
    """Run a step in the pipeline. Returns the losses of all microbatches on the last stage's rank, elsewhere an empty
    list."""
    return get_forward_backward_func(dist.get_world_size(), len(stages) if len(stages) > 1 else None)(
        forward_step_func=forward_step,
        data_iterator=[batches(step) for _ in stages],
        model=stages,
        num_microbatches=MICROBATCHES,
        seq_length=SAMPLES,  # the first dimension of the tensors between stages; in Megatron it is the sequence
        micro_batch_size=SEQUENCE,  # their second dimension
    )


def whole_step(step: int, model: nn.Module) -> list[float]:
    """Run the same step in one process. Returns the losses."""
    results = [loss_of(targets, model(tokens)) for tokens, targets in batches(step)]
    for loss, _ in results:
        (loss / MICROBATCHES).backward()
    return [value for _, value in results]


def largest_difference(
    losses: list[float], expected: list[float], stages: list[PipelineStage], model: nn.Module
) -> float:
    whole = dict(model.named_parameters())
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)] if losses else []
    for stage in stages:
        for name, parameter in stage.inner.named_parameters():
            ours, theirs = parameter.grad, whole[name].grad
            assert ours is not None, f"{name} has no gradient"
            assert theirs is not None, f"{name} has no gradient in one process"
            differences.append((ours - theirs).abs().max().item())
    return max(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="compile the stages (torch.compile)")
    args = parser.parse_args()
    virtual = find_family(args.schedule).chunks or 2
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, dist.get_world_size(), virtual if virtual > 1 else None)
    model = build_model()
    stages = make_stages(model, args.schedule, virtual)
    for stage in stages if args.compile else ():
        stage.inner.compile()
    mine = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.5)
    whole = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, args.steps + 1):
        mine.zero_grad()
        whole.zero_grad()
        losses, expected = pipelined_step(step, stages), whole_step(step, model)
        difference = largest_difference(losses, expected, stages, model)
        mine.step()
        whole.step()
        mean = sum(expected) / MICROBATCHES
        kind = "torchtitan" if "torchtitan" in type(model).__module__ else "own Llama"
        print(
            f"step {step} rank {dist.get_rank()}: {kind}, loss {mean:.4f}, largest difference {difference:g}",
            flush=True,
        )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
