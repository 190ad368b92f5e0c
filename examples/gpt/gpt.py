"""A small real GPT, cut into pipeline stages.

Parameter names are those of the whole model (``layers.5.attention.qkv.weight`` for the sixth layer, wherever it lies),
so a state dict of all stages together is the state dict of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt.layers import LayerParts, RotaryEmbedding, generator_of, initialize, initialize_block
from megatron_pp.errors import ConfigError

EMBEDDING, OUTPUT = "embedding.weight", "output.weight"


def check_model_config(config: Any) -> None:
    """Raises ConfigError where heads do not divide the hidden size, or a head's size is odd."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads or (hidden // heads) % 2:
        raise ConfigError(
            f"hidden_size {hidden} over {heads} attention heads gives {hidden / heads:g} numbers a head: rotary "
            f"positions need a whole, even number; choose hidden_size as a multiple of {2 * heads}"
        )


class GPTStage(nn.Module):
    """One stage (a Megatron "model chunk") of a GPT.

    The first stage owns the token embedding, the last one the final norm and the output projection, and each the layers
    it is given, which may be none. Activations between stages have shape ``[s, b, h]`` and dtype
    ``config.pipeline_dtype`` (fp32 where that is not set).

    With ``share_embeddings_and_output_weights`` the output projection is a copy of the embedding that starts equal to
    it, even where both lie in one process: ``gradients.sum_tied_gradients`` then adds the two gradients in the same
    order however the model is cut.

    Args:
        config: sizes, ``init_method_std``, dropout and ``pipeline_dtype``, under Megatron's field names.
        layers: numbers (0-based, in the whole model) of this stage's layers, ascending.
        pre_process, post_process: this is the first, the last stage.
        vp_stage: number of this chunk on its rank, ``None`` without virtual pipelining.
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
        check_model_config(config)
        self.config, self.vp_stage = config, vp_stage
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.stream_dtype: torch.dtype = config.pipeline_dtype or torch.float32
        self.input_tensor: Tensor | None = None
        self.parts = parts or LayerParts()
        hidden, std = config.hidden_size, config.init_method_std
        self.rotary = RotaryEmbedding(hidden // config.num_attention_heads, max_sequence_length)
        if pre_process:
            self.embedding = nn.Embedding(vocab_size, hidden)
            initialize(self.embedding.weight, std, generator_of(seed, "embedding"))
        self.layers = nn.ModuleDict({str(layer): self.parts.block(config, layer) for layer in layers})
        for layer, block in self.layers.items():
            initialize_block(block, seed, int(layer), config.num_layers, std)
        if post_process:
            self.final_norm = self.parts.norm(hidden, eps=config.layernorm_epsilon)
            self.output = nn.Linear(hidden, vocab_size, bias=False)
            source = "embedding" if share_embeddings_and_output_weights else "output"
            initialize(self.output.weight, std, generator_of(seed, source))

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the previous stage's activation ``[s, b, h]``, or a list of it; ``[None]`` on the first stage."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, (list, tuple)) else input_tensor

    def set_is_first_microbatch(self) -> None:
        """Called by the schedule before a step's first microbatch: weights may have changed."""
        for block in self.layers.values():
            if hasattr(block, "is_first_microbatch"):
                block.is_first_microbatch = True  # type: ignore[assignment]

    def forward(
        self, tokens: Tensor | None = None, labels: Tensor | None = None, checkpoint_activations: bool = False
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
        logits = self.output(self.final_norm(hidden)).float()  # [s, b, vocab]
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
        return losses.view(labels.t().shape).t().contiguous()

    def _stage_input(self, tokens: Tensor | None) -> Tensor:
        if self.pre_process:
            assert tokens is not None, "the first stage needs tokens"
            # Transposed before the look-up, not after: the output is then no view, and contiguous as [s, b, h].
            return self.embedding(tokens.t()).to(self.stream_dtype)
        # Held no longer than needed: the engine counts on giving the memory back.
        hidden, self.input_tensor = self.input_tensor, None
        assert hidden is not None, "set_input_tensor has not been called"
        # An empty stage must not pass on its input itself: the engine frees outputs and keeps inputs.
        return hidden if self.layers or self.post_process else hidden.clone()


def build_gpt_chunks(
    config: Any,
    *,
    stages: Sequence[int],
    layers_of_stage: Sequence[Sequence[int]],
    device: torch.device | None = None,
    **options: Any,
) -> list[GPTStage]:
    """Build the model chunks of one rank.

    Args:
        stages: the stage that each of this rank's chunks is, in chunk order.
        layers_of_stage: for every stage of the model, the numbers of its layers.
        device: where the chunks go; the CPU by default.
        options: see GPTStage.
    """
    last = len(layers_of_stage) - 1
    chunks = [
        GPTStage(
            config,
            layers=layers_of_stage[stage],
            pre_process=stage == 0,
            post_process=stage == last,
            vp_stage=chunk if len(stages) > 1 else None,
            **options,
        )
        for chunk, stage in enumerate(stages)
    ]
    return [chunk.to(device) for chunk in chunks]
