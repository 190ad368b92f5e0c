"""Reads the sizes of a model from Megatron's arguments, or from settings that were read from a file."""

import ast
import re
import shlex
from collections.abc import Mapping
from typing import Any

from megatron_pp.config.hybrid_pattern import HybridPattern
from megatron_pp.errors import PlanError
from megatron_pp.plan.simulate.memory import FULL, NONE, SELECTIVE, ModelShape
from megatron_pp.tools.advise.layers.layer_sizes import Indexer, Latent, Linear, Mamba
from megatron_pp.tools.advise.model import PATTERN
from megatron_pp.tools.advise.transformer import Transformer
from megatron_pp.tools.flags.read import words_of_flags
from megatron_pp.tools.flags.table import options

_OLD_NAMES = {"model_parallel_size": "tensor_model_parallel_size", "num_layers_per_virtual_pipeline_stage": "_chunk"}
_FREQUENCIES = ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq")
"""Settings whose lists have a number for each layer."""
_NEEDED = ("num_layers", "hidden_size", "seq_length")


def read_megatron_args(text: str) -> dict[str, Any]:
    """The arguments in ``text``, a command line, by Megatron's names (``num_layers``). Other words are skipped.
    Switches are True. Raises PlanError if there are none.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlanError(f"Megatron's arguments cannot be read: {error}") from error
    found: dict[str, Any] = {}
    for option, values in words_of_flags(words):
        setting = options().get(option)
        name = option.removeprefix("--").replace("-", "_") if setting is None else setting.name
        switched = None if setting is None else setting.options[option]
        if switched is not False:
            found[_OLD_NAMES.get(name, name)] = " ".join(values) if values and switched is None else True
    if not found:
        raise no_arguments(text)
    return _with_layers(found)


def no_arguments(text: str) -> PlanError:
    """The error for a text without Megatron's arguments."""
    return PlanError(f"{text[:60]!r} has no argument of Megatron; write arguments as --num-layers 32")


def arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file in the form that `transformer_of` needs: texts, and True for a switch. Switches that are off
    are left out."""
    found = {name: value for name, value in settings.items() if value is not None and value is not False}
    for name, value in found.items():
        if isinstance(value, (list, tuple)) and name not in _FREQUENCIES:
            found[name] = " ".join(map(str, value))
        elif value is not True:
            found[name] = str(value)
    return _with_layers(found)


def _with_layers(found: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the numbers of layers that a hybrid model's pattern has."""
    main, mtp = _hybrid(found)
    return {**found, "num_layers": len(main), "mtp_num_layers": len(mtp)} if main else found


def transformer_of(args: Mapping[str, Any], data_parallel: int = 1) -> Transformer:
    """The model of the arguments. Raises PlanError for sizes that are missing or are not numbers."""
    main, mtp = _hybrid(args)
    missing = [name for name in _NEEDED if name not in args]
    if missing:
        raise PlanError(f"Megatron's arguments lack {', '.join('--' + name.replace('_', '-') for name in missing)}")
    in_half = "bf16" in args or "fp16" in args
    # With bf16 Megatron's parser sets accumulate_allreduce_grads_in_fp32 itself; with fp16 it does not.
    fp16_gradients = "fp16" in args and "accumulate_allreduce_grads_in_fp32" not in args
    shape = ModelShape(
        num_layers=whole(args, "num_layers"),
        hidden_size=whole(args, "hidden_size"),
        seq_length=whole(args, "seq_length"),
        micro_batch_size=whole(args, "micro_batch_size", 1),
        num_attention_heads=whole(args, "num_attention_heads", 0),
        ffn_hidden_size=whole(args, "ffn_hidden_size", 0) or None,
        vocab_size=whole(args, "padded_vocab_size", 0) or whole(args, "vocab_size", 0),
        tensor_parallel=whole(args, "tensor_model_parallel_size", 1),
        context_parallel=whole(args, "context_parallel_size", 1),
        data_parallel=data_parallel if "use_distributed_optimizer" in args else 1,
        splits_optimizer="use_distributed_optimizer" in args,
        sequence_parallel="sequence_parallel" in args,
        recompute=_recompute(args),
        element_bytes=2 if in_half else 4,
        gradient_bytes=2 if fp16_gradients or (in_half and "grad_reduce_in_bf16" in args) else 4,
    )
    mixers = _mixers(args, main)
    experts = whole(args, "num_experts", 0)
    flex = str(args.get("moe_token_dispatcher_type")) == "flex"
    return Transformer(
        shape,
        gated="swiglu" in args,
        query_groups=whole(args, "num_query_groups", 0) or None,
        kv_channels=whole(args, "kv_channels", 0) or None,
        latent=_latent(args) if "multi_latent_attention" in args or {"+", "D"} & {*mixers} else None,
        mamba=Mamba(**_given(args, _MAMBA)),
        linear=Linear(**_given(args, _LINEAR)),
        indexer=Indexer(**_given(args, _INDEXER)),
        window=_window(args),
        mixers="" if main else mixers,
        experts=experts,
        top_k=whole(args, "moe_router_topk", 2),
        expert_hidden=whole(args, "moe_ffn_hidden_size", 0) or None,
        shared_hidden=whole(args, "moe_shared_expert_intermediate_size", 0),
        moe_latent=whole(args, "moe_latent_size", 0),
        moe_layers=each_layer(args, "moe_layer_freq", "1", True) if experts and not main else (),
        expert_parallel=whole(args, "expert_model_parallel_size", 1),
        expert_split=whole(args, "expert_tensor_parallel_size", 0) or None,
        groups=(whole(args, "moe_router_group_topk", 0), whole(args, "moe_router_num_groups", 0)),
        once=flex or "moe_enable_deepep" in args,
        hides=("overlap_moe_expert_parallel_comm" in args, "tp_comm_overlap" in args),
        context_comm=_context_comm(args),
        modules=_modules(args),
        fp8="fp8_format" in args or "fp8" in args,
        pattern=mixers if main else "",
        mtp_pattern=mtp[0] if mtp else "",
        dropout=str(args.get("attention_dropout", "0.1")) not in ("0", "0.0"),
        mtp_layers=whole(args, "mtp_num_layers", 0),
    )


