"""Settings that follow from several keys of a program's file, or from the model's own file of sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_pp.tools.check.findings import ERROR, NOTE, RISK, Finding

_SAME = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "head_dim": "kv_channels",
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "qk_nope_head_dim": "qk_head_dim",
    "v_head_dim": "v_head_dim",
    "num_nextn_predict_layers": "mtp_num_layers",
}
"""Hugging Face's name in a model's config.json -> Megatron's setting."""
_VERL: dict[str, Any] = {
    "accumulate_allreduce_grads_in_fp32": True,
    "use_distributed_optimizer": True,
    "sequence_parallel": True,
    "bf16": True,
    "swiglu": True,
    "variable_seq_lengths": True,
    "batch_p2p_comm": False,
    "moe_token_dispatcher_type": "alltoall",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron-bridge": {"accumulate_allreduce_grads_in_fp32": True},
    "verl": _VERL,
    "verl-sft": {**_VERL, "global_batch_size": 256, "seq_length": 1024},
    "slime": {"variable_seq_lengths": True, "bf16": True},
    "ms-swift": {
        "micro_batch_size": 1,
        "global_batch_size": 16,
        "variable_seq_lengths": True,
        "bf16": True,
        "use_distributed_optimizer": True,
        "recompute_granularity": "selective",
        "swiglu": True,
    },
    "torchtitan": {"bf16": True, "swiglu": True, "micro_batch_size": 1, "untie_embeddings_and_output_weights": True},
}
"""Program -> its defaults that differ from those of Megatron's parser."""
_PRECISION = re.compile(r"(?:\w+_)?(bf16|fp16)(?:_with_\w+)?_mixed")
"""The names that Megatron-Bridge's `mixed_precision` takes in place of a config."""
_FLAVORS = {
    "8B": {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8},
    "70B": {"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_query_groups": 8},
    "405B": {"num_layers": 126, "hidden_size": 16384, "num_attention_heads": 128, "num_query_groups": 8},
}
"""The sizes of torchtitan's llama3. They are in torchtitan's code, not in its files."""

Prepared = tuple[dict[str, Any], list[Finding]]


def prepared(program: str, values: Mapping[str, Any], gpus: int, folder: Path) -> Prepared:
    """The values, completed by settings that follow from several of them, and findings. ``folder`` is the file's."""
    how: dict[str, Callable[[dict[str, Any], int, Path], Prepared]] = {
        "megatron-bridge": _bridge,
        "verl": _verl,
        "verl-sft": _verl_sft,
        "slime": _slime,
        "ms-swift": _swift,
        "torchtitan": _torchtitan,
    }
    return how[program](dict(values), gpus, folder) if program in how else (dict(values), [])


def _bridge(values: dict[str, Any], gpus: int, folder: Path) -> Prepared:
    """If several sections have the same setting, the value that Megatron-Bridge uses comes last."""
    found = []
    lengths = [name for name in ("model.seq_length", "dataset.sequence_length", "dataset.seq_length") if name in values]
    if len({values[name] for name in lengths if values[name] is not None}) > 1:
        text = " and ".join(f"{name} {values[name]}" for name in lengths)
        found.append(Finding("sequence-lengths-differ", ERROR, f"{text} differ", "one length for both", (*lengths,)))
    packed = values.get("dataset.packed_sequence_specs.packed_sequence_size")
    if isinstance(packed, int) and packed > 0:
        values["dataset.packed_sequence_specs"] = True  # packed sequences, as with Megatron's --sft
    precision = _PRECISION.fullmatch(str(values.get("mixed_precision")).replace("-", "_"))
    if precision is not None:
        del values["mixed_precision"]
        in_bf16 = precision[1] == "bf16"
        kinds = {"bf16": in_bf16, "fp16": not in_bf16, "grad_reduce_in_fp32": in_bf16}
        values |= {f"mixed_precision.{name}": value for name, value in kinds.items()}
    order = {name: at for at, name in enumerate(("optimizer", "model", "ddp", "mixed_precision", "comm_overlap"))}
    keys = sorted(values, key=lambda key: order.get(key.partition(".")[0], len(order)))
    return {key: values[key] for key in keys}, found


def _verl(values: dict[str, Any], gpus: int, folder: Path) -> Prepared:
    found = _other_gpus(values, ("trainer.nnodes", "trainer.n_gpus_per_node"), gpus)
    actor = "actor_rollout_ref.actor"
    megatron = "actor_rollout_ref.actor.megatron"
    strategy = values.get(f"{actor}.strategy")
    if strategy not in (None, "megatron", "???"):
        text = f"{actor}.strategy is {strategy}: Megatron does not train the actor, so this answer does not apply to it"
        found.append(Finding("not-megatron", RISK, text, f"{actor}.strategy=megatron"))
    samples = values.get("actor_rollout_ref.rollout.n")
    batch = values.get(f"{actor}.ppo_mini_batch_size")
    if isinstance(samples, int) and isinstance(batch, int):
        values[f"{actor}.ppo_mini_batch_size"] = batch * samples  # prompts -> sequences
    length = [values.get(f"data.max_{name}_length") for name in ("prompt", "response")]
    own = f"{megatron}.override_transformer_config"
    sizes, missing = _sizes_of_model("actor_rollout_ref.model.path", f"{own}.num_layers", values, folder)
    found += missing
    if all(isinstance(one, int) for one in length):
        sizes["seq_length"] = sum(one for one in length if isinstance(one, int))
    if values.get(f"{actor}.use_dynamic_bsz"):
        found.append(_dynamic(f"{actor}.use_dynamic_bsz", "ppo_max_token_len_per_gpu"))
    return {**{f"{own}.{name}": value for name, value in sizes.items()}, **values}, found


