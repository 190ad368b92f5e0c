"""Checks of V placement under Megatron-core that run on ranks, inside the processes of testkit/megatron/runner.py."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import transformer_block, transformer_layer
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.megatron.steps.v_logs import log_on_last_rank
from megatron_pp.integrations.megatron.steps.v_placement import MirroredGroup, chunk_place
from testkit.megatron import lab
from testkit.megatron.cases import Case


def contents(case: Case) -> list[dict[str, Any]]:
    """Return the contents of each chunk of this rank."""
    lab.set_up_parallel_state(case)
    config = lab.make_config(case)
    return [
        {
            "layers": [layer.layer_number for layer in chunk.decoder.layers],
            "keys": sorted(
                (value.key, value.global_offset)
                for value in chunk.sharded_state_dict().values()
                if hasattr(value, "global_offset")
            ),
            "first": chunk.pre_process,
            "last": chunk.post_process,
            "modules": sorted({name.split(".")[0] for name, _ in chunk.named_parameters()}),
            "norm": any("final" in name for name, _ in chunk.decoder.named_children()),
        }
        for chunk in lab.build_chunks(case, config)
    ]


def contents_of_loop_and_v(case: Case) -> list[list[dict[str, Any]]]:
    loop = contents(dataclasses.replace(case, schedule=None))
    with megatron_core.installed():
        return [loop, contents(case)]


def functions_answer_by_chunk(case: Case) -> list[Any]:
    lab.set_up_parallel_state(case)
    config = lab.make_config(case)
    stages = [(True, 0), (False, 1)], parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage

    def answers() -> list[Any]:
        return [
            [parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk) for chunk in (0, 1)],
            [parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk) for chunk in (0, 1)],
            [transformer_layer.get_transformer_layer_offset(config, vp_stage=chunk) for chunk in (0, 1)],
            [transformer_block.get_num_layers_to_build(config, vp_stage=chunk) for chunk in (0, 1)],
            parallel_state.is_pipeline_last_stage(),
        ]

    before = answers()
    with megatron_core.installed():
        assert answers() == before, "nothing changes before a model is built in a V"
        lab.build_chunks(case, config)
        placed = answers()
        for chunk, spec in enumerate(get_gpt_decoder_block_spec(config, False, vp_stage=c) for c in (0, 1)):
            assert len(spec.layer_specs) == placed[3][chunk]
    assert answers() == before
    assert parallel_state.is_pipeline_first_stage is stages[1]
    assert parallel_state.is_pipeline_last_stage is stages[2]
    return placed


def a_place_is_seen_and_left_again(case: Case) -> None:
    lab.set_up_parallel_state(case)
    group, rank, size = parallel_state.get_pipeline_model_parallel_group(), dist.get_rank(), dist.get_world_size()
    before = dict(vars(parallel_state))
    with chunk_place(1), chunk_place(0):
        assert parallel_state.get_pipeline_model_parallel_group() is group
        assert parallel_state.get_pipeline_model_parallel_rank() == rank
    with chunk_place(1):
        seen = parallel_state.get_pipeline_model_parallel_group()
        assert isinstance(seen, MirroredGroup)
        assert (seen.rank(), seen.size()) == (size - 1 - rank, size)
        assert parallel_state.get_pipeline_model_parallel_rank() == size - 1 - rank
        assert parallel_state.get_pipeline_model_parallel_last_rank() == 0
        assert parallel_state.get_embedding_group(check_initialized=False) is None
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=seen)
        assert total.item() == sum(range(size))
        dist.broadcast(total.fill_(rank), src=size - 1, group=seen)
        assert total.item() == size - 1
    with pytest.raises(KeyError), chunk_place(1):
        raise KeyError
    assert dict(vars(parallel_state)) == before


def tied_weights_start_equal(case: Case) -> list[bool]:
    """Return whether tied weights start equal on the rank of the first and last stage, as Megatron initialises them."""
    lab.set_up_parallel_state(case)
    config = lab.make_config(case)
    with megatron_core.installed():
        fill, lab.fill_weights = lab.fill_weights, lambda *unused: None
        try:
            first, last = lab.build_chunks(case, config)
        finally:
            lab.fill_weights = fill
    if not last.post_process:
        return []
    weights = first.embedding.word_embeddings.weight, last.output_layer.weight
    assert weights[0] is not weights[1]
    assert weights[0].abs().max() > 0
    flags = [getattr(weight, "shared", False) for weight in weights]
    assert all(weight.shared_embedding for weight in weights)
    return [torch.equal(*weights), *flags]


def wrong_placements_are_errors(case: Case) -> list[str]:
    """Return the errors as text; they are the same on every rank."""
    loop, messages = dataclasses.replace(case, schedule=None), []

    def refused(what: Any) -> None:
        with pytest.raises(ScheduleInputError) as error:
            what()
        messages.append(str(error.value))

    plain = lab.Run(loop)
    with megatron_core.installed():
        plain.config.pipeline_schedule = case.schedule
        refused(lambda: plain.schedule(0, False))
        run = lab.Run(case)
        run.config.pipeline_schedule = None
        refused(lambda: run.schedule(0, False))
        refused(lambda: lab.Run(loop))
    with megatron_core.installed():
        refused(lambda: lab.Run(dataclasses.replace(case, vp=None)))
        refused(lambda: lab.Run(dataclasses.replace(case, vp=4)))
    return messages


def _save(run: lab.Run, folder: str) -> None:
    """Save a checkpoint without child processes. Megatron writes from child processes, which ranks may not have here
    since they are daemons. It also logs their memory with psutil, and holds their queue in a process that imports torch
    and is never ended.
    """
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    memory = mock.patch.object(filesystem_async, "_process_memory", return_value=0, create=True)
    with (
        mock.patch.dict(config, daemon=False),
        memory,
        multiprocessing.get_context("fork").Manager() as manager,
        mock.patch.object(filesystem_async, "_results_queue", manager.Queue()),
    ):
        dist_checkpointing.save(_state(run), folder)


def _state(run: lab.Run, is_loading: bool = False) -> dict[str, Any]:
    models = {f"model{n}": chunk.module.sharded_state_dict() for n, chunk in enumerate(run.chunks)}
    return models | {"optimizer": run.optimizer.sharded_state_dict(models, is_loading=is_loading)}


def _load(run: lab.Run, folder: str) -> None:
    state = dist_checkpointing.load(_state(run, is_loading=True), folder)
    for number, chunk in enumerate(run.chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    run.optimizer.load_state_dict(state["optimizer"])


def _forget(run: lab.Run) -> None:
    with torch.no_grad():
        for value in run.parameters().values():
            value.fill_(7.0)


def checkpoints_go_from_a_loop_to_a_v_and_back(case: Case) -> dict[str, Any]:
    """Train a step under 1F1B and save; load, train and save in a V; load that under 1F1B. Compare with 1F1B alone."""
    loop = dataclasses.replace(case, vp=None, schedule=None)
    with tempfile.TemporaryDirectory() as folder:
        folders: list[Any] = [[f"{folder}/{name}" for name in ("loop", "v")]]
        dist.broadcast_object_list(folders, src=0)
        dist.barrier()
        with megatron_core.installed():
            alone = lab.Run(loop)
            alone.step(0)
            _save(alone, folders[0][0])
            for step in (1, 2):
                alone.step(step)
        with megatron_core.installed():
            run = lab.Run(case)
            _forget(run)
            _load(run, folders[0][0])
            run.step(1)
            _save(run, folders[0][1])
        with megatron_core.installed():
            back = lab.Run(loop)
            _forget(back)
            _load(back, folders[0][1])
            back.step(2)
        dist.barrier()
    losses = {name: [float(loss) for loss in r.losses] for name, r in (("alone", alone), ("v", run), ("back", back))}
    after, expected = back.parameters(), alone.parameters()
    return {"losses": losses, "equal": all(torch.equal(after[name], expected[name]) for name in expected)}


def forward_steps_see_their_stage(case: Case) -> list[list[Any]]:
    """Return for each chunk its number and what Megatron's `is_pipeline_first_stage` and `is_pipeline_last_stage` tell
    a training script's forward step."""
    seen: dict[int, list[Any]] = {}

    def forward_step(per_token: bool, data_iterator: Any, model: torch.nn.Module) -> Any:
        chunk = wrapped_attribute(model, "vp_stage")
        seen[chunk] = [chunk, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()]
        assert parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1) == (dist.get_rank() == 0)
        return original(per_token, data_iterator, model)

    original = lab.forward_step
    with megatron_core.installed(), mock.patch.object(lab, "forward_step", forward_step):
        lab.Run(case).step(0)
    assert parallel_state.get_pipeline_model_parallel_rank() == dist.get_rank()
    return [seen[chunk] for chunk in sorted(seen)]


