"""A vision-language model whose encoder runs in the bubbles of the language model's pipeline.

A model of the size of Qwen2.5-VL 72B on 128 GPUs: TP 8, PP 4, DP 4. A sample has 12 images of 448 x 448 pixels, 256
tokens each, and 1,024 tokens of text. Every pipeline rank holds the whole encoder, and encodes a quarter of each
sample's images while its part of the language model is idle. Sizes: arXiv 2502.13923, table 1. The encoder
here is Megatron's vision transformer. It lacks that model's attention windows.

Each rank makes a ``VisionLanguageModel`` in Megatron's process groups, then calls ``step`` for each training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_pp.features.modules.graph import Module

GPUS, GPU, PIPELINES = 128, "h100", 4
LANGUAGE = """
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 29568 --num-attention-heads 64 --group-query-attention
    --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 --position-embedding-type rope
    --rotary-base 1000000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
    --vocab-size 151673 --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
    --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer --lr 4e-5 --train-iters 10000
"""
VISION = """
    --num-layers 32 --hidden-size 1280 --ffn-hidden-size 3456 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --normalization RMSNorm --swiglu --attention-dropout 0 --hidden-dropout 0 --bf16
    --tensor-model-parallel-size 8 --use-distributed-optimizer --lr 4e-5 --train-iters 10000
"""
IMAGES, PIXELS, PATCH = 12, 448, 14


def modules(stages: Sequence[Sequence[int]], times: Sequence[tuple[float, float]] = ((1, 2), (4, 8))) -> list[Module]:
    """The two modules on one pipeline. ``stages``: the tensor-parallel ranks of each stage, as ranks of the job.
    ``times``: forward and backward of one microbatch on a stage, for the encoder (with its share of the images) and for
    the language model. The order of compute is searched for these times."""
    vision, language = times
    ranks = [tuple(stage) for stage in stages]
    return [
        Module("vision", tuple((stage,) for stage in ranks), times=vision),
        Module("language", (tuple(ranks),), chunk=1, times=language),
    ]


class Encoder(torch.nn.Module):
    """Megatron's vision transformer without a class token. After it a pixel shuffle makes one token of four patches,
    and two linear layers give the language model's width."""

    def __init__(self, vit: torch.nn.Module, config: Any, width: int) -> None:
        super().__init__()
        self.vit, self.config = vit, config
        hidden = 4 * config.hidden_size
        self.projector = torch.nn.Sequential(
            torch.nn.LayerNorm(hidden), torch.nn.Linear(hidden, width), torch.nn.GELU(), torch.nn.Linear(width, width)
        )

    def set_input_tensor(self, given: Any) -> None:
        """Does nothing: the encoder reads data, not an earlier stage's output."""

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """``images``: [n, 3, pixels, pixels]. Returns [tokens of an image, n, width]."""
        patches = self.vit(images)
        count, length, hidden = patches.shape
        side = int(length**0.5)
        squares = patches.reshape(count, side // 2, 2, side // 2, 2, hidden).transpose(2, 3)
        tokens = self.projector(squares.reshape(count, length // 4, 4 * hidden))
        return {"vision": tokens.transpose(0, 1).contiguous()}


class Language(torch.nn.Module):
    """A stage of Megatron's GPTModel, made with ``scatter_embedding_sequence_parallel=False``. Images precede the
    text."""

    def __init__(self, gpt: Any, config: Any) -> None:
        super().__init__()
        self.gpt: Any = gpt  # torch's types lack the methods of Megatron's model
        self.config = config
        self.images: torch.Tensor | None = None

    def set_input_tensor(self, given: list[dict[str, torch.Tensor]]) -> None:
        (tensors,) = given
        self.images = tensors.get("vision")
        if self.images is None:
            self.gpt.set_input_tensor(tensors["language"])

    def forward(self, batch: Batch) -> Any:
        """The loss of each token on the last stage, an activation elsewhere."""
        from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

        decoder_input = None
        if self.images is not None:
            length, count, width = self.images.shape
            images = self.images.transpose(0, 1).reshape(length * count, 1, width)
            text = self.gpt.embedding(batch.tokens, torch.arange(batch.tokens.shape[1])[None])
            decoder_input = torch.cat([images, text])
            if self.config.sequence_parallel:
                decoder_input = scatter_to_sequence_parallel_region(decoder_input)
        output = self.gpt(batch.tokens, None, None, decoder_input=decoder_input, labels=batch.labels)
        return output if self.gpt.post_process else {"language": output}


@dataclass(frozen=True)
class Batch:
    """One microbatch of one sample. ``images``: this rank's share. ``tokens``: those of the text, [1, length].
    ``labels`` and ``mask``: for images and text."""

    images: torch.Tensor
    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


class VisionLanguageModel:
    """The model on one rank. ``pipelines``: the stages of each pipeline of the job, as in ``modules``. Every rank makes
    the process groups of all pipelines."""

    def __init__(self, pipelines: Sequence[Sequence[Sequence[int]]], encoder: Encoder, language: Language) -> None:
        import torch.distributed as dist

        from megatron_pp.features.modules.modules_step import ModulesPipeline

        self.pipeline: Any = None
        for stages in pipelines:
            made = ModulesPipeline(modules(stages), {"vision": ["language"]})
            if any(dist.get_rank() in stage for stage in stages):
                self.pipeline = made
        self.chunks = [encoder, language]

    def step(self, batches: Sequence[Batch]) -> list[Any]:
        """Run the forwards and backwards of one step. The encoder's gradients are those of the images that this rank
        has encoded; they are summed over the pipeline. Returns the losses on the last stage."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        from megatron_pp.features.modules.modules_step import forward_backward_modules

        reports = forward_backward_modules(
            self.pipeline,
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
        )
        group = parallel_state.get_pipeline_model_parallel_group()
        for parameter in self.chunks[0].parameters():
            dist.all_reduce(parameter.grad, group=group)
        return reports


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, Any]:
    batch = next(batches)
    output = model(batch.images if isinstance(model, Encoder) else batch)

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = (output.float() * batch.mask).sum() / batch.mask.sum()
        return loss, {"loss": loss.item()}

    return output, loss_func
