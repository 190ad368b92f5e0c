"""Checks on ranks of the arguments of `install()`, as in megatron_checks.py: settings, measuring, plans of steps."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_pp.errors import ConfigError, ScheduleInputError
from megatron_pp.features.measuring import rank_numbers
from megatron_pp.features.packing.packing import Pack, PackingRules, packed
from megatron_pp.features.packing.step_plans import PlansOfKinds
from megatron_pp.features.packing.steps import PackedSteps
from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.megatron.steps.tensorboard import TensorBoardScalars
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.runtime import host
from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case
from tests.functional_tests.megatron_checks import call_schedule, logged, raised, with_fields

OVERRIDES: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_p2p_comm": True},
    {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": False, "p2p_channels": "shared"},
    {"overlap_p2p_comm": False, "batch_p2p_comm": False, "p2p_debug": True, "deallocate_pipeline_outputs": True},
    {"overlap_p2p_comm": True, "pipeline_schedule": "eager_1f1b", "max_pending_sends": 4},
    {"overlap_p2p_comm": True, "variable_seq_lengths": False},
    {"overlap_p2p_comm": True, "offload_chunks": 1},
    {"overlap_p2p_comm": True, "pipeline_schedule": "zb_h1", "split_weight_grad": False},
    {"overlap_p2p_comm": True, "variable_seq_lengths": True, "overlapped_forward_backward": "in_turn"},
)


def settings_reach_the_engine_and_not_the_config(case: Case) -> list[str]:
    """Return the policies of steps under `OVERRIDES`. Gradients equal Megatron's own schedule's to the last bit."""
    run = megatron_lab.Run(case)
    call_schedule(run, forward_only=False)
    theirs = _taken_gradients(run)
    policies = []
    for config in ({}, {"deallocate_pipeline_outputs": False, "variable_seq_lengths": True}):
        for overrides in OVERRIDES:
            with (
                with_fields(run.config, config),
                mock.patch.object(host, "build_plan", wraps=host.build_plan) as built,
                mock.patch.object(schedules, "get_tensor_shapes", wraps=schedules.get_tensor_shapes) as shapes,
                logged() as said,
                megatron_core.installed(strict=True, **overrides),
            ):
                fields = dict(vars(run.config))
                call_schedule(run, forward_only=False)
                assert vars(run.config) == fields, "the config was written to"
                # If shapes vary, later releases of Megatron do not know the shape.
                assert not any(call.kwargs["config"].variable_seq_lengths for call in shapes.call_args_list)
            assert not any("splits backwards" in line for line in said), "advice against what was asked for"
            policies.append(built.call_args.args[0].policy)
            if overrides.get("offload_chunks"):
                assert built.call_args.args[0].offload_chunks, "the plan offloads"
            ours = _taken_gradients(run)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), overrides
    return policies


def what_its_stages_cost_is_measured(case: Case) -> dict[str, Any]:
    """Return the file that two ranks' steps write under `install(measure=2)`. Gradients are equal to the last bit."""
    run = megatron_lab.Run(case)
    with megatron_core.installed(strict=True):
        call_schedule(run, forward_only=False)
    unmeasured = _taken_gradients(run)
    with tempfile.TemporaryDirectory() as folder:  # each rank has its own file name; the first rank writes
        path = os.path.join(folder, "measured.json")
        with megatron_core.installed(strict=True, measure=2, measure_out=path):
            for _ in range(3):
                call_schedule(run, forward_only=False)
                measured = _taken_gradients(run)
                assert all(torch.equal(measured[name], unmeasured[name]) for name in unmeasured)
        content: dict[str, Any] = json.loads(Path(path).read_text()) if os.path.exists(path) else {}
    return content


