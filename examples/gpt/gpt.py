"""A GPT in pipeline stages. Activations are ``[s, b, h]``. Parameters have their names in the whole model."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_pp import SplitOutputLayer, sequence_slice
from megatron_pp.features.slices.sequence_slice import SequenceSlice

EMBEDDING, OUTPUT, OUTPUT_ROWS = "embedding.weight", "output.weight", "output_rows."
ROTARY_BASE = 10000.0


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., 2104.09864, section 3.2.2), the half-split form; ``head_dim`` is even."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_sequence_length: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(max_sequence_length, dtype=torch.float64)[:, None] * frequencies[None, :]
        # Not saved, because every stage computes the same tables.
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """``x`` with rotated positions. It is ``[b, heads, s, head_dim]``, and its first token has number ``start``."""
        cos, sin = (table[start : start + x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: RotaryEmbedding, part: SequenceSlice | None = None) -> Tensor:
        """``x`` is ``[s, b, h]``. A slice also uses the keys and values of the slices before it."""
        s, b, h = x.shape
        # [s, b, 3h] -> three times [b, heads, s, head_dim]
        qkv = self.qkv(x).view(s, b, 3, self.num_heads, h // self.num_heads)
        query, key, value = qkv.permute(2, 1, 3, 0, 4).unbind(0)
        start = 0 if part is None else part.start
        query, key = rotary(query, start), rotary(key, start)
        if part is not None:
            key, value = part.extend(self, key, value, dim=2)
        mask = causal_rows(start, start + s, query.dtype, query.device) if start else None
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None)
        return self.proj(context.permute(2, 0, 1, 3).reshape(s, b, h))


@lru_cache(maxsize=64)
def causal_rows(start: int, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The causal mask ``[stop - start, stop]`` of the tokens from ``start``. It is cached, because each use saves it
    for backward."""
    return torch.full((stop - start, stop), -math.inf, dtype=dtype, device=device).triu_(start + 1)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: Any, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.layernorm_epsilon
        self.attention_norm = norm(hidden, eps=epsilon)
        self.attention = CausalSelfAttention(hidden, config.num_attention_heads, config.attention_dropout)
        self.feed_forward_norm = norm(hidden, eps=epsilon)
        up = nn.Linear(hidden, config.ffn_hidden_size, bias=False)
        down = nn.Linear(config.ffn_hidden_size, hidden, bias=False)
        self.feed_forward = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))
        self.hidden_dropout = config.hidden_dropout

    def forward(self, x: Tensor, rotary: RotaryEmbedding, part: SequenceSlice | None = None) -> Tensor:
        """The result has the dtype of ``x``, also under autocast, because the next stage expects that dtype."""
        x = x + dropped(self, self.attention(self.attention_norm(x), rotary, part)).to(x.dtype)
        return x + dropped(self, self.feed_forward(self.feed_forward_norm(x))).to(x.dtype)


def dropped(block: Any, branch: Tensor) -> Tensor:
    """``branch`` after the dropout of ``block``, before it is added to the residual stream."""
    return F.dropout(branch, block.hidden_dropout, block.training) if block.hidden_dropout else branch


class LayerParts:
    """The parts of a GPT stage, made of torch's modules. TransformerEngineParts has the same methods."""

    def __init__(self, norm: Callable[..., nn.Module] = nn.LayerNorm) -> None:
        self.norm = norm
        self.replicas: Any = None  # process group of the ranks with the same weights; None: no other rank has them

    def block(self, config: Any, layer: int) -> nn.Module:
        """Layer ``layer`` (0-based, in the whole model). It is called with ``(hidden [s, b, h], rotary, slice or
        None)``."""
        return Block(config, self.norm)

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context in which the layers of one forward of the stage run."""
        return nullcontext()

    def checkpointed(self, block: nn.Module, *inputs: Any) -> Tensor:
        """``block(*inputs)``. It keeps only its inputs, and is computed again in backward."""
        return checkpoint(block, *inputs, use_reentrant=False)


def seed_of(*parts: object) -> int:
    """A seed made of ``parts``, by a hash, so that neighbouring seeds and layers draw unrelated numbers."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _initialize(block: nn.Module, std: float, seed: int, name: str, num_layers: int = 0) -> None:
    """Draw the matrices of the part ``name`` of the model, in fp32 on the CPU. They do not depend on how the model is
    cut. Matrices that write to the residual stream get ``std / sqrt(2 * num_layers)`` (GPT-2 report, section 2.3)."""
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    for own_name, parameter in block.named_parameters():
        if parameter.dim() > 1:
            writes_to_stream = own_name.endswith(("proj.weight", "down.weight", "fc2_weight"))
            scale = std / math.sqrt(2 * num_layers) if writes_to_stream else std
            parameter.detach().copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * scale)


