"""Run one case of `cases` on this rank: Megatron-core's own GPTModel, DDP and optimizer, under either engine.

Weights are the same in every layout: a parameter's values depend on its name in the whole model, with the layer's
global number. So gradients of any layout can be compared, name by name, with those of one process that has all layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from megatron_pp.tools.parity import cpu_stand_in
from megatron_pp.tools.parity.cpu import cpu_layers

warnings.simplefilter("ignore")  # hides known warnings: no Apex, no Transformer Engine, names that torch deprecates
cpu_stand_in.redirect()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

with cpu_stand_in.triton_stand_in():
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.utils import get_model_config

    from testkit.megatron import flagged
    from testkit.megatron import trace as megatron_trace
    from testkit.megatron.context_parallel import of_this_rank, sparse_attention
    from testkit.megatron.loops import LOOPS

    cpu_layers.complete_layers()
from megatron_pp.common.module_attributes import unwrapped  # noqa: E402
from megatron_pp.plan.orders import find_family  # noqa: E402
from megatron_pp.tools.flags.flags import Flags  # noqa: E402
from megatron_pp.tools.parity.records.parameters import Place, global_name  # noqa: E402
from megatron_pp.weight_grad import split_weight_grad, store_of  # noqa: E402
from testkit.megatron.cases import Case, Job, Model  # noqa: E402
from testkit.megatron.comparison import compare, read_reference, record_of, write_reference  # noqa: E402

logging.getLogger("megatron").setLevel(logging.ERROR)
Tensors = dict[str, torch.Tensor]
# The sizes and embedding ranks for which this process last set up parallel_state.
_CUT: ContextVar[tuple[Any, ...] | None] = ContextVar("cut", default=None)


def set_up_parallel_state(case: Case) -> None:
    """Make Megatron's process groups for the case, unless the last case had the same layout."""
    wanted = (case.pp, case.tp, case.cp, case.ep, case.etp, embedding_ranks(case, list(range(case.pp))))
    if not parallel_state.model_parallel_is_initialized() or wanted != _CUT.get():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            context_parallel_size=case.cp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
            get_embedding_ranks=lambda ranks, *unused: embedding_ranks(case, ranks),
        )
        _CUT.set(wanted)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(case.vp)
    model_parallel_cuda_manual_seed(1234, **_force_reset())


def forget_groups() -> None:
    """Make the next case set up its process groups again."""
    parallel_state.destroy_model_parallel()
    _CUT.set(None)


