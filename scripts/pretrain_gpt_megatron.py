#!/usr/bin/env python
"""Train Megatron-core's own GPTModel on real text, with the pipeline run by megatron_pp.

    torchrun --nproc-per-node 2 scripts/pretrain_gpt_megatron.py --pipeline-model-parallel-size 2 \\
        --num-virtual-stages-per-pipeline-rank 2 --train-iters 20

Model, DistributedDataParallel, optimizer and gradient finalisation are Megatron-core's. The one line that plugs in
megatron_pp is `megatron_core.install()`. Flags have Megatron's names. Without a GPU the script runs on the CPU with
gloo, through `megatron_pp.tools.parity.cpu_stand_in`. `--compare` trains a second copy of the model under Megatron's
own schedule, step by step with the first, and prints both losses and the largest difference of any gradient.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore", FutureWarning)  # names of torch that Megatron still uses
# The package need not be installed, and modules beside this file are found.
sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])

gc.disable()  # while Megatron-core is imported, the collector takes a fifth of the time and finds no garbage

import layer_graphs  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    from megatron_pp.tools.parity import cpu_stand_in

    cpu_stand_in.redirect()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from examples.gpt.data import VOCAB_SIZE, SampleOrder, read_text, split_text  # noqa: E402
from megatron_pp.integrations import megatron_core  # noqa: E402

gc.freeze()  # later collections skip the imported objects
gc.enable()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=8)
    model.add_argument("--hidden-size", type=int, default=64)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--seq-length", type=int, default=64)
    model.add_argument("--hidden-dropout", type=float, default=0.0)
    model.add_argument("--attention-dropout", type=float, default=0.0)
    model.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    model.add_argument("--num-experts", type=int, default=None, help="a mixture of local experts in every layer")
    model.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local")
    model.add_argument("--bf16", action="store_true")
    layer_graphs.add_arguments(model)

    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch-size", type=int, default=2)
    training.add_argument("--global-batch-size", type=int, default=16)
    training.add_argument("--train-iters", type=int, default=20)
    training.add_argument("--lr", type=float, default=3e-3)
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument("--clip-grad", type=float, default=1.0)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument(
        "--data-path", nargs="*", default=[], help="text files or folders; default: Python's own library"
    )
    training.add_argument("--max-data-bytes", type=int, default=4_000_000)
    training.add_argument("--eval-interval", type=int, default=0, help="0: never")
    training.add_argument("--calculate-per-token-loss", action="store_true")

    parallel = parser.add_argument_group("parallelism")
    parallel.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parallel.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parallel.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=None)
    parallel.add_argument("--microbatch-group-size-per-virtual-pipeline-stage", type=int, default=None)
    parallel.add_argument("--no-overlap-p2p-communication", action="store_true")
    parallel.add_argument("--overlap-p2p-communication-warmup-flush", action="store_true")
    parallel.add_argument("--use-distributed-optimizer", action="store_true")
    parallel.add_argument("--overlap-grad-reduce", action="store_true")
    parallel.add_argument("--overlap-param-gather", action="store_true")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", choices=("megatron_pp", "megatron"), default="megatron_pp")
    engine.add_argument(
        "--strict", action="store_true", help="raise if megatron_pp would hand a step back to Megatron's schedule"
    )
    engine.add_argument("--compare", action="store_true", help="train under both engines, step by step, and compare")
    engine.add_argument(
        "--compare-as-configured",
        action="store_true",
        help="let Megatron's copy send and free outputs as configured, even if its released schedules corrupt them; by "
        "default it keeps its outputs, and with P=2 and virtual stages it does not batch",
    )
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    return args


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if world % model_parallel:
        parser.error(f"{world} processes cannot be divided into pipelines of {model_parallel} (tensor x pipeline size)")
    per_step = args.micro_batch_size * (world // model_parallel)
    if args.global_batch_size % per_step:
        factor = f"{per_step} (micro batch x data-parallel size)"
        parser.error(f"--global-batch-size {args.global_batch_size} is not a multiple of {factor}")
    for needed in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if args.overlap_param_gather and not getattr(args, needed):
            parser.error(f"--overlap-param-gather needs --{needed.replace('_', '-')}")
    layer_graphs.check_arguments(parser, args)


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Megatron's config. Fields that Megatron's argument parser derives are derived in the same way."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    virtual = args.num_virtual_stages_per_pipeline_rank
    # Megatron overlaps only in the interleaved schedule.
    overlap = virtual is not None and args.pipeline_model_parallel_size > 1 and not args.no_overlap_p2p_communication
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        num_moe_experts=args.num_experts,
        add_bias_linear=args.num_experts is None,
        moe_token_dispatcher_type="alltoall",
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=args.calculate_per_token_loss,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=args.microbatch_group_size_per_virtual_pipeline_stage,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        overlap_p2p_comm_warmup_flush=overlap and args.overlap_p2p_communication_warmup_flush,
        deallocate_pipeline_outputs=True,
        **layer_graphs.config_fields(args),
    )


def avoid_known_faults(config: TransformerConfig) -> None:
    """Change the settings to those under which every release of Megatron-core computes right gradients; see
    docs/parity.md."""
    config.deallocate_pipeline_outputs = False
    if config.pipeline_model_parallel_size == 2 and config.virtual_pipeline_model_parallel_size is not None:
        config.batch_p2p_comm = False


class Data:
    """The microbatches of a step, the same for every stage of a pipeline."""

    def __init__(self, args: argparse.Namespace) -> None:
        replicas = parallel_state.get_data_parallel_world_size()
        self.num_microbatches = args.global_batch_size // (args.micro_batch_size * replicas)
        sizes = args.micro_batch_size, self.num_microbatches, replicas, args.seq_length
        training, validation = split_text(read_text(args.data_path, args.max_data_bytes), 0.05)
        self._training = SampleOrder(training, *sizes, args.seed, "training")
        self._validation = SampleOrder(validation, *sizes, args.seed, "validation")

    def step(self, step: int, evaluation: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, labels) of every microbatch of this replica. Both are int64, [micro_batch_size, seq_length]."""
        order = self._validation if evaluation else self._training
        device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
        return order.step_iterator(step, parallel_state.get_data_parallel_rank(), device)