def _verl_sft(values: dict[str, Any], gpus: int, folder: Path) -> Prepared:
    """verl's training on given answers (`verl.trainer.sft_trainer`). Its default engine is FSDP."""
    found = []
    engine = values.get("engine", "fsdp")
    if engine != "megatron":
        text = f"engine is {engine}: Megatron does not train the model, so this answer does not apply to it"
        found.append(Finding("not-megatron", RISK, text, "engine=megatron"))
    own = "engine.override_transformer_config"
    sizes, missing = _sizes_of_model("model.path", f"{own}.num_layers", values, folder)
    found += missing
    if values.get("data.use_dynamic_bsz", True):
        found.append(_dynamic("data.use_dynamic_bsz", "data.max_token_len_per_gpu"))
    else:
        values.setdefault("data.micro_batch_size_per_gpu", 4)
    return {**{f"{own}.{name}": value for name, value in sizes.items()}, **values}, found


def _slime(values: dict[str, Any], gpus: int, folder: Path) -> Prepared:
    found = _other_gpus(values, ("actor_num_nodes", "actor_num_gpus_per_node"), gpus)
    if values.get("use_dynamic_batch_size"):
        found.append(_dynamic("--use-dynamic-batch-size", "--max-tokens-per-gpu"))
        values.setdefault("seq_length", values.get("max_tokens_per_gpu"))
    sizes, missing = _sizes_of_model("hf_checkpoint", "num_layers", values, folder)
    return {**sizes, **values}, [*found, *missing]


def _swift(values: dict[str, Any], gpus: int, folder: Path) -> Prepared:
    found = _other_gpus({"NNODES": 1, **values}, ("NNODES", "NPROC_PER_NODE"), gpus)
    own = {name: value for name, value in values.items() if name not in ("NNODES", "NPROC_PER_NODE")}
    sizes, missing = _sizes_of_model("model", "num_layers", values, folder)
    return {**sizes, **own}, [*found, *missing]


def _torchtitan(values: dict[str, Any], gpus: int, folder: Path) -> Prepared:
    found: list[Finding] = []
    flavor = values.get("model.flavor")
    sizes = _FLAVORS.get(str(flavor)) if values.get("model.name") == "llama3" else None
    if sizes is None:
        text = f"the sizes of {values.get('model.name')} {flavor} are in torchtitan's code and not known here"
        found.append(Finding("sizes-not-known", NOTE, text))
    degrees = [values.get(f"parallelism.{name}_parallel_degree", 1) for name in ("pipeline", "tensor", "context")]
    defaults = {"replicate": 1, "shard": -1}  # -1: all remaining GPUs
    shared = [values.get(f"parallelism.data_parallel_{name}_degree", one) for name, one in defaults.items()]
    if all(isinstance(one, int) for one in (*degrees, *shared)):
        known = degrees[0] * degrees[1] * degrees[2] * shared[0] * abs(shared[1])
        if gpus % known or (shared[1] > 0 and gpus != known):
            text = f"the degrees of [parallelism] need {known} GPUs, but the job has {gpus}"
            found.append(Finding("gpus-do-not-fit", ERROR, text, f"--gpus {known}"))
    local = values.get("training.local_batch_size")
    replicas = gpus // max(1, degrees[0] * degrees[1] * degrees[2])
    if isinstance(local, int) and values.get("training.global_batch_size", -1) == -1:
        values["training.global_batch_size"] = local * max(1, replicas)
    return {**{f"parallelism.{name}": value for name, value in (sizes or {}).items()}, **values}, found


def _dynamic(setting: str, limit: str) -> Finding:
    text = f"{setting}: microbatches have as many sequences as fit into {limit}"
    return Finding("dynamic-batch", NOTE, f"{text}; their number is not known before the step")


def _other_gpus(values: Mapping[str, Any], names: tuple[str, str], gpus: int) -> list[Finding]:
    counts = [values.get(name) for name in names]
    if not all(isinstance(one, int) for one in counts):
        return []
    said = counts[0] * counts[1]  # type: ignore[operator]
    if said == gpus:
        return []
    text = f"{names[0]} {counts[0]} x {names[1]} {counts[1]} is {said} GPUs, but --gpus is {gpus}"
    return [Finding("other-number-of-gpus", RISK, text, f"--gpus {said}", names)]


def _sizes_of_model(key: str, layers: str, values: Mapping[str, Any], folder: Path) -> Prepared:
    """The sizes of the Hugging Face model that ``key`` names, if it is on this machine; else a finding, unless the key
    ``layers`` gives its number of layers. Nothing is downloaded."""
    path = values.get(key)
    if not isinstance(path, str):
        return {}, []
    for place in (Path(path).expanduser(), folder / path):
        try:
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        config = config.get("text_config", config)
        sizes = {ours: config[theirs] for theirs, ours in _SAME.items() if isinstance(config.get(theirs), int)}
        return {**sizes, "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False)}, []
    if layers in values:
        return {}, []
    text = f"the sizes of {path} are in its config.json, which is not on this machine"
    return {}, [Finding("sizes-not-known", NOTE, text, f"a folder with the file as {key}", (key,))]