def embedding_ranks(case: Case, ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that share the embedding, as in Megatron's scripts: the first and the last. If further
    tokens are predicted on a stage of their own, that stage too, and the last one only if the output layer is tied.
    """
    layout = dict(case.model.extra_config).get("pipeline_model_parallel_layout", "")
    layout = layout or Flags.read(case.model.flags).text("--pipeline-model-parallel-layout")
    predicting = [ranks[stage % case.pp] for stage, layers in enumerate(layout.split("|")) if "m" in layers]
    return sorted({ranks[0], *predicting, *(ranks[-1:] if case.model.tied or not predicting else [])})


def _force_reset() -> dict[str, bool]:
    names = inspect.signature(model_parallel_cuda_manual_seed).parameters
    return {"force_reset_rng": True} if "force_reset_rng" in names else {}


def make_config(case: Case) -> TransformerConfig:
    model = case.model
    if model.flags:
        return flagged.config_of(case)
    overlap = case.policy.startswith("overlap")
    sparse = "experimental_attention_variant" in dict(model.extra_config)
    more: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall", "mtp_loss_scaling_factor": 0.1}
    more["add_bias_linear"] = not (model.experts or sparse)
    if model.experts:
        more |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.1,
            "moe_z_loss_coeff": 0.01,
            "moe_router_load_balancing_type": "aux_loss",
        }
    config = (MLATransformerConfig if sparse else TransformerConfig)(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        calculate_per_token_loss=model.per_token_loss,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.tp > 1,
        pipeline_dtype=torch.float32,
        microbatch_group_size_per_vp_stage=case.group,
        batch_p2p_comm=case.policy == "batched",
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=case.policy == "overlap+flush",
        deallocate_pipeline_outputs=case.deallocate,
        variable_seq_lengths=case.variable_shapes,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        **{**more, **dict(model.extra_config)},
    )
    if case.schedule is not None:
        config.pipeline_schedule = case.schedule
    return config


def layer_spec(case: Case) -> Any:
    more = {"enable_hyper_connection": True} if "enable_hyper_connections" in dict(case.model.extra_config) else {}
    spec = get_gpt_layer_local_spec(num_experts=case.model.experts, moe_grouped_gemm=False, **more)
    if "experimental_attention_variant" in dict(case.model.extra_config):
        spec.submodules.self_attention = sparse_attention()
    return spec


def mtp_spec(case: Case, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The spec of the layers that predict further tokens, if this chunk has them; None otherwise."""
    if config.mtp_num_layers is None:
        return None
    return get_gpt_mtp_block_spec(config, layer_spec(case), use_transformer_engine=False, vp_stage=vp_stage)


def build_chunks(case: Case, config: TransformerConfig) -> list[torch.nn.Module]:
    """This rank's model chunks. Their names decide their weights."""
    return [build_chunk(case, config, chunk if case.vp else None) for chunk in range(case.vp or 1)]


def build_chunk(case: Case, config: TransformerConfig, vp_stage: int | None) -> torch.nn.Module:
    model = case.model
    virtual = {"ignore_virtual": False, "vp_stage": vp_stage}
    place: dict[str, Any] = {
        "pre_process": parallel_state.is_pipeline_first_stage(**virtual),
        "post_process": parallel_state.is_pipeline_last_stage(**virtual),
        "vp_stage": vp_stage,
    }
    if model.hybrid:
        built = importlib.import_module("testkit.megatron.hybrid").hybrid_model(config, model, **place)
    elif model.flags:
        built = flagged.build_flagged(case, config, **place)
    else:
        built = GPTModel(
            config,
            layer_spec(case),
            vocab_size=model.vocab,
            max_sequence_length=model.seq,
            share_embeddings_and_output_weights=model.tied and not case.split_tied,
            position_embedding_type=model.position,
            mtp_block_spec=mtp_spec(case, config, vp_stage),
            **place,
        )
    fill_weights(built, model)
    return built


def global_names(chunk: torch.nn.Module, tied: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name in the whole model, parameter) of one chunk. Tied embeddings have one name, also on the last stage, unless
    that stage has its own copy of the embedding to predict further tokens.
    """
    model = unwrapped(chunk)
    place = Place.here()
    modules = dict(model.named_modules())
    for path, parameter in model.named_parameters():
        name = global_name(path, modules, place)
        if tied and name == "output_layer.weight" and not (model.config.mtp_num_layers and hasattr(model, "embedding")):
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def fill_weights(chunk: torch.nn.Module, model: Model) -> None:
    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, parameter in global_names(chunk, model.tied):
            shape = list(parameter.shape)
            split = getattr(parameter, "tensor_model_parallel", False)
            dim = getattr(parameter, "partition_dim", -1)
            if split:
                shape[dim] *= tp
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3
            if "layernorm" in name and name.endswith("weight"):
                values += 1.0
            parameter.copy_(values.chunk(tp, dim)[tp_rank] if split else values)


def batches(case: Case, step: int, evaluation: bool = False) -> list[torch.Tensor]:
    """The microbatches of one step on this data-parallel rank: int64 (micro_batch, sequence + 1)."""
    model = case.model
    dp_rank = parallel_state.get_data_parallel_rank()
    result = []
    for microbatch in range(case.microbatches):
        seed = 1 + microbatch + 100 * step + 10_000 * dp_rank + 1_000_000 * evaluation
        length = model.seq - (2 * microbatch) % 5 if case.variable_shapes else model.seq
        generator = torch.Generator().manual_seed(seed)
        result.append(torch.randint(model.vocab, (model.micro_batch, length + 1), generator=generator))
    return result


def forward_step(
    per_token: bool, data_iterator: Iterator[torch.Tensor], model: torch.nn.Module, call: Any = None
) -> tuple[Any, Any]:
    """A `forward_step_func` as in a training script. Half of the tokens of the first sequence are masked. ``call`` is
    called in place of the model.
    """
    tokens = next(data_iterator)
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    mask = torch.ones(positions.shape)
    mask[0, : mask.shape[1] // 2] = 0
    inputs, labels, positions, mask = map(of_this_rank, (tokens[:, :-1], tokens[:, 1:], positions, mask))
    more = {} if get_model_config(model).mtp_num_layers is None else {"loss_mask": mask}
    output = (call or model)(inputs, positions, None, labels=labels, **more)

    def loss_func(output: torch.Tensor) -> tuple[Any, ...]:
        total = torch.sum(output.float().view(-1) * mask.view(-1))
        if per_token:
            count = mask.sum().to(torch.int)
            return total, count, {"loss": torch.stack([total.detach(), count.float()])}
        mean = total / mask.sum()
        return mean, {"loss": mean.detach().clone()}

    return output, loss_func


class Run:
    """One case on this rank: model, wrapper, optimizer, and the steps."""

    def __init__(self, case: Case) -> None:
        self.case = case
        set_up_parallel_state(case)
        self.config = make_config(case)
        MTPLossLoggingHelper.tracker = {}  # the first run decides its size
        self.loop = LOOPS[case.loop](self.config, functools.partial(forward_step, case.model.per_token_loss))
        chunks = [self.loop.wrapped(chunk, self._other_chunk) for chunk in build_chunks(case, self.config)]
        if case.split_weight_grad:
            split_weight_grad(chunks)
        self.chunks = self._wrap(chunks)
        self.optimizer = self._optimizer()
        self._hook_config()
        self.losses: list[torch.Tensor] = []

    def _other_chunk(self, **sizes: Any) -> torch.nn.Module:
        """This rank's first model chunk, with other sizes."""
        case = dataclasses.replace(self.case, model=dataclasses.replace(self.case.model, **sizes))
        return build_chunk(case, make_config(case), 0 if case.vp else None)

    def _wrap(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        case = self.case
        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=case.overlap_grad_reduce,
            overlap_param_gather=case.overlap_param_gather,
            align_param_gather=case.align_param_gather,
            use_distributed_optimizer=case.optimizer == "distributed",
            bucket_size=case.bucket_size,
        )
        # As in Megatron's training script, buckets of later chunks are not split, and their reduction is not
        # overlapped.
        return [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]

    def _optimizer(self) -> Any:
        if self.case.optimizer is None:
            return None
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.01,
            clip_grad=self.case.clip_grad,
            use_distributed_optimizer=self.case.optimizer == "distributed",
            overlap_param_gather=self.case.overlap_param_gather,
        )
        return get_megatron_optimizer(config, self.chunks)

    def _hook_config(self) -> None:
        """Set the config's fields that Megatron's training loop sets before the first step."""
        case, chunks, config = self.case, self.chunks, self.config

        def one_or_list(items: list[Any]) -> Any:
            return items[0] if len(items) == 1 else items

        if case.overlap_grad_reduce:
            config.no_sync_func = one_or_list([chunk.no_sync for chunk in chunks])
            if case.align_param_gather:
                config.grad_sync_func = one_or_list([chunk.start_grad_sync for chunk in chunks])
        if case.overlap_param_gather and case.align_param_gather:
            config.param_sync_func = one_or_list([chunk.start_param_sync for chunk in chunks])
        config.finalize_model_grads_func = finalize_model_grads
        if self.optimizer is not None:
            config.grad_scale_func = self.optimizer.scale_loss

    def schedule(self, step: int, forward_only: bool, evaluation: bool = False) -> list[Any]:
        return self._call(self._iterators(step, evaluation), forward_only)

    def _iterators(self, step: int, evaluation: bool = False) -> list[Any]:
        return self.loop.iterators(batches(self.case, step, evaluation), len(self.chunks))

    def _call(self, iterators: list[Any], forward_only: bool) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        case = self.case
        return get_forward_backward_func()(
            forward_step_func=self.loop.forward_step,
            data_iterator=iterators if case.vp else iterators[0],
            model=self.chunks if case.vp else self.chunks[0],
            num_microbatches=case.microbatches,
            seq_length=case.model.seq,
            micro_batch_size=case.model.micro_batch,
            forward_only=forward_only,
            **self.loop.arguments(),
        )

    def step(self, step: int) -> None:
        iterators = self._iterators(step)
        for _ in self.loop.runs(iterators):
            for chunk in self.chunks:
                if not self.case.forward_only:
                    chunk.zero_grad_buffer()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            with torch.no_grad() if self.case.forward_only else contextlib.nullcontext():
                reports = self._call(iterators, self.case.forward_only)
        self.losses += [report["loss"].reshape(-1) for report in reports]
        if self.optimizer is not None:
            self.optimizer.step()

    def check_conversion(self) -> None:
        """Check that the chunks are converted after a training step of ours with split backwards, whoever converts
        them."""
        family = find_family(self.case.schedule or "1f1b")
        if self.case.engine == "ours" and self.case.pp > 1 and family.splits_weight and not self.case.forward_only:
            store = store_of(self.chunks)
            assert store is not None, "the chunks were not converted"
            assert store.report.deferred_share > 0

    def evaluate(self, step: int) -> None:
        """Run a forward-only pass between training steps. It must not change gradients and config."""
        before = {name: grad.clone() for name, grad in self.gradients().items()}
        fields = dict(vars(self.config))
        with self.loop.evaluation():
            self.schedule(step, forward_only=True, evaluation=True)
        changed = [name for name, grad in self.gradients().items() if not torch.equal(grad, before[name])]
        changed += [
            name for name, value in vars(self.config).items() if name not in fields or fields[name] is not value
        ]
        if changed:
            raise AssertionError(f"evaluation changed {changed}")

    def gradients(self) -> Tensors:
        result: Tensors = {}
        for chunk in self.chunks:
            for name, parameter in global_names(chunk, self.case.model.tied):
                grad = parameter.main_grad
                if name in result and self.case.split_tied:
                    grad = result[name] + grad
                assert name not in result or self.case.split_tied or torch.equal(result[name], grad), name
                result[name] = grad
        return result

    def parameters(self) -> Tensors:
        return {name: p.data for chunk in self.chunks for name, p in global_names(chunk, self.case.model.tied)}


