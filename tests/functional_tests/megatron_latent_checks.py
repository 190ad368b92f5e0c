"""Compares Megatron-core's multi-latent attention on two tensor-parallel ranks with one process of the same weights, to
find which gradients differ. The checks run on ranks, in the processes of testkit/megatron/runner.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer import multi_latent_attention as latent
from torch import Tensor

from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case

SEQUENCE, BATCH, HIDDEN, HEADS, Q_RANK, KV_RANK, ROTARY = 8, 2, 32, 4, 16, 8, 4
PLAIN, ENGINE, FUSED = "plain layers", "as with Transformer Engine", "one down-projection"
"""How the attention is built: of Megatron's plain layers, as the CPU stand-in does, and with --mla-down-proj-fusion."""
KEY = "rotary rows"


def attention(case: Case, form: str, sequence: bool) -> tuple[MLATransformerConfig, Any]:
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        q_lora_rank=Q_RANK,
        kv_lora_rank=KV_RANK,
        qk_head_dim=8,
        qk_pos_emb_head_dim=ROTARY,
        v_head_dim=8,
        rope_type="rope",
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=sequence and case.tp > 1,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm")
    layers, kind = copy.copy(spec.submodules.self_attention.submodules), latent.MLASelfAttention
    if form == FUSED:
        kind, layers.linear_qkv_down_proj = latent.FusedMLASelfAttention, ColumnParallelLinear
    own: Any = contextlib.nullcontext()
    if form == PLAIN:  # without the changes of the stand-in
        own = mock.patch.object(latent.MLASelfAttention, "__init__", latent.MLASelfAttention.__init__.__wrapped__)
    with own:
        return config, kind(config, layers, 1, **spec.submodules.self_attention.params)


def order_of(name: str, ranks: int) -> Tensor:
    """Return the rows of the whole weight in the order of the shards. A shard of the projection to both latents has
    rows of each."""
    if "linear_qkv_down" not in name:
        return torch.arange(0)
    parts = torch.arange(Q_RANK + KV_RANK + ROTARY).split([Q_RANK, KV_RANK + ROTARY])
    return torch.cat([piece for pieces in zip(*(part.chunk(ranks) for part in parts), strict=True) for piece in pieces])


@contextlib.contextmanager
def summed_key(on: bool) -> Iterator[None]:
    """Apply the fix of Megatron-LM#6839: the gradient of the key that all heads share is summed over the ranks."""
    rotate = latent.apply_rotary_pos_emb

    def summed(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return rotate(
            copy_to_tensor_model_parallel_region(values) if values.shape[-2] == 1 else values, *args, **kwargs
        )

    with mock.patch.object(latent, "apply_rotary_pos_emb", summed if on else rotate):
        yield


def gradients(case: Case, form: str, sequence: bool, mended: bool = False) -> dict[str, Tensor]:
    """Return the gradients of one microbatch after `finalize_model_grads`, by parameter, and that of the input as
    "input". Gradients of weights that are split are gathered."""
    megatron_lab.set_up_parallel_state(case)
    config, model = attention(case, form, sequence)
    rank, group = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_group()
    for name, parameter in model.named_parameters():
        whole = values_of(name, parameter, case.tp)
        order = order_of(name, case.tp)
        whole = whole[order] if len(order) else whole
        split = case.tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        with torch.no_grad():
            parameter.copy_(whole.chunk(case.tp, parameter.partition_dim)[rank] if split else whole)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    generator = torch.Generator().manual_seed(5)
    inputs, weights = (torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator) for _ in range(2))
    if config.sequence_parallel:
        inputs, weights = (one.chunk(case.tp)[rank].clone() for one in (inputs, weights))
    inputs.requires_grad_()
    with summed_key(mended):
        output, _ = wrapped(inputs, torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None])
        (output * weights).sum().backward()
    finalize_model_grads([wrapped])
    found = {"input": _gathered(inputs.grad, 0, group) if config.sequence_parallel else inputs.grad}
    for name, parameter in model.named_parameters():
        grad = parameter.main_grad.clone()
        if case.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            grad = _gathered(grad, parameter.partition_dim, group)
        order = order_of(name, case.tp)
        found[name] = grad[order.argsort()] if len(order) else grad
    return found


def values_of(name: str, parameter: Tensor, ranks: int) -> Tensor:
    """Return initial values of the whole parameter, which depend on its name alone."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= ranks  # type: ignore[attr-defined]
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))
    return 0.3 * made + ("norm" in name)


def _gathered(part: Any, dim: int, group: Any) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def differences(case: Case) -> dict[str, dict[str, float] | None]:
    """Map each case (form, with or without sequence parallelism, mended or not) to the parameters whose gradient on
    this rank differs from that of one process, with the ratio of the two at the largest element. "rotary rows" are
    those rows of the down-projection, apart from its other rows. "sum of ranks" is the relative error of the sum of the
    ranks' gradients of these rows. The value is None if a forward of the case crashes.
    """
    one = Case(tp=1, dp=case.tp)
    result: dict[str, dict[str, float] | None] = {}
    for form in (PLAIN, ENGINE, *([FUSED] if hasattr(latent, "FusedMLASelfAttention") else [])):
        alone = parts_of(gradients(one, form, False))
        for sequence, mended in ((False, False), (True, False), (False, True), (True, True)):
            try:
                here = parts_of(gradients(case, form, sequence, mended))
            except RuntimeError as error:
                if "split_with_sizes" not in str(error):
                    raise
                result[case_of(form, sequence, mended)] = None
                continue
            assert here.keys() == alone.keys()
            wrong = {name: ratio(here[name], grad) for name, grad in alone.items() if far(here[name], grad)}
            total = here[KEY].clone()
            dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
            wrong["sum of ranks"] = float((total - alone[KEY]).abs().max() / alone[KEY].abs().max())
            result[case_of(form, sequence, mended)] = wrong
    return result


def case_of(form: str, sequence: bool = False, mended: bool = False) -> str:
    return f"{form}, {sequence=}, {mended=}"


def far(here: Tensor, alone: Tensor) -> bool:
    return float((here - alone).abs().max()) > 1e-5 * float(alone.abs().max())


def ratio(here: Tensor, alone: Tensor) -> float:
    return float((here / alone).flatten()[alone.abs().argmax()])


def parts_of(found: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {}
    for name, grad in found.items():
        if "kv_down" in name:
            parts[name], parts[KEY] = grad[:-ROTARY], grad[-ROTARY:]
        else:
            parts[name] = grad
    return parts