class GPTStage(nn.Module):
    """One stage of a GPT: the token embedding (``pre_process``), layers by their numbers in the whole model, the final
    norm and the output projection (``post_process``).

    Activations between stages have dtype ``config.pipeline_dtype`` (fp32 if not set). A shared output projection is a
    copy, even in one process. So ``optimizer.sum_tied_gradients`` adds the gradients in the same order, however the
    model is cut. ``output_split``: the pipeline rank and size, if each rank has its rows of the output projection."""

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
        output_split: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.vp_stage, self.seed = config, vp_stage, seed
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.stream_dtype: torch.dtype = config.pipeline_dtype or torch.float32
        self.input_tensor: Tensor | None = None
        self.parts = parts or LayerParts()
        hidden, std = config.hidden_size, config.init_method_std
        self.rotary = RotaryEmbedding(hidden // config.num_attention_heads, max_sequence_length)
        if pre_process:
            self.embedding = nn.Embedding(vocab_size, hidden)
            _initialize(self.embedding, std, seed, "embedding")
        self.layers = nn.ModuleDict({str(layer): self.parts.block(config, layer) for layer in layers})
        for layer, block in self.layers.items():
            _initialize(block, std, seed, f"layers.{layer}", config.num_layers)
        if post_process:
            self.final_norm = self.parts.norm(hidden, eps=config.layernorm_epsilon)
        self.output_rows = nn.ModuleDict()
        if post_process or output_split is not None:
            output = nn.Linear(hidden, vocab_size, bias=False)
            _initialize(output, std, seed, "embedding" if share_embeddings_and_output_weights else "output")
            if output_split is None:
                self.output = output
            else:
                rows = SplitOutputLayer(hidden, vocab_size, *output_split)
                with torch.no_grad():
                    rows.weight.copy_(output.weight[rows.rows.start : rows.rows.stop])
                self.output_rows[str(output_split[0])] = rows

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Called by the schedule with the previous stage's activation, or a list of it."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, (list, tuple)) else input_tensor

    def set_is_first_microbatch(self) -> None:
        """Called by the schedule before a step's first microbatch: weights may have changed."""
        for block in self.layers.values():
            block.is_first_microbatch = True  # type: ignore[assignment]  # only Transformer Engine's blocks read it

    def forward(
        self, tokens: Tensor | None = None, labels: Tensor | None = None, microbatch: int = 0, recompute: bool = False
    ) -> Tensor:
        """Run the stage on one microbatch, or on the slice that the engine computes now (``sequence_slice``).

        ``tokens`` and ``labels`` are int64 ``[b, s]``. ``microbatch`` is its number in the run, which decides dropout's
        numbers. Returns an activation. If the output is not split, the last stage returns the loss of each token, fp32
        or wider ``[b, s]``, or without labels the logits ``[b, s, vocab]``."""
        part = sequence_slice()
        if part is not None:
            tokens, labels = (None if given is None else part.of(given, 1) for given in (tokens, labels))
        hidden = self._stage_input(tokens)
        draws = self.training and (self.config.hidden_dropout or self.config.attention_dropout)
        with self.parts.forward_context():
            for layer, block in self.layers.items():
                if draws:
                    which = [] if part is None else [f"slice {part.index} of {part.count}"]
                    torch.manual_seed(seed_of(self.seed, "dropout", microbatch, layer, *which))
                inputs = hidden, self.rotary, part
                hidden = self.parts.checkpointed(block, *inputs) if recompute else block(*inputs)
        for rows in self.output_rows.values():  # only this rank's part if the output layer is split
            assert labels is not None, "a split output layer returns losses, not logits: give labels"
            return rows(self.final_norm(hidden).to(self.stream_dtype) if self.post_process else hidden, labels.t())
        if not self.post_process:
            return hidden
        logits = self.output(self.final_norm(hidden))  # [s, b, vocab]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
        return losses.view(labels.t().shape).t().contiguous()

    def _stage_input(self, tokens: Tensor | None) -> Tensor:
        if self.pre_process:
            assert tokens is not None, "the first stage needs tokens"
            # Transposed before the look-up, so that the output is contiguous as [s, b, h] and not a view.
            return self.embedding(tokens.t()).to(self.stream_dtype)
        # Dropped as soon as possible: the engine relies on freeing its memory.
        hidden, self.input_tensor = self.input_tensor, None
        assert hidden is not None, "set_input_tensor has not been called"
        # An empty stage must not return its own input: the engine frees outputs and keeps inputs.
        return hidden if self.layers or self.post_process else hidden.clone()


def build_gpt_chunks(
    config: Any,
    *,
    stages: Sequence[int],
    layers_of_stage: Sequence[Sequence[int]],
    device: torch.device | None = None,
    **options: Any,
) -> list[GPTStage]:
    """The model chunks of one rank, with ``options`` of GPTStage. ``stages``: the stage of each chunk.
    ``layers_of_stage``: the layer numbers of every stage of the model."""
    chunks = []
    for chunk, stage in enumerate(stages):
        options |= {"pre_process": stage == 0, "post_process": stage == len(layers_of_stage) - 1}
        vp_stage = chunk if len(stages) > 1 else None
        chunks.append(GPTStage(config, layers=layers_of_stage[stage], vp_stage=vp_stage, **options).to(device))
    return chunks
