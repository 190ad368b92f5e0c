"""The sizes of a transformer's layers, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_pp.plan.simulate.memory import ModelShape


@dataclass(frozen=True)
class Latent:
    """Ranks and widths of multi-latent attention, with Megatron's names. If ``q_rank`` is 0, queries have no latent."""

    q_rank: int = 512
    kv_rank: int = 512
    qk_head_dim: int = 128
    rotary_dim: int = 64
    v_head_dim: int = 128


@dataclass(frozen=True)
class Mamba:
    """Sizes of a Mamba-2 mixer. If ``heads`` is 0, the heads together have twice the hidden size."""

    state_dim: int = 128
    head_dim: int = 64
    groups: int = 8
    heads: int = 0


@dataclass(frozen=True)
class Linear:
    """Heads of linear attention, with Megatron's names. ``conv`` is the width of its convolution."""

    key_dim: int = 128
    value_dim: int = 128
    key_heads: int = 16
    value_heads: int = 32
    conv: int = 4


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexer, which chooses ``topk`` earlier tokens for each query of sparse attention."""

    heads: int = 64
    dim: int = 128
    topk: int = 2048


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the layers of a decoder-only or hybrid model, before any parallel split.

    shape              sizes, parallel ranks and micro-batch; its ``ffn_hidden_size`` is the width of dense layers
    gated              SwiGLU or similar: three products in the feed-forward part
    query_groups       number of heads of keys and values; None: as many as heads
    kv_channels        width of a head; None: the hidden size divided by the heads
    latent             sizes of multi-latent attention; None: the model has ordinary attention
    mamba, linear, indexer  sizes of these mixers
    window             keys that a query of windowed attention reads before its own; None: no window
    mixers             each layer's attention, by the letters of MIXERS; empty: all layers have the same
    experts            number of experts in an MoE layer; 0: all layers are dense
    top_k              number of experts of a token
    expert_hidden      width of an expert
    shared_hidden      width of the shared expert
    moe_latent         width of the tokens that experts get; 0: the hidden size
    moe_layers         1 for each MoE layer, 0 for each dense layer, in model order
    expert_parallel    number of ranks that share the experts
    expert_split       number of ranks that split each expert; None: as many as split tensors
    groups             (groups that a token's experts may be from, groups of experts), if routing is limited to groups
    once               a token is sent once to a domain or rank, also if several of its experts are there (flex)
    hides              (experts, tensors): whether Megatron runs their collectives during computation
    context_comm       p2p, all_gather or a2a
    modules            names in ``--recompute-modules``
    fp8                matrix products of layers have 8 bits
    pattern            letters of a hybrid model's layers; empty: each layer is attention and a feed-forward part
    mtp_layers         number of layers for multi-token prediction
    mtp_pattern        letters of each such layer in a hybrid model
    spread_mtp         these layers and their losses may be on different stages (NVIDIA/Megatron-LM#5318 and #5329);
                       otherwise the losses are on the last stage
    causal             attention reads earlier tokens only
    dropout            attention drops scores, if its kernels are not fused
    """

    shape: ModelShape
    gated: bool = False
    query_groups: int | None = None
    experts: int = 0
    top_k: int = 1
    expert_hidden: int | None = None
    shared_hidden: int = 0
    moe_layers: tuple[int, ...] = ()
    expert_parallel: int = 1
    mtp_layers: int = 0
    spread_mtp: bool = False
    kv_channels: int | None = None
    latent: Latent | None = None
    mamba: Mamba = field(default_factory=Mamba)
    linear: Linear = field(default_factory=Linear)
    indexer: Indexer = field(default_factory=Indexer)
    window: int | None = None
    mixers: str = ""
    moe_latent: int = 0
    expert_split: int | None = None
    groups: tuple[int, int] = (0, 0)
    once: bool = False
    hides: tuple[bool, bool] = (False, False)
    context_comm: str = "p2p"
    modules: frozenset[str] = frozenset()
    fp8: bool = False
    pattern: str = ""
    mtp_pattern: str = ""
    causal: bool = True
    dropout: bool = True

    @property
    def heads(self) -> int:
        return self.shape.num_attention_heads or 1

    @property
    def head_dim(self) -> float:
        return self.kv_channels or self.shape.hidden_size / self.heads

    @property
    def ffn(self) -> int:
        return self.shape.ffn_hidden_size or 4 * self.shape.hidden_size

    @property
    def expert_width(self) -> int:
        return self.expert_hidden or self.ffn

    @property
    def expert_tensor(self) -> int:
        return self.expert_split or self.shape.tensor_parallel

    @property
    def message_tokens(self) -> float:
        """The tokens of a rank in the parts that are not tensor-parallel."""
        return self.shape.tokens / (self.shape.tensor_parallel if self.shape.sequence_parallel else 1)
