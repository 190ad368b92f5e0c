"""One rank of Megatron-core's pipelines of several modules, under its own schedule and under the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.tools.parity import cpu_stand_in
from testkit.models.module_models import HIDDEN, RankModel, Setup, loss_of, sink_of


@dataclass(frozen=True)
class MegatronCase:
    """``per_token``: the loss function returns numbers of tokens. ``grad_sync``: the config has a function for it.
    ``hangs``: Megatron's own schedule hangs or fails. ``ddp``: stages are in Megatron's DistributedDataParallel.
    ``images``: the model is ``ImageTokens``."""

    setup: Setup
    per_token: bool = False
    grad_sync: bool = False
    hangs: bool = False
    ddp: bool = False
    images: bool = False


COUNTS = ((1, 3), (0, 0), (2, 2), (4, 0))  # numbers of image tokens in each sample of a microbatch


class ImageTokens(RankModel):
    """A vision encoder and replicas of a language model, as Megatron's MimoModel. The tokens of all samples are in one
    dimension, and each sample has a different number of them. A sample of text alone has none: an empty tensor that
    requires a gradient."""

    def batches(self, step: int) -> Iterator[Any]:
        for mb in range(self.setup.microbatches):
            counts = COUNTS[(step + mb) % len(COUNTS)]
            generator = torch.Generator().manual_seed(100 * step + mb)
            tokens = torch.randn(sum(counts), HIDDEN, generator=generator)
            texts = torch.randn(len(counts), 3, 1, HIDDEN, generator=generator)
            yield counts, tokens, texts

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        counts, tokens, texts = batch
        if "vision" in self.places:
            made: Any = self.stages["vision"](tokens) if len(tokens) else torch.empty(0, HIDDEN, requires_grad=True)
            if len(set(counts)) > 1:
                made._mimo_bridge_split_sizes = [*counts]
            return {"vision": made}
        text = texts[self.places["llm"][1]]
        return {"llm": self.stages["llm"](torch.cat([self.given["vision"][:, None], text]))}


def own_and_ours(rank: int, size: int, checkout: str, cases: list[MegatronCase]) -> list[tuple[Any, Any]]:
    """Return for each case the steps under Megatron's own schedule and under the engine, each as (losses, gradients,
    events). ``checkout``: the folder of a Megatron-LM, or empty for the installed one."""
    megatron = _import_megatron(checkout)
    from megatron_pp.integrations import megatron_core
    from megatron_pp.runtime.communicators import close_communicators

    found = []
    for case in cases:
        own = [] if case.hangs else _steps(megatron, rank, case)
        with megatron_core.installed(strict=True):
            found.append((own, _steps(megatron, rank, case)))
    close_communicators()
    return found


def handed_back(rank: int, size: int, checkout: str, case: MegatronCase) -> list[str]:
    """Return the reasons for which calls that the engine does not serve are left to Megatron."""
    megatron = _import_megatron(checkout)
    from megatron_pp.errors import NotServedError
    from megatron_pp.integrations import megatron_core

    reasons = []
    for settings in ({"pipeline_schedule": "zb_h1"}, {"p2p_channels": "shared"}):
        with megatron_core.installed(strict=True, **settings), pytest.raises(NotServedError) as raised:
            _steps(megatron, rank, case)
        reasons.append(str(raised.value))
    with megatron_core.installed(pipeline_schedule="zb_h1"):
        assert len(_steps(megatron, rank, case)) == case.setup.steps
    return reasons


def _import_megatron(checkout: str) -> Any:
    if checkout:
        sys.path.insert(0, checkout)
    cpu_stand_in.redirect()
    with cpu_stand_in.triton_stand_in():
        import megatron.core.pipeline_parallel.multimodule_communicator
        import megatron.core.pipeline_parallel.schedules
        import megatron.core.process_groups_config as groups
        from megatron.core import ModelParallelConfig
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.hyper_comm_grid import HyperCommGrid
        from megatron.core.transformer import TransformerConfig

    return SimpleNamespace(
        schedules=megatron.core.pipeline_parallel.schedules,
        communicator=megatron.core.pipeline_parallel.multimodule_communicator.MultiModulePipelineCommunicator,
        groups=groups,
        config=ModelParallelConfig,
        grid=HyperCommGrid,
        ddp=DistributedDataParallel,
        ddp_config=DistributedDataParallelConfig,
        layers_config=TransformerConfig,
    )


_GRIDS: dict[Any, Any] = {}  # groups of this process: those of one grid are made once


def _grids(megatron: Any, setup: Setup) -> dict[str, Any]:
    for module in setup.modules:
        if module in _GRIDS:
            continue
        shape = [len(module.ranks[0][0]), 1, module.stages, len(module.ranks), 1, 1]
        names = ["tp", "cp", "pp", "dp", "ep", "expt_dp"]
        grid = megatron.grid(shape, names, rank_offset=module.ranks[0][0][0], backend="nccl")
        for dims in (*([one] for one in names), ["dp", "cp"]):
            grid.create_pg(dims)
        _GRIDS[module] = grid
    return {module.name: _GRIDS[module] for module in setup.modules}


def _steps(megatron: Any, rank: int, case: MegatronCase) -> list[Any]:
    setup, sink = case.setup, sink_of(case.setup)
    grids = _grids(megatron, setup)
    model = (ImageTokens if case.images else RankModel)(setup, rank)
    happened: list[str] = []
    model.config = config = _config(megatron, case, model, happened)
    topology = {module.name: list(setup.topology.get(module.name, ())) for module in setup.modules}
    dimensions = {"dim_mapping": {"s": 0, "b": 1, "h": 2}, "module_output_ndim": {"vision": 2} if case.images else None}
    communicator = megatron.communicator(grids, topology, config, **dimensions)
    collections = {}
    for name in model.places:
        collections[name] = one = megatron.groups.ProcessGroupCollection()
        for dims in ("tp", "cp", "pp", "dp", "ep", "expt_dp"):
            setattr(one, dims, grids[name].get_pg(dims))
        one.dp_cp = grids[name].get_pg(["dp", "cp"])
        if case.ddp:
            model.stages[name] = megatron.ddp(
                config=megatron.layers_config(num_layers=1, hidden_size=4, num_attention_heads=1),
                ddp_config=megatron.ddp_config(overlap_grad_reduce=True, bucket_size=8),
                module=model.stages[name],
                pg_collection=one,
            )
    language = sink if sink in collections else None
    collection = megatron.groups.MultiModuleProcessGroupCollection(collections, language)

    def step_function(batches: Any, model: RankModel) -> tuple[Any, Any]:
        output = model(next(batches))
        happened.append("F")
        for name, tensor in output.items():
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, name=name: happened.append(f"B {name}"))

        def loss_func(output: dict[str, torch.Tensor]) -> Any:
            loss, report = loss_of(output[sink])
            return (loss * 3, torch.tensor(3, dtype=torch.int), report) if case.per_token else (loss, report)

        return output, loss_func

    found = []
    for step in range(setup.steps):
        for stage in model.stages.values():
            stage.zero_grad_buffer() if case.ddp else stage.zero_grad()
        happened.clear()
        reports = megatron.schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=step_function,
            data_iterator=model.batches(step),
            model=[model],
            num_microbatches=setup.microbatches,
            seq_length=8,
            micro_batch_size=1,
            forward_only=setup.forward_only,
            p2p_communicator=communicator,
            pg_collection=collection,
        )
        # Arrays, since Megatron's main branch pickles tensors by a function that other processes lack.
        made = main_gradients(model) if case.ddp else model.gradients()
        gradients = {place: [t if t is None else t.numpy() for t in own] for place, own in made.items()}
        found.append(([report["loss"] for report in reports], gradients, list(happened)))
    return found


def main_gradients(model: RankModel) -> dict[Any, list[torch.Tensor | None]]:
    return {at: [p.main_grad.clone() for p in model.stages[name].parameters()] for name, at in model.places.items()}


def _config(megatron: Any, case: MegatronCase, model: RankModel, happened: list[str]) -> Any:
    config = megatron.config(pipeline_dtype=torch.float32)

    @contextmanager
    def no_sync() -> Any:
        happened.append("no_sync")
        with ExitStack() as stack:
            for stage in model.stages.values() if case.ddp else ():
                stack.enter_context(stage.no_sync())
            yield
        happened.append("sync")

    def finalize(chunks: Any, tokens: Any, pg_collection: Any = None, force_all_reduce: Any = None) -> None:
        assert chunks == [model]
        for stage in model.stages.values() if case.ddp else ():
            stage.finish_grad_sync()
        happened.append(f"finalize {None if tokens is None else int(tokens)} {sorted(pg_collection.keys())}")

    config.variable_seq_lengths = True
    config.calculate_per_token_loss = case.per_token
    config.no_sync_func, config.finalize_model_grads_func = no_sync, finalize
    if case.grad_sync:
        config.grad_sync_func = lambda parameters: happened.append(f"grad_sync {len(list(parameters))}")
    config.hidden_size = 4
    for name, value in case.setup.config.items():
        setattr(config, name, value)
    return config
