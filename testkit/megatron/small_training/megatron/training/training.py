"""A training loop with the functions of Megatron-LM's loop that `megatron-pp parity` watches.

PLANTED_FAULT in the environment chooses a fault. "log" logs the loss times the number of stages. "schedule" does not
restore the learning rate's schedule. "bias" computes the bias of experts on each replica alone. "clip" clips gradients
by the norm of their own stage. "positions" and "mask" ignore, in a pipeline, the data's position ids and mask.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel as DDP  # noqa: N817
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args

FAULT = os.environ.get("PLANTED_FAULT", "")
clip_by_total_norm = optimizers.clip_grad_by_total_norm_fp32


def bias_of_replica(tokens: torch.Tensor, bias: torch.Tensor, rate: float, **groups: Any) -> torch.Tensor:
    return bias + torch.sign(tokens.mean(dim=-1, keepdim=True) - tokens) * rate


def clip_by_norm_of_stage(parameters: Any, max_norm: float, total_norm: float, *args: Any, **kwargs: Any) -> None:
    total_norm = torch.sqrt(sum((parameter.grad**2).sum() for parameter in parameters)).item()
    clip_by_total_norm(parameters, max_norm, total_norm, *args, **kwargs)


if FAULT == "bias":
    finalize_model_grads.__globals__["get_updated_expert_bias"] = bias_of_replica
if FAULT == "clip":
    optimizers.clip_grad_by_total_norm_fp32 = clip_by_norm_of_stage


def initialize_megatron(allow_no_cuda: bool = False) -> None:
    assert allow_no_cuda, "Megatron requires CUDA."
    args = get_args()
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.num_virtual_stages_per_pipeline_rank,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    sizes = args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    init_num_microbatches_calculator(dist.get_rank(), None, *sizes)


def model_provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> GPTModel:
    args = get_args()
    virtual = args.num_virtual_stages_per_pipeline_rank
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        num_moe_experts=args.num_experts,
        moe_router_enable_expert_bias=args.moe_router_enable_expert_bias,
        moe_router_score_function="sigmoid" if args.moe_router_enable_expert_bias else "softmax",
        moe_router_load_balancing_type="none",
        add_bias_linear=args.num_experts is None,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=not virtual,
        overlap_p2p_comm=bool(virtual),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=args.num_experts, moe_grouped_gemm=False),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def setup_model_and_optimizer() -> tuple[list[Any], Any, OptimizerParamScheduler]:
    args = get_args()
    stages: list[int | None] = list(range(args.num_virtual_stages_per_pipeline_rank or 0)) or [None]
    model = []
    for stage in stages:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunk = model_provider(first, last, stage)
        model.append(DDP(chunk.config, DistributedDataParallelConfig(), chunk, disable_bucketing=bool(stage)))
    config = OptimizerConfig(optimizer="adam", lr=args.lr, min_lr=args.min_lr, clip_grad=args.clip_grad)
    optimizer = get_megatron_optimizer(config, model)
    steps = args.lr_decay_iters * args.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, args.lr, args.min_lr, 0, steps, args.lr_decay_style, 0.01, 0.01, steps, "constant"
    )
    return model, optimizer, scheduler


def build_train_valid_test_data_iterators(provider: Any) -> tuple[Any, None, None]:
    raise FileNotFoundError("there is no data set")


def loss_func(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss, tokens = (output.float().view(-1) * mask.view(-1)).sum(), mask.sum().int()
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    positions = batch["position_ids"]
    mask = batch.get("attention_mask")
    if FAULT == "positions" and get_args().pipeline_model_parallel_size > 1:
        positions = torch.arange(positions.shape[1]).expand_as(positions)
    if FAULT == "mask" and get_args().pipeline_model_parallel_size > 1:
        mask = None
    output = model(batch["tokens"], positions, mask, labels=batch["labels"])
    return output, functools.partial(loss_func, batch["loss_mask"])


def train_step(data: Any, model: list[Any], optimizer: Any, scheduler: Any) -> tuple[dict[str, torch.Tensor], float]:
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    scheduler.step(increment=args.global_batch_size)
    if not reports:
        return {}, norm
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    times = args.pipeline_model_parallel_size if FAULT == "log" else 1
    return {"lm loss": total[0] / total[1] * times}, norm


def print_rank_last(message: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        print(message, flush=True)


def training_log(
    losses: dict[str, torch.Tensor],
    totals: dict[str, torch.Tensor],
    iteration: int,
    learning_rate: float,
    norm: float,
    first: bool,
) -> None:
    """Log the averages. As in Megatron-LM, the first line of a process does not reset them."""
    totals["lines"] = totals.get("lines", torch.zeros(())) + 1
    for name, value in losses.items():
        totals[name] = totals.get(name, torch.zeros(())) + value
    line = f" iteration {iteration:8d}/{get_args().train_iters:8d} | elapsed time per iteration (ms): 1.5 |"
    line += f" learning rate: {learning_rate:.6E} |"
    line += "".join(f" {name}: {(totals[name] / totals['lines']).item():.6E} |" for name in losses)
    print_rank_last(f"{line} grad norm: {norm:.3f} |")
    if not first:
        totals.clear()


def save_checkpoint(iteration: int, model: list[Any], optimizer: Any, scheduler: Any) -> None:
    states = {"iteration": iteration, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    states["model"] = [chunk.state_dict_for_save_checkpoint() for chunk in model]
    folder = Path(get_args().save)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(states, folder / f"rank{dist.get_rank()}.pt")


def load_checkpoint(model: list[Any], optimizer: Any, scheduler: Any) -> int:
    states = torch.load(Path(get_args().load) / f"rank{dist.get_rank()}.pt", weights_only=False)
    for chunk, state in zip(model, states["model"], strict=True):
        chunk.load_state_dict(state)
    optimizer.load_state_dict(states["optimizer"])
    if FAULT != "schedule":
        scheduler.load_state_dict(states["scheduler"])
    return int(states["iteration"])


def pretrain(args: Any) -> None:
    initialize_megatron()
    model, optimizer, scheduler = setup_model_and_optimizer()
    iteration = load_checkpoint(model, optimizer, scheduler) if args.load else 0
    args.consumed_train_samples = iteration * args.global_batch_size
    iterators = [build_train_valid_test_data_iterators(None)[0] for _ in model]
    model[0].module.config.finalize_model_grads_func = finalize_model_grads
    totals: dict[str, torch.Tensor] = {}
    begin = iteration
    while iteration < args.train_iters:
        losses, norm = train_step(iterators, model, optimizer, scheduler)
        iteration += 1
        first = iteration == begin + 1
        training_log(losses, totals, iteration, optimizer.param_groups[0]["lr"], norm, first)
        if args.save and iteration % args.save_interval == 0:
            save_checkpoint(iteration, model, optimizer, scheduler)
    dist.destroy_process_group()
    sys.exit(0)