def the_schedule_of_install_decides(case: Case) -> list[Any]:
    """Return this rank's chunks and its number of losses under a config that names no schedule."""
    with megatron_core.installed(pipeline_schedule=case.schedule):
        run = lab.Run(dataclasses.replace(case, schedule=None))
        run.step(0)
    stages = [[c.module.pre_process, c.module.post_process] for c in run.chunks]
    return [stages, len(run.losses)]


def reports_reach_the_last_rank(case: Case) -> list[str]:
    """Return reports of several kinds, as text."""

    def forward_step(per_token: bool, data_iterator: Any, model: torch.nn.Module) -> Any:
        output, loss_func = original(per_token, data_iterator, model)

        def more(output: torch.Tensor) -> Any:
            loss, report = loss_func(output)
            more = {"name": "a", "count": torch.tensor([3, 4]), "nested": [report["loss"].double().reshape(1, 1)]}
            return loss, report | more

        return output, more

    original = lab.forward_step
    with megatron_core.installed(), mock.patch.object(lab, "forward_step", forward_step):
        return [str(report) for report in lab.Run(case).schedule(0, True)]


def logs_of_loop_and_v(case: Case) -> list[Any]:
    """Return what Megatron's training loop would log on this rank after two steps, under its own schedule and in a V:
    the values of further tokens, of experts, and of a dict of the program."""
    own: dict[str, Any] = {}
    log_on_last_rank("of the test", own)
    loop = dataclasses.replace(case, schedule=None, policy="plain", deallocate=False)
    return [_logged(loop, own), _logged(case, own)]