def forward_step(
    per_token: bool, data_iterator: Iterator[tuple[torch.Tensor, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    _, tokens, labels = next(data_iterator)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    output = model(tokens, positions, None, labels=labels)
    return output, functools.partial(loss_func, per_token)


def loss_func(per_token: bool, losses: torch.Tensor) -> tuple[Any, ...]:
    """The result of a loss function in one of Megatron's two forms. ``losses``: float, [micro_batch_size,
    seq_length]."""
    losses = losses.float()
    report = {"lm loss": losses.detach().mean()}
    if per_token:
        return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device), report
    return losses.mean(), report


@dataclasses.dataclass
class RandomState:
    """The state of both generators and of Megatron's tracker. With it, two trainers in one process draw the same
    numbers."""

    cpu: torch.Tensor
    cuda: torch.Tensor
    tracker: dict[str, torch.Tensor]

    @staticmethod
    def now() -> RandomState:
        tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
        return RandomState(torch.get_rng_state(), torch.cuda.get_rng_state(), tracker)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state(self.cuda)
        tensor_parallel.get_cuda_rng_tracker().set_states(self.tracker)


class Trainer:
    """Model chunks, wrapper, optimizer, and one step under the engine that `get_forward_backward_func` gives."""

    def __init__(self, args: argparse.Namespace, data: Data, engine: str) -> None:
        self.args, self.data, self.engine = args, data, engine
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed, **layer_graphs.seed_options(args))
        torch.manual_seed(args.seed)
        self.config = transformer_config(args)
        if engine == "megatron" and not args.compare_as_configured:
            avoid_known_faults(self.config)
        self.chunks = self._chunks()
        self.optimizer = self._optimizer()
        self.graphs = layer_graphs.made(args, self.chunks, self.config, self.optimizer)
        self._set_hooks()
        self._random = RandomState.now()

    def _chunks(self) -> list[torch.nn.Module]:
        args = self.args
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            grad_reduce_in_fp32=True,
        )
        wrapped: list[torch.nn.Module] = []
        for index in range(args.num_virtual_stages_per_pipeline_rank or 1):
            gpt: torch.nn.Module = self._gpt(index if args.num_virtual_stages_per_pipeline_rank else None)
            if ON_GPU:
                gpt.cuda(torch.cuda.current_device())
            if args.bf16:
                gpt = Float16Module(self.config, gpt)
            wrapped.append(DistributedDataParallel(self.config, ddp, gpt, disable_bucketing=index > 0))
        return wrapped

    def _gpt(self, vp_stage: int | None) -> GPTModel:
        args = self.args
        spec = (
            get_gpt_layer_local_spec(num_experts=args.num_experts, moe_grouped_gemm=False)
            if args.transformer_impl == "local"
            else get_gpt_layer_with_transformer_engine_spec(num_experts=args.num_experts)
        )
        return GPTModel(
            self.config,
            spec,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=args.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )

    def _optimizer(self) -> Any:
        args = self.args
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=args.lr,
                weight_decay=args.weight_decay,
                clip_grad=args.clip_grad,
                bf16=args.bf16,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=args.use_distributed_optimizer,
                overlap_param_gather=args.overlap_param_gather,
            ),
            self.chunks,
        )

    def _set_hooks(self) -> None:
        """Set the hooks that Megatron's own training loop sets before its first step."""
        chunks, config, args = self.chunks, self.config, self.args

        def hook(name: str) -> Any:
            found = [getattr(chunk, name) for chunk in chunks]
            return found if len(found) > 1 else found[0]

        if args.overlap_grad_reduce:
            config.no_sync_func, config.grad_sync_func = hook("no_sync"), hook("start_grad_sync")
        if args.overlap_param_gather:
            config.param_sync_func = hook("start_param_sync")
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    def _schedule(self, step: int, evaluation: bool) -> list[dict[str, torch.Tensor]]:
        from megatron.core.pipeline_parallel import get_forward_backward_func  # as a training script does

        iterators = [self.data.step(step, evaluation) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, self.args.calculate_per_token_loss),
            data_iterator=iterators,
            model=self.chunks,
            num_microbatches=self.data.num_microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=evaluation,
        )

    def _reports(self, step: int, evaluation: bool) -> float:
        """Run the schedule under this trainer's engine. Returns the mean loss, the same number on every rank."""
        use = (
            megatron_core.installed(strict=self.args.strict)
            if self.engine == "megatron_pp"
            else contextlib.nullcontext()
        )
        with use:
            reports = self._schedule(step, evaluation)
        mean = torch.stack([r["lm loss"] for r in reports]).mean() if reports else torch.zeros([])
        mean = mean.to(torch.cuda.current_device()).float().reshape(1)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            mean /= parallel_state.get_data_parallel_world_size()
        dist.broadcast(
            mean,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return float(mean)

    def forward_backward(self, step: int) -> float:
        """Zero the gradients, and compute those of one step. Returns the loss."""
        self._random.restore()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._reports(step, evaluation=False)
        self._random = RandomState.now()
        return loss

    def update(self) -> float:
        """Run the optimizer's step. Returns the gradient norm before clipping."""
        success, grad_norm, _ = self.optimizer.step()
        if not success:
            raise RuntimeError("the optimizer skipped a step: a gradient is not finite")
        return float(grad_norm)

    def evaluate(self, step: int) -> float:
        with torch.no_grad():
            return self._reports(step, evaluation=True)

    def gradients(self) -> list[torch.Tensor]:
        return [p.main_grad for chunk in self.chunks for p in chunk.parameters()]


def largest_difference(ours: Trainer, theirs: Trainer) -> float:
    """The largest difference of any gradient on any rank. Infinite if a gradient is not finite."""
    worst = 0.0
    for a, b in zip(ours.gradients(), theirs.gradients(), strict=True):
        difference = float((a - b).abs().max())
        worst = max(worst, difference if difference == difference else float("inf"))
    value = torch.tensor([worst], device=torch.cuda.current_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def start(args: argparse.Namespace) -> None:
    if not dist.is_initialized():
        join()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
    )


def join() -> None:
    """Join the process group that torchrun has described. Without torchrun, make one of this process alone."""
    if "RANK" not in os.environ:  # started without torchrun
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if ON_GPU else "gloo")