def engine(case: Case) -> contextlib.AbstractContextManager[Any]:
    if case.engine == "megatron":
        return contextlib.nullcontext()
    from megatron_pp.integrations import megatron_core

    return megatron_core.installed(any_microbatch_count=True)


def run_job(job: Job) -> dict[str, Any]:
    """Run the job's case on this rank, and save or compare its results. Returns a report of plain numbers."""
    case = job.case
    if job.check is not None:
        module, function = job.check.split(":")
        return {"losses": [], "facts": getattr(importlib.import_module(module), function)(case)}
    lines: list[str] = []
    with engine(case), megatron_trace.recording(lines) if case.trace else contextlib.nullcontext():
        run = Run(case)
        if case.trace:
            megatron_trace.hook_config(run.config, run.chunks, lines)
        if case.forward_only:
            for grad in run.gradients().values():
                grad.fill_(0.5)  # must survive
        for step in range(case.steps):
            run.step(step)
            run.check_conversion()
            if case.evaluate_between:
                run.evaluate(step)
    gradients = run.gradients()
    record = record_of(run.losses, run.loop.notes, gradients, run.parameters() if case.optimizer else {})
    rank = dist.get_rank()
    if job.save is not None:
        write_reference(record, job.save.format(rank=rank))
    report: dict[str, Any] = {
        "losses": [float(loss[0]) for loss in run.losses],
        "trace": lines,
        "grad_size": max(float(grad.abs().max()) for grad in gradients.values()),
    }
    if job.reference is not None:
        report.update(compare(record, read_reference(job, rank), case))
    return report