def _logged(case: Case, own: dict[str, Any]) -> dict[str, Any]:
    """Return the logged values of each step, read as a training loop reads them."""

    def forward_step(per_token: bool, data_iterator: Any, model: torch.nn.Module) -> Any:
        output, loss_func = original(per_token, data_iterator, model)

        def logging_loss(output: torch.Tensor) -> Any:
            loss, report = loss_func(output)
            own["sum"] = own.get("sum", 0) + report["loss"]
            own["group"] = parallel_state.get_data_parallel_group()
            own["seen"] = [*own.get("seen", []), float(report["loss"])]
            return loss, report

        return output, logging_loss

    original, total, logged = lab.forward_step, {}, []
    with (
        megatron_core.installed() if case.schedule else contextlib.nullcontext(),
        mock.patch.object(lab, "forward_step", forward_step),
    ):
        run = lab.Run(case)
        for step in (0, 1):
            run.step(step)
            MTPLossLoggingHelper.track_mtp_metrics(1 / case.microbatches, step, None, None, total)
            if case.model.experts:
                _track_experts(case, step, total)
            if own:
                dist.all_reduce(own["sum"], group=own["group"])
                logged.append([float(own["sum"]), own["seen"]])
                own.clear()
    return {name: float(value) for name, value in total.items()} | {"own": logged}


def _track_experts(case: Case, step: int, total: dict[str, Any]) -> None:
    layers = case.model.layers + (dict(case.model.extra_config).get("mtp_num_layers") or 0)
    names = {"force_initialize": True, "track_names": ["load_balancing_loss", "z_loss"], "num_layers": layers}
    moe_utils.track_moe_metrics(1 / case.microbatches, step, total_loss_dict=total, **names)


def what_cannot_be_sent_is_an_error_on_both_ranks(case: Case) -> str:
    def forward_step(per_token: bool, data_iterator: Any, model: torch.nn.Module) -> Any:
        output, loss_func = original(per_token, data_iterator, model)
        return output, lambda output: (loss_func(output)[0], {"loss": lambda: None})

    original = lab.forward_step
    with megatron_core.installed(), mock.patch.object(lab, "forward_step", forward_step):
        run = lab.Run(case)
        with pytest.raises(ScheduleInputError) as error:
            run.schedule(0, True)
    lab.forget_groups()  # a failed step has ended them
    return str(error.value)


def steps_after_uninstall(case: Case) -> list[str]:
    """Return the error of each chunk of a model in a V after the engine is uninstalled, then after it is installed
    again. Rank 0, which has the first stage, calls Megatron's schedule."""
    found = []
    with megatron_core.installed(any_microbatch_count=True):
        run = lab.Run(case)
        run.step(0)
    tokens = torch.zeros(1, case.model.seq, dtype=torch.int64)
    calls = [lambda: run.step(1)] if dist.get_rank() == 0 else []
    for call in (*calls, *(lambda chunk=chunk: chunk(tokens, tokens, None) for chunk in run.chunks)):
        with pytest.raises(ScheduleInputError) as raised:
            call()
        found.append(str(raised.value))
    dist.barrier()
    with megatron_core.installed(any_microbatch_count=True):
        run.step(1)
    return found
