"""Trainings that are compared with Megatron-core's own schedule in the same layout, in the groups of docs/parity.md.

Each is a case with the policy under which the test suite runs it, if it does. scripts/parity_table.py runs all under
each policy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from testkit.megatron.cases import Case, Job, Model, compared

POLICIES = ("plain", "batched", "overlap")


def _model(layers: int = 4, *, experts: int | None = None, per_token: bool = False, **fields: Any) -> Model:
    """A small model. `fields` are fields of the config, except dropout and tied."""
    own = {name: fields.pop(name) for name in ("dropout", "tied", "position") if name in fields}
    return Model(
        layers=layers, experts=experts, per_token_loss=per_token, extra_config=tuple(sorted(fields.items())), **own
    )


def _case(pp: int, vp: int | None = None, *, model: Model | None = None, **more: Any) -> Case:
    """A case of two steps with Adam, unless `more` says otherwise."""
    fields: dict[str, Any] = {"steps": 2, "optimizer": "adam", "policy": "overlap", **more}
    return Case(model or _model(), pp=pp, vp=vp, **fields)


def _dropout() -> Model:
    return _model(dropout=0.1)


GATHER_OVERLAPPED: dict[str, Any] = {
    "optimizer": "distributed",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
DATA_AND_TENSOR = {
    "DP 2, gradient reduction overlapped": _case(2, dp=2, steps=3, policy="plain", overlap_grad_reduce=True),
    "DP 2, distributed optimizer, gather overlapped": _case(
        2,
        dp=2,
        steps=3,
        policy="plain",
        **GATHER_OVERLAPPED,
        bucket_size=2000,
    ),
    "DP 2, chunks, distributed optimizer, gather overlapped": _case(
        2,
        2,
        dp=2,
        steps=3,
        policy="plain",
        **GATHER_OVERLAPPED,
    ),
    "DP 2, chunks, hooks aligned over stages": _case(
        2,
        2,
        dp=2,
        steps=3,
        **GATHER_OVERLAPPED,
        align_param_gather=True,
        bucket_size=2000,
    ),
    "DP 2, hooks aligned": _case(2, dp=2, steps=3, policy="batched", overlap_grad_reduce=True, align_param_gather=True),
    "DP 2, evaluation between steps": _case(
        2, 2, dp=2, steps=3, optimizer="distributed", overlap_grad_reduce=True, evaluate_between=True
    ),
    "TP 2, sequence parallel": _case(2, tp=2, policy="batched"),
    "TP 2, sequence parallel, chunks": _case(2, 2, tp=2, steps=1, optimizer=None),
    "dropout": _case(2, policy="batched", model=_dropout()),
    "dropout, chunks": _case(2, 2, model=_dropout()),
    "activations recomputed": _case(
        2,
        2,
        steps=1,
        optimizer=None,
        model=_model(dropout=0.1, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ),
}

EXPERTS = {
    "4 experts, evaluation between steps": _case(2, 2, steps=3, evaluate_between=True, model=_model(experts=4)),
    "EP 2": _case(2, dp=2, ep=2, model=_model(experts=4)),
    "EP 2, chunks": _case(2, 2, dp=2, ep=2, model=_model(experts=4)),
    "EP 2, 4 stages": _case(4, dp=2, ep=2, model=_model(experts=4)),
    "EP 2, all-gather dispatcher": _case(
        2, 2, dp=2, ep=2, model=_model(experts=4, moe_token_dispatcher_type="allgather")
    ),
    "EP 2, per-token loss, distributed optimizer, gather overlapped": _case(
        2,
        2,
        dp=2,
        ep=2,
        optimizer="distributed",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        model=_model(experts=4, per_token=True),
    ),
    "EP 2, microbatches of different lengths": _case(2, dp=2, ep=2, variable_shapes=True, model=_model(experts=4)),
}

PREDICTION = {
    "1 further token": _case(2, model=_model(mtp_num_layers=1)),
    "1 further token, tied embeddings": _case(
        2, 2, model=_model(mtp_num_layers=1, tied=True, position="learned_absolute")
    ),
    "2 further tokens, chunks": _case(2, 2, model=_model(mtp_num_layers=2)),
    "2 further tokens, chunks, per-token loss": _case(2, 2, model=_model(per_token=True, mtp_num_layers=2)),
    "on a stage of its own": _case(4, model=_model(mtp_num_layers=1, pipeline_model_parallel_layout="Ett|tt|m|L")),
    "on a stage of its own, chunks": _case(
        3, 2, microbatches=6, model=_model(mtp_num_layers=1, pipeline_model_parallel_layout="Et|t|t|t|m|L")
    ),
    "on a stage of its own, chunks, per-token loss": _case(
        3,
        2,
        microbatches=6,
        model=_model(per_token=True, mtp_num_layers=1, pipeline_model_parallel_layout="Et|t|t|t|m|L"),
    ),
    "on a stage of its own, 2 tokens, 4 experts, EP 2": _case(
        3,
        dp=2,
        ep=2,
        model=_model(experts=4, mtp_num_layers=2, pipeline_model_parallel_layout="Etttt|mm|L"),
    ),
}

LAYOUTS = {
    "Et|ttt|tt|L": _case(2, 2, model=_model(6, pipeline_model_parallel_layout="Et|ttt|tt|L")),
    "E|ttt|ttt|L": _case(4, model=_model(6, pipeline_model_parallel_layout="E|ttt|ttt|L")),
    "Ett||ttt|tL, a stage without layers": _case(2, 2, model=_model(6, pipeline_model_parallel_layout="Ett||ttt|tL")),
    "Et|t|t|t|t|t||L, tied embeddings": _case(
        4,
        2,
        model=_model(6, tied=True, position="learned_absolute", pipeline_model_parallel_layout="Et|t|t|t|t|t||L"),
    ),
    "first stage of 2 layers, last of 4": _case(
        4, 2, model=_model(10, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=4)
    ),
    "embedding and loss counted as layers": _case(
        2,
        2,
        model=_model(6, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
    ),
}


def _sparse(**fields: Any) -> Model:
    """A model with multi-latent attention in which each token sees four others, chosen by Megatron's indexer (DSA)."""
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
    indexer = {"n_heads": 2, "head_dim": 8, "topk": 4, "loss_coeff": 0.1, "rotate_activation": False}
    return _model(
        **sizes,
        **{f"dsa_indexer_{name}": value for name, value in indexer.items()},
        experimental_attention_variant="dsa",
        multi_latent_attention=True,
        rope_type="rope",
        cp_comm_type="allgather",
        **fields,
    )