def train(args: argparse.Namespace) -> dict[str, Any]:
    """The losses of all steps. With --compare also Megatron's losses, and the largest difference of a gradient."""
    data = Data(args)
    ours = Trainer(args, data, args.engine)
    theirs = Trainer(args, data, "megatron") if args.compare else None
    say = print if dist.get_rank() == 0 else (lambda *parts: None)
    worst = 0.0
    losses: list[float] = []
    their_losses: list[float] = []
    for step in range(args.train_iters):
        loss = ours.forward_backward(step)
        losses.append(loss)
        line = f"step {step + 1:4d}  lm loss {loss:.6f}"
        if theirs is not None:
            their_loss = theirs.forward_backward(step)
            their_losses.append(their_loss)
            difference = largest_difference(ours, theirs)
            worst = max(worst, difference)
            line += f"  megatron's {their_loss:.6f}  largest gradient difference {difference:.3g}"
            theirs.update()
        line += f"  grad norm {ours.update():.4f}"
        say(line)
        if ours.graphs is not None:
            ours.graphs.capture()
        if args.eval_interval and (step + 1) % args.eval_interval == 0:
            say(f"step {step + 1:4d}  validation loss {ours.evaluate(step):.6f}")
    if theirs is not None:
        say(f"largest gradient difference over {args.train_iters} steps: {worst:.3g}")
        return {"losses": losses, "theirs": their_losses, "difference": worst}
    return {"losses": losses}


def main() -> None:
    args = parse_arguments()
    start(args)
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
