"""The operations, activations and messages of the parts of a transformer's layers, for one microbatch on one rank.

Operations of matrix products and of attention are counted as in Megatron's ``num_floating_point_operations``
(megatron/training/training.py): 2 per multiply and add, with causal attention. Activations are those of arXiv
2205.05198 (section 4) without the dropout inside attention. For latent attention, experts and Mamba they are the inputs
that a backward reads. Collectives are those of Megatron-Core: an all-gather and a reduce-scatter around each
tensor-parallel part (arXiv 2205.05198, section 4.2.2; two all-reduces have the same bytes), keys and values around a
ring, and an all-to-all of ``topk`` copies of each token to experts and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_pp.plan.simulate.memory import NONE
from megatron_pp.tools.advise.layers.layer_sizes import LayerSizes

_SCAN = 7  # operations per token, channel and state of Mamba's scan (Megatron's count)


@dataclass(frozen=True)
class Part:
    """The forward of a part of a layer on one rank.

    modules     names of the part in ``--recompute-modules``
    flops       operations of matrix products, in 8 bits if the model has such products
    core        operations of attention
    operands    bytes that matrix products read and write, without parameters
    parameters  number of parameters on the rank, without experts
    experts     number of parameters of experts, which have fewer replicas
    moved       bytes that element-wise operations read and write; a backward moves twice as many
    kept        bytes that are kept until the backward
    late        bytes, of these and of gradients, that are kept until the weight gradients
    tensor      bytes that the rank sends in its tensor-parallel group
    context     bytes that the rank sends in its context-parallel group
    tokens      bytes of one copy of the tokens that the rank sends to experts; as many return
    """

    modules: tuple[str, ...] = ()
    flops: float = 0.0
    core: float = 0.0
    operands: float = 0.0
    parameters: float = 0.0
    experts: float = 0.0
    moved: float = 0.0
    kept: float = 0.0
    late: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    tokens: float = 0.0


def _products(model: LayerSizes, rows: float, inner: float, outer: float, *modules: str, **more: float) -> Part:
    """The product of ``rows`` tokens of width ``inner`` with a matrix of ``inner`` x ``outer``."""
    operands = rows * (inner + outer) * model.shape.element_bytes
    return Part(modules, 2 * rows * inner * outer, parameters=inner * outer, operands=operands, **more)


def _around(model: LayerSizes) -> list[Part]:
    """Normalisation, residual sum and dropout around attention or a feed-forward part, and its collectives. These are
    not tensor-parallel (10 s b h for two in arXiv 2205.05198, 4.2).
    """
    shape = model.shape
    width = model.message_tokens * shape.hidden_size * shape.element_bytes
    sent = 2 * (shape.tensor_parallel - 1) / shape.tensor_parallel * shape.tokens * shape.hidden_size
    rest = Part(moved=3 * width, kept=1.5 * width, late=2 * width, tensor=sent * shape.element_bytes)
    return [Part(("layernorm",), moved=2 * width, kept=width), rest]


def attention(model: LayerSizes, reached: int | None = None) -> list[Part]:
    """Attention, also with groups of heads that share keys and values. A query reads at most ``reached`` keys."""
    shape = model.shape
    heads = model.heads
    t = shape.tensor_parallel
    nbytes = shape.tokens * shape.element_bytes
    query = heads * model.head_dim / t
    pairs = 2 * (model.query_groups or heads) * model.head_dim / t
    each = nbytes * (query + pairs)
    rotated = 2 * nbytes * (query + pairs / 2)  # queries and keys, read and written
    into = _products(model, shape.tokens, shape.hidden_size, query + pairs, kept=each, late=each, moved=rotated)
    return [*_around(model), into, _core(model, query, query, pairs, reached), _output(model, query)]


def windowed_attention(model: LayerSizes) -> list[Part]:
    return attention(model, None if model.window is None else model.window + 1)


def _core(model: LayerSizes, query: float, value: float, pairs: float, reached: int | None = None) -> Part:
    """The two products of attention: queries with keys, and scores with values.

    ``pairs`` is the width of keys and values. They go around a ring of ranks, to all ranks, or, split by heads, through
    an all-to-all. Kernels that are not fused keep a score for each pair of tokens (5 a s s b in arXiv 2205.05198; 3 of
    the 5 are dropout's).
    """
    shape = model.shape
    ranks = model.shape.context_parallel
    pairs_of_tokens = model.heads * shape.tokens * shape.seq_length / shape.context_parallel / shape.tensor_parallel
    of_each = (2.5 if model.dropout else 1.0) * shape.element_bytes
    scores = of_each * pairs_of_tokens if shape.recompute == NONE else 0.0
    flops = 2 * shape.tokens * _keys(model, reached) * (query + value)
    width = (query + pairs + value) / ranks if model.context_comm == "a2a" else pairs
    sent = (ranks - 1) * shape.tokens * width * shape.element_bytes
    return Part(("core_attn",), core=flops, kept=scores, context=sent)


def _keys(model: LayerSizes, reached: int | None = None) -> float:
    """The mean number of keys that a query reads. Causal attention reads half of the sequence; with ``reached``, only
    the last ``reached`` keys."""
    length = model.shape.seq_length
    whole = length / 2 if model.causal else length
    return whole if reached is None or reached >= length else reached - reached**2 / (2 * length)


def _output(model: LayerSizes, width: float) -> Part:
    nbytes = model.shape.tokens * width * model.shape.element_bytes
    return _products(model, model.shape.tokens, width, model.shape.hidden_size, kept=nbytes, late=nbytes)


def latent_attention(model: LayerSizes, reached: int | None = None) -> list[Part]:
    """Queries, keys and values from latents (arXiv 2405.04434, section 2.1)."""
    shape = model.shape
    mla = model.latent
    assert mla is not None
    t = shape.tensor_parallel
    nbytes = shape.tokens * shape.element_bytes
    h = shape.hidden_size
    outside = t if shape.sequence_parallel else 1
    query = model.heads * (mla.qk_head_dim + mla.rotary_dim) / t
    value = model.heads * mla.v_head_dim / t
    unrotated = model.heads * mla.qk_head_dim / t
    # The products into latents are not split over ranks, but sequence parallelism splits their tokens.
    latents = mla.q_rank + mla.kv_rank + mla.rotary_dim
    small = nbytes * latents / outside
    into = _products(model, shape.tokens / outside, h, latents, kept=2 * small, late=small, moved=4 * small)
    above = nbytes * (query + value)
    queries = _products(model, shape.tokens, mla.q_rank or h, query, "mla_up_proj", kept=nbytes * query)
    pairs = _products(model, shape.tokens, mla.kv_rank, unrotated + value, "mla_up_proj", kept=above)
    rotated = 2 * nbytes * query  # queries, and the joined keys, are read and written
    up = [replace(one, late=one.kept, moved=rotated) for one in (queries, pairs)]
    core = _core(model, query, value, query + value, reached)
    return [*_around(model), into, *up, core, _output(model, value)]


def sparse_attention(model: LayerSizes) -> list[Part]:
    """Latent attention to the keys that an indexer chooses (DeepSeek-V3.2-Exp, section 2.1). The kernel reads only
    these keys. The indexer is not split over tensor-parallel ranks. It is trained by its own loss, which is not
    counted.
    """
    shape = model.shape
    indexer = model.indexer
    assert model.latent is not None
    width = indexer.heads * indexer.dim
    rows = shape.tokens
    into = indexer.dim + indexer.heads
    queries = _products(model, rows, model.latent.q_rank or shape.hidden_size, width)
    scores = Part(core=2 * rows * _keys(model) * width)
    return [*latent_attention(model, indexer.topk), queries, _products(model, rows, shape.hidden_size, into), scores]


def _feed_forward(model: LayerSizes, rows: float, width: float, *modules: str) -> list[Part]:
    """The products of a feed-forward part with ``width`` on this rank, and the activation function between them."""
    h = model.shape.hidden_size
    gate = 2 if model.gated else 1
    nbytes = rows * model.shape.element_bytes * width
    first = _products(model, rows, h, gate * width, *modules, kept=gate * nbytes, late=gate * nbytes)
    second = _products(model, rows, width, h, *modules)
    act = Part(modules, moved=(gate + 1) * nbytes, kept=nbytes, late=nbytes)
    return [first, act, second]


def dense(model: LayerSizes) -> list[Part]:
    width = model.ffn / model.shape.tensor_parallel
    return [*_around(model), *_feed_forward(model, model.shape.tokens, width, "mlp")]


def moe(model: LayerSizes) -> list[Part]:
    """Routed experts with equal load, and the shared expert. Each rank sends its own tokens, which are split by
    sequence parallelism. Ranks that split experts (expert tensor parallelism) gather their tokens.
    """
    shape = model.shape
    h = model.moe_latent or model.shape.hidden_size
    nbytes = shape.element_bytes
    copies = model.top_k
    rows = model.shape.tokens / shape.tensor_parallel * copies * model.expert_tensor
    width = model.expert_width / model.expert_tensor
    first, act, second = _feed_forward(replace(model, shape=replace(shape, hidden_size=h)), rows, width, "moe")
    held = model.experts / model.expert_parallel
    first, second = (replace(one, parameters=0.0, experts=one.parameters * held) for one in (first, second))
    permuted = rows * h * nbytes
    own = model.message_tokens * h * nbytes
    passes = 2 if model.once else 6  # tokens are sorted before and after an all-to-all
    sends = Part(("moe",), moved=2 * own + passes * permuted, kept=permuted, late=permuted, tokens=own)
    if model.expert_tensor > 1:
        sends = replace(sends, tensor=2 * (model.expert_tensor - 1) / model.expert_tensor * permuted)
    router = _products(model, model.message_tokens, shape.hidden_size, model.experts, "moe")
    act = replace(act, modules=(*act.modules, "moe_act"))
    parts = [*_around(model), router, sends, first, act, second]
    if model.moe_latent:
        parts.append(_products(model, model.message_tokens, shape.hidden_size, 2 * h, "moe"))
    if model.shared_hidden:
        split = model.shared_hidden / shape.tensor_parallel
        parts += _feed_forward(model, shape.tokens, split, "moe", "shared_experts")
    return parts


def mamba(model: LayerSizes) -> list[Part]:
    """A Mamba-2 mixer (arXiv 2405.21060). The time of its scan is mainly that of reading and writing."""
    shape = model.shape
    sizes = model.mamba
    t = model.shape.tensor_parallel
    inner = (sizes.heads * sizes.head_dim if sizes.heads else 2 * shape.hidden_size) / t
    heads = inner / sizes.head_dim
    states = 2 * sizes.groups * sizes.state_dim / t
    nbytes = shape.tokens * shape.element_bytes
    wide = 2 * inner + states + heads
    into = _products(model, shape.tokens, shape.hidden_size, wide, kept=nbytes * wide, late=nbytes * wide)
    flops = _SCAN * shape.tokens * inner * sizes.state_dim
    moved = nbytes * (6 * inner + 4 * states)
    scan = Part(core=flops, moved=moved, kept=nbytes * (2 * inner + states))
    return [*_around(model), into, scan, _output(model, inner)]


def gated_delta_net(model: LayerSizes) -> list[Part]:
    """Linear attention (arXiv 2412.06464), with Megatron's count of its convolution and delta rule."""
    shape = model.shape
    sizes = model.linear
    t = model.shape.tensor_parallel
    keys = sizes.key_heads * sizes.key_dim / t
    values = sizes.value_heads * sizes.value_dim / t
    wide = 2 * keys + 2 * values + 2 * sizes.value_heads / t
    nbytes = shape.tokens * shape.element_bytes
    into = _products(model, shape.tokens, shape.hidden_size, wide, kept=nbytes * wide, late=nbytes * wide)
    each = sizes.conv * (2 * keys + values) + 4 * values * sizes.value_dim
    moved = 4 * (2 * keys + values)  # the convolution and the rule both read and write
    rule = Part(core=2 * shape.tokens * each, moved=nbytes * moved, kept=nbytes * (2 * keys + 2 * values))
    return [*_around(model), into, rule, _output(model, values)]


MIXERS = {
    "M": mamba,
    "G": gated_delta_net,
    "*": attention,
    "+": latent_attention,
    "D": sparse_attention,
    "-": dense,
    "E": moe,
    "w": windowed_attention,
}
"""Letter of Megatron's ``--hybrid-layer-pattern`` -> the parts of such a layer; and ``w`` for windowed attention."""
