"""A small real GPT, cut into pipeline stages.

Parameter names are the names of the whole model (``layers.5.attention.qkv.weight`` for the sixth layer, wherever it
lies), so names never clash between stages and a state dict of all stages together is the state dict of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt.blocks import RotaryEmbedding
from examples.gpt.initialization import initialize_block, initialize_matrix, layer_generator
from examples.gpt.parts import LayerParts, LocalParts
from megatron_pp.errors import ConfigError

EMBEDDING = "embedding.weight"
OUTPUT = "output.weight"


def check_model_config(config: Any) -> None:
    """Refuse sizes that this model cannot have.

    Raises:
        ConfigError: heads do not divide the hidden size, or a head's size is odd.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads or (hidden // heads) % 2:
        raise ConfigError(
            f"hidden_size {hidden} over {heads} attention heads gives {hidden / heads:g} numbers a head: rotary "
            f"positions need a whole, even number; choose hidden_size as a multiple of {2 * heads}"
        )


class GPTStage(nn.Module):
    """One stage (a Megatron "model chunk") of a GPT.

    The first stage owns the token embedding, the last one the final norm and the output projection, and each
    the layers it is given, which may be none. Activations between stages have shape ``[s, b, h]`` and dtype
    ``config.pipeline_dtype`` (fp32 where that is not set).

    With ``share_embeddings_and_output_weights`` the output projection is a copy of the embedding that starts equal to
    it. It is a copy even where both lie in one process: the two gradients are then added in the same order however
    the model is cut, by :func:`examples.gpt.tied_embeddings.sum_tied_gradients`, once a step.

    Args:
        config: sizes, ``init_method_std``, dropout and ``pipeline_dtype``, under Megatron's field names.
        vocab_size: number of tokens.
        max_sequence_length: longest sequence.
        layers: numbers (0-based, in the whole model) of this stage's layers, ascending.
        pre_process: this is the first stage.
        post_process: this is the last stage.
        share_embeddings_and_output_weights: tie the embedding and the output projection.
        vp_stage: number of this chunk on its rank, ``None`` without virtual pipelining.
        seed: seed of the initial weights.
        parts: what its layers are built from; torch's own by default.

    Raises:
        ConfigError: see :func:`check_model_config`.
    """

    def __init__(
        self,
        config: Any,
        *,
        vocab_size: int,
        max_sequence_length: int,
        layers: Sequence[int],
        pre_process: bool,
        post_process: bool,
        share_embeddings_and_output_weights: bool = True,
        vp_stage: int | None = None,
        seed: int = 0,
        parts: LayerParts | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.vp_stage = vp_stage
        self.pre_process = pre_process
        self.post_process = post_process
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.stream_dtype: torch.dtype = config.pipeline_dtype or torch.float32
        self.input_tensor: Tensor | None = None
        self.parts: LayerParts = parts or LocalParts()

        check_model_config(config)
        hidden, heads = config.hidden_size, config.num_attention_heads
        if pre_process:
            self.embedding = nn.Embedding(vocab_size, hidden)
        self.rotary = RotaryEmbedding(hidden // heads, max_sequence_length)
        self.layers = nn.ModuleDict({str(layer): self.parts.block(config, layer) for layer in layers})
        if post_process:
            self.final_norm = self.parts.norm(hidden, config.layernorm_epsilon)
            self.output = nn.Linear(hidden, vocab_size, bias=False)
        self._initialize(seed)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the previous stage's activation ``[s, b, h]``, or a list of it; ``[None]`` on the first stage."""
        if isinstance(input_tensor, (list, tuple)):
            (input_tensor,) = input_tensor
        self.input_tensor = input_tensor

    def set_is_first_microbatch(self) -> None:
        """Said by the schedule before a step's first microbatch: weights may have changed since the last one."""
        for block in self.layers.values():
            if hasattr(block, "is_first_microbatch"):
                block.is_first_microbatch = True  # type: ignore[assignment]

    def forward(
        self,
        tokens: Tensor | None = None,
        labels: Tensor | None = None,
        checkpoint_activations: bool = False,
    ) -> Tensor:
        """Run the stage on one microbatch.

        Args:
            tokens: int64 ``[b, s]``; read by the first stage only.
            labels: int64 ``[b, s]``, the token after each of ``tokens``; read by the last stage only.
            checkpoint_activations: keep only each layer's input and compute the rest again in backward.

        Returns:
            An activation ``[s, b, h]``; on the last stage the loss of each token, fp32 ``[b, s]``, or logits
            ``[b, s, vocab]`` when there are no labels.
        """
        hidden = self._stage_input(tokens)
        with self.parts.forward_context():
            for block in self.layers.values():
                if checkpoint_activations:
                    hidden = self.parts.checkpointed(block, hidden, self.rotary)
                else:
                    hidden = block(hidden, self.rotary)
        if not self.post_process:
            return hidden
        return self._loss_or_logits(hidden, labels)

    def _stage_input(self, tokens: Tensor | None) -> Tensor:
        if self.pre_process:
            assert tokens is not None, "the first stage needs tokens"
            # Transposed before the look-up, not after: the output is then no view, and contiguous as [s, b, h].
            return self.embedding(tokens.t()).to(self.stream_dtype)
        hidden = self.input_tensor
        # Held no longer than needed: the engine counts on giving the memory back.
        self.input_tensor = None
        assert hidden is not None, "set_input_tensor has not been called"
        if not self.layers and not self.post_process:
            # An empty stage must not hand on its input itself: the engine frees outputs and keeps inputs.
            return hidden.clone()
        return hidden

    def _loss_or_logits(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        logits = self.output(self.final_norm(hidden)).float()  # [s, b, vocab]
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
        return losses.view(labels.t().shape).t().contiguous()

    def _initialize(self, seed: int) -> None:
        std = self.config.init_method_std
        for layer, block in self.layers.items():
            initialize_block(block, seed, int(layer), self.config.num_layers, std)
        if self.pre_process:
            initialize_matrix(self.embedding.weight, std, layer_generator(seed, "embedding"))
        if self.post_process:
            source = "embedding" if self.share_embeddings_and_output_weights else "output"
            initialize_matrix(self.output.weight, std, layer_generator(seed, source))


def build_gpt_chunks(
    config: Any,
    *,
    stages: Sequence[int],
    layers_of_stage: Sequence[Sequence[int]],
    vocab_size: int,
    max_sequence_length: int,
    share_embeddings_and_output_weights: bool = True,
    seed: int = 0,
    device: torch.device | None = None,
    parts: LayerParts | None = None,
) -> list[GPTStage]:
    """Build the model chunks of one rank.

    Args:
        config: see :class:`GPTStage`.
        stages: the stage that each of this rank's chunks is, in chunk order. For the loop placement chunk ``c`` of rank
            ``r`` is stage ``c * P + r``; any other placement works too.
        layers_of_stage: for every stage of the model, the numbers of its layers.
        vocab_size, max_sequence_length, share_embeddings_and_output_weights, seed, parts: see :class:`GPTStage`.
        device: where the chunks go; the CPU by default.

    Raises:
        ValueError: a stage is out of range or named twice, or ``layers_of_stage`` does not place every layer exactly
            once and in order.
    """
    placed = [layer for layers in layers_of_stage for layer in layers]
    if placed != list(range(config.num_layers)):
        raise ValueError(
            f"layers_of_stage must place layers 0..{config.num_layers - 1} once each, in order; got {placed}"
        )
    last = len(layers_of_stage) - 1
    if len(set(stages)) != len(stages) or any(not 0 <= stage <= last for stage in stages):
        raise ValueError(f"stages must be different numbers from 0 to {last}; got {list(stages)}")
    chunks = [
        GPTStage(
            config,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            layers=layers_of_stage[stage],
            pre_process=stage == 0,
            post_process=stage == last,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            vp_stage=chunk if len(stages) > 1 else None,
            seed=seed,
            parts=parts,
        )
        for chunk, stage in enumerate(stages)
    ]
    return [chunk.to(device) for chunk in chunks] if device is not None else chunks