_MAMBA = {
    "state_dim": "mamba_state_dim",
    "head_dim": "mamba_head_dim",
    "groups": "mamba_num_groups",
    "heads": "mamba_num_heads",
}
_LINEAR = {
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "conv": "linear_conv_kernel_dim",
}
_INDEXER = {"heads": "dsa_indexer_n_heads", "dim": "dsa_indexer_head_dim", "topk": "dsa_indexer_topk"}
_LATENT = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "qk_head_dim": "qk_head_dim",
    "rotary_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
_CONTEXT = ("p2p", "all_gather", "a2a")


def _latent(args: Mapping[str, Any]) -> Latent:
    """The sizes of multi-latent attention. If the rank of queries is not given, queries have no latent, as in
    Megatron."""
    return Latent(**{"q_rank": 0, **_given(args, _LATENT)})


def _given(args: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """The given sizes, by our names. ``names`` maps our names to Megatron's."""
    return {name: whole(args, named) for name, named in names.items() if named in args}


def _hybrid(args: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The letters of the layers in ``--hybrid-layer-pattern``, and those of each MTP layer. Its pipeline stages are
    ignored: the advisor chooses them."""
    text = HybridPattern.read(args.get("hybrid_layer_pattern", args.get("hybrid_override_pattern")))
    main = text.layers
    mtp = [*text.predictions]
    unknown_ones = sorted({*main, *"".join(mtp)} - {*PATTERN})
    if unknown_ones or len({*mtp}) > 1 or "" in mtp:
        known = " ".join(PATTERN)
        raise PlanError(
            f"Megatron's --hybrid-layer-pattern is {str(text)!r}; it may have {known}, and equal parts after /"
        )
    if "E" in str(text) and "num_experts" not in args:
        raise PlanError("Megatron's --hybrid-layer-pattern has layers of experts (E), but --num-experts is missing")
    return main, mtp


def _context_comm(args: Mapping[str, Any]) -> str:
    found = str(args.get("cp_comm_type", "p2p")).replace("allgather", "all_gather")
    if found not in _CONTEXT:
        raise PlanError(f"Megatron's --cp-comm-type is {found!r}; possible are {', '.join(_CONTEXT)} for all layers")
    return found


def _modules(args: Mapping[str, Any]) -> frozenset[str]:
    """The modules that selective recomputation computes again. Fused kernels never store attention's softmax."""
    if args.get("recompute_granularity") != SELECTIVE:
        return frozenset()
    found = str(args.get("recompute_modules", "core_attn")).split()
    wrong = [name for name in found if name not in _MODULES]
    if wrong:
        raise PlanError(f"Megatron's --recompute-modules has {wrong[0]}; possible are {', '.join(_MODULES)}")
    return frozenset(found)


def whole(args: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The whole number of an argument. Raises PlanError if it is not a number."""
    value = args.get(name, default)
    if not str(value).isdigit():
        raise PlanError(f"Megatron's --{name.replace('_', '-')} is {value!r}; it must be a whole number")
    return int(value)


def _recompute(args: Mapping[str, Any]) -> str:
    """The recomputation of every layer. Full recomputation of some layers is chosen by the advisor."""
    if args.get("recompute_granularity") == FULL and "recompute_num_layers" not in args:
        return FULL
    backend = str(args.get("attention_backend", "auto")).rpartition(".")[2]
    fused = backend in ("flash", "fused") or (backend == "auto" and args.get("transformer_impl") != "local")
    flash = "use_flash_attn" in args or fused
    selective = "core_attn" in _modules(args) or "recompute_activations" in args
    return SELECTIVE if flash or selective else NONE


def each_layer(args: Mapping[str, Any], name: str, default: str, first: bool) -> tuple[int, ...]:
    """0 or 1 for each layer, from a list such as ``([0]*3+[1]*58)`` or from a number N. With N, either the ``first`` of
    each N layers has 1, or all but the last of each N layers.
    """
    text = str(args.get(name, default))
    num_layers = whole(args, "num_layers")
    flag = f"Megatron's --{name.replace('_', '-')}"
    if text.isdigit() and int(text):
        number = int(text)
        return tuple(int(layer % number == 0 if first else (layer + 1) % number != 0) for layer in range(num_layers))
    try:
        pattern = _listed(ast.parse(text.strip("' \""), mode="eval").body, num_layers)
    except (ValueError, SyntaxError):
        raise PlanError(f"{flag} is {text!r}; write it as 2 or ([0]*3+[1]*58)") from None
    if len(pattern) != num_layers:
        raise PlanError(f"{flag} is for {len(pattern)} layers, but --num-layers is {num_layers}")
    return tuple(pattern)


def _listed(node: ast.expr, most: int) -> list[int]:
    """The list that an expression describes: a list of 0 and 1, a sum of lists, or a list times a number up to
    ``most``. Raises ValueError for another expression."""
    if isinstance(node, ast.List):
        values = [each.value for each in node.elts if isinstance(each, ast.Constant)]
        if len(values) == len(node.elts) and {*values} <= {0, 1}:
            return [int(value == 1) for value in values]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _listed(node.left, most) + _listed(node.right, most)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        times = node.right.value
        repeated = _listed(node.left, most)
        if isinstance(times, int) and 0 <= times <= most and len(repeated) <= most:
            return repeated * times
    raise ValueError


def _mixers(args: Mapping[str, Any], main: str) -> str:
    """The letters of a hybrid model's layers; for other models, the letters of each layer's attention."""
    variant = str(args.get("experimental_attention_variant", "")).replace("gated_delta_net", "gdn")
    if variant not in ("", "gdn", "dsa"):
        raise PlanError(f"Megatron's --experimental-attention-variant is {variant}; possible are gdn and dsa")
    if variant == "dsa" and "multi_latent_attention" not in args:
        raise PlanError("Megatron's --experimental-attention-variant dsa needs --multi-latent-attention")
    mixers = main or ("+" if "multi_latent_attention" in args else "*") * whole(args, "num_layers")
    if variant == "dsa":
        mixers = mixers.replace("+", "D")
    if _window(args) is not None:
        windowed = each_layer(args, "window_attn_skip_freq", f"[1]*{len(mixers)}", False)
        mixers = "".join("w" if one == "*" and is_in else one for one, is_in in zip(mixers, windowed, strict=True))
    if variant == "gdn" and not main:
        if "linear_attention_freq" not in args:
            raise PlanError("Megatron's --experimental-attention-variant gdn needs --linear-attention-freq")
        linear = each_layer(args, "linear_attention_freq", "", False)
        mixers = "".join("G" if is_in else one for one, is_in in zip(mixers, linear, strict=True))
    return mixers


def _window(args: Mapping[str, Any]) -> int | None:
    """The number of keys that a query reads before its own. Later keys are masked. None if there is no window."""
    if "window_size" not in args:
        return None
    found = re.fullmatch(r"\(?(-?\d+)[, ]+(-?\d+)\)?", str(args["window_size"]).strip("' \""))
    if found is None:
        raise PlanError(f"Megatron's --window-size is {args['window_size']!r}; write it as 128,0")
    return None if found[1].startswith("-") else int(found[1])