def metrics_reach_megatrons_writer(case: Case) -> dict[str, list[Any]]:
    """Return the scalars in TensorBoard's files after four steps under `install(metrics=2)`. Only the last rank has a
    writer, as in Megatron's training loop. Each rank adds its own measurements."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    run, last = megatron_lab.Run(case), dist.get_rank() == dist.get_world_size() - 1
    loop: Any = ModuleType("megatron.training.global_vars")
    own: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(sys.modules, {loop.__name__: loop}):
        writer = SummaryWriter(folder) if last else None
        loop.get_tensorboard_writer = lambda: writer
        with megatron_core.installed(strict=True, metrics=2):
            for iteration in range(4):
                loop._GLOBAL_ARGS = SimpleNamespace(curr_iteration=iteration, tensorboard_dir=folder)
                call_schedule(run, forward_only=False)
                call_schedule(run, forward_only=True)
        ((transport, numbers),) = rank_numbers._GATHERED.items()
        own = [values for _, values in sorted(numbers._own.items())]
        if writer is None:
            return {"own": own}
        until = time.monotonic() + 20.0
        while numbers._waiting and time.monotonic() < until:
            time.sleep(0.05)
        TensorBoardScalars(writer, 2).of_pipeline(transport)  # as at the begin of a later step
        writer.close()
        events = EventAccumulator(folder).Reload()
        written = {name: [[one.step, one.value] for one in events.Scalars(name)] for name in events.Tags()["scalars"]}
        return {**written, "own": own}


def steps_of_unequal_microbatches_have_their_plans(case: Case) -> list[str]:
    """Return the schedules of steps under `install(microbatch_costs=...)`. Gradients are equal to the last bit."""
    run = megatron_lab.Run(case)
    with megatron_core.installed(strict=True):
        call_schedule(run, forward_only=False)
    before, ran = _taken_gradients(run), []
    chosen = PlansOfKinds.next_plan

    def noted(self: PlansOfKinds, *arguments: Any) -> Plan:
        ran.append(chosen(self, *arguments))
        return ran[-1]

    costs = [1.0 if k % 2 else 4.0 for k in range(case.microbatches)]
    installed = megatron_core.installed(strict=True, microbatch_costs=lambda: costs)
    with mock.patch.object(PlansOfKinds, "next_plan", noted), installed:
        for _ in range(3):
            call_schedule(run, forward_only=False)
            after = _taken_gradients(run)
            assert all(torch.equal(after[name], before[name]) for name in before)
    return [plan.spec.schedule for plan in ran]


def packed_steps_are_planned_while_it_trains(case: Case) -> list[Any]:
    """Return for each step under `install(microbatch_costs=PackedSteps(...))` its packs in order, whether the order was
    searched, and the schedule that was found, if any. Gradients equal those of Megatron's own schedule to the last
    bit."""
    run = megatron_lab.Run(case)
    lengths = [[2, 8, 1, 7, 3, 8, 5, 8], [8, 1, 1, 8, 6, 8, 8], [4, 4], [8, 2, 8, 3, 8, 1, 8, 1, 8]]
    found, ours = [], []
    for schedule in ("1f1b", "zb_h1"):
        steps = PackedSteps(iter(lengths), PackingRules(1, case.model.seq, 0.5))
        settings = {"pipeline_schedule": schedule, "variable_seq_lengths": True, "overlap_p2p_comm": True}
        with megatron_core.installed(strict=True, microbatch_costs=steps, **settings):
            for given in lengths:
                taken = steps.next()
                packs = taken.of_rank(0)
                _packed_step(run, packs)
                ours.append((packs, _taken_gradients(run)))
                planned = steps._plan and steps._plan.spec.schedule
                moved = taken != packed(given, steps.rules)
                found.append(([pack.sequences for pack in packs], moved, planned))
    with with_fields(run.config, {"variable_seq_lengths": True}):
        for packs, gradients in ours:
            _packed_step(run, packs)
            theirs = _taken_gradients(run)
            assert all(torch.equal(gradients[name], theirs[name]) for name in theirs), packs
    return found


def _packed_step(run: megatron_lab.Run, packs: Sequence[Pack]) -> None:
    generators = [torch.Generator().manual_seed(sum(pack.sequences)) for pack in packs]
    shapes = [(1, pack.tokens + 1) for pack in packs]
    data = [
        torch.randint(run.case.model.vocab, shape, generator=generator)
        for shape, generator in zip(shapes, generators, strict=True)
    ]
    call_schedule(run, data_iterator=iter(data), num_microbatches=len(packs), micro_batch_size=1, forward_only=False)


def _taken_gradients(run: megatron_lab.Run) -> dict[str, torch.Tensor]:
    """Return the gradients of the last step, and set them to zero."""
    taken = {name: grad.clone() for name, grad in run.gradients().items()}
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    assert any(grad.abs().max() > 0 for grad in taken.values())
    return taken


def wrong_settings_install_nothing(case: Case) -> list[str]:
    """Assert that a second call replaces the settings, and a call with wrong settings raises and changes nothing."""
    messages = [
        raised(ConfigError, "did you mean p2p_timeout?", lambda: megatron_core.install(p2p_timeouts=3)),
        raised(ConfigError, "p2p_timeout is 0", lambda: megatron_core.install(p2p_timeout=0)),
    ]
    assert not megatron_core.is_installed()
    run = megatron_lab.Run(case)
    with megatron_core.installed(pipeline_schedule="eager_1f1b"):
        with contextlib.suppress(ConfigError):
            megatron_core.install(pipeline_schedule="late_1f1b")
        assert _schedule_of_a_step(run) == "eager_1f1b"
        with megatron_core.installed(p2p_timeout=30):
            assert _schedule_of_a_step(run) == "1f1b"
        assert _schedule_of_a_step(run) == "eager_1f1b"
        megatron_core.install()
        assert _schedule_of_a_step(run) == "1f1b"
        with mock.patch.dict(os.environ, {"MEGATRON_PP_PIPELINE_SCHEDULE": "gpipe"}):
            megatron_core.install()
        assert _schedule_of_a_step(run) == "gpipe"
        messages.append(raised(ScheduleInputError, "zb_v", lambda: _with_schedule(run, "zb_v")))
    return messages


def _with_schedule(run: megatron_lab.Run, schedule: str) -> None:
    with megatron_core.installed(pipeline_schedule=schedule):
        call_schedule(run)


def _schedule_of_a_step(run: megatron_lab.Run) -> str:
    with mock.patch.object(host, "build_plan", wraps=host.build_plan) as built:
        call_schedule(run)
    return str(built.call_args.args[0].schedule)