CONTEXT = {
    "CP 2": _case(2, cp=2),
    "CP 2, chunks": _case(2, 2, cp=2),
    "CP 2, 4 stages": _case(4, cp=2),
    "CP 2, chunks, per-token loss": _case(2, 2, cp=2, model=_model(per_token=True)),
    "CP 2, 1 further token": _case(2, 2, cp=2, model=_model(mtp_num_layers=1)),
    "CP 2, 4 experts, EP 2": _case(2, cp=2, ep=2, model=_model(experts=4)),
    "CP 2, Megatron's sparse attention": _case(2, cp=2, model=_sparse()),
    "CP 2, Megatron's sparse attention, chunks, per-token loss": _case(2, 2, cp=2, model=_sparse(per_token=True)),
}
SINCE = {title: (0, 20) for title in CONTEXT if "sparse attention" in title}
"""Training -> the first release (major, minor) that has what it needs."""

LOOPS = {
    "per-token loss": _case(2, model=_model(per_token=True)),
    "per-token loss, chunks, DP 2": _case(2, 2, dp=2, model=_model(per_token=True)),
    "`adjust_tensor_shapes_fn`: a student and its teacher": _case(2, loop="distillation"),
    "`adjust_tensor_shapes_fn`, 4 stages": _case(4, loop="distillation"),
    "rerun state machine": _case(2, loop="rerun", model=_dropout()),
    "rerun state machine, chunks": _case(2, 2, loop="rerun", model=_dropout()),
    "some microbatches recompute": _case(2, loop="partial checkpoints", model=_dropout()),
    "some microbatches recompute, chunks": _case(2, 2, loop="partial checkpoints", model=_dropout()),
    "some microbatches recompute, 4 stages": _case(4, loop="partial checkpoints", model=_dropout()),
    "evaluation with `autograd.grad`": _case(2, loop="forces", evaluate_between=True),
    "evaluation with `autograd.grad`, chunks": _case(2, 2, loop="forces", evaluate_between=True),
}

GROUPS: dict[str, dict[str, Case]] = {
    "Data, tensor and sequence parallelism": DATA_AND_TENSOR,
    "Experts": EXPERTS,
    "Multi-token prediction": PREDICTION,
    "Layers on stages": LAYOUTS,
    "Context parallelism": CONTEXT,
    "Training loops": LOOPS,
}


def reference_case(case: Case) -> Case:
    """The same training under Megatron's own schedule, with the policy that is right on every release."""
    return dataclasses.replace(case, engine="megatron", policy="plain", deallocate=False)


def compared_with_megatron(cases: list[Case], folder: str) -> list[Job]:
    return compared(cases, reference_case, f"{folder}/reference{{n}}-{{rank}}.pt")
