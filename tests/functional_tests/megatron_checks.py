"""Checks of the Megatron-core plug-in that run on ranks, in the processes of testkit/megatron/runner.py.

Each takes a case, asserts, and returns what its test compares between ranks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import pipeline_parallel as megatron_pipeline_parallel
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import p2p_communication, schedules

from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.megatron.releases import reads as megatron_reads
from megatron_pp.integrations.megatron.releases import release as megatron_release
from megatron_pp.integrations.megatron.releases import versions as megatron_versions
from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case


def installed_release(case: Case) -> dict[str, Any]:
    """Return the table's row for the installed release, after its signatures have been checked."""
    megatron = megatron_release.load_megatron()
    assert megatron.row == megatron_versions.row_of(megatron.version)
    assert megatron.unknown_reads is None
    assert megatron.changed is None
    release = megatron_versions.release_of(megatron.version)
    assert megatron_reads.unknown_reads(megatron.schedules, release, megatron.version) is None, "also where it is read"
    return {"version": megatron.version, "release": megatron.row.release}


def names_are_replaced_and_restored(case: Case) -> None:
    """Assert that `get_forward_backward_func` returns the named function, also in modules that have imported it."""
    megatron_lab.set_up_parallel_state(case)
    originals, signatures = _named(), {name: inspect.signature(function) for name, function in _named().items()}
    script = types.ModuleType("a_training_script")
    exec("from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining as run", script.__dict__)
    with mock.patch.dict(sys.modules, {script.__name__: script}):
        megatron_core.install()
        ours = _named()
        assert not set(ours.values()) & set(originals.values())
        assert megatron_pipeline_parallel.get_forward_backward_func() is script.run
        assert script.run is ours["forward_backward_no_pipelining"]
        for name, function in ours.items():
            assert inspect.signature(function) == signatures[name]
            assert pickle.loads(pickle.dumps(function)) is function
        megatron_core.uninstall()
        assert not megatron_core.is_installed()
        assert _named() == originals
        assert script.run is originals["forward_backward_no_pipelining"]


def _named() -> dict[str, Any]:
    return {name: getattr(schedules, name) for name in megatron_versions.ENTRIES}


def context_manager_restores_what_was(case: Case) -> None:
    originals = _named()
    with contextlib.suppress(KeyError), megatron_core.installed():
        assert megatron_core.is_installed()
        raise KeyError
    assert _named() == originals
    megatron_core.install(strict=True)
    with megatron_core.installed(strict=False):
        assert not schedules.forward_backward_no_pipelining.plugin.settings.strict
    assert schedules.forward_backward_no_pipelining.plugin.settings.strict, "the strictness from before must be back"
    megatron_core.uninstall()


def schedules_are_chosen_as_megatron_does(case: Case) -> list[str]:
    """Return the names of Megatron's functions that ours replace, with and without a pipeline and virtual stages."""
    megatron_lab.set_up_parallel_state(case)
    with megatron_core.installed():
        names = [schedules.get_forward_backward_func().__name__]
        if megatron_release.load_megatron().row.release >= (0, 16):
            names += [schedules.get_forward_backward_func(*sizes).__name__ for sizes in ((1, None), (2, None), (4, 2))]
    return names


class _Fake:
    """Replaces one of Megatron's schedules, to notice that a call was handed back to it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> list[str]:
        self.calls.append(arguments)
        return ["megatron's own"]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_pp")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def with_fields(config: Any, fields: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in fields.items():
            stack.enter_context(mock.patch.object(config, name, value, create=True))
        yield


def call_schedule(run: megatron_lab.Run, **changed: Any) -> list[Any]:
    """Call the schedule once, forward-only, with this run's model and with ``changed`` arguments."""
    arguments: dict[str, Any] = {
        "forward_step_func": lambda data_iterator, model: megatron_lab.forward_step(False, data_iterator, model),
        "data_iterator": iter(megatron_lab.batches(run.case, 0)),
        "model": run.chunks[0],
        "num_microbatches": run.case.microbatches,
        "seq_length": run.case.model.seq,
        "micro_batch_size": run.case.model.micro_batch,
        "forward_only": True,
    }
    if run.case.vp:
        arguments["data_iterator"] = [iter(megatron_lab.batches(run.case, 0)) for _ in run.chunks]
        arguments["model"] = run.chunks
    arguments.update(changed)
    return schedules.get_forward_backward_func()(**arguments)


def _subclassed(kind: type, **changed: Any) -> Any:
    derived = type("Derived", (kind,), changed)
    return derived.__new__(derived)


def unserved_steps_are_handed_back(case: Case) -> list[str]:
    """Assert that Megatron's own function gets the arguments of each kind of step that the engine does not serve.

    Return the warnings, one for each kind.
    """
    run = megatron_lab.Run(case)
    unserved: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"hybrid_context_parallel": True}, {}),
        ({"cuda_graph_impl": "full_iteration"}, {}),
        ({"use_ring_exchange_p2p": True}, {}),
        ({}, {"p2p_communicator": _subclassed(p2p_communication.P2PCommunicator, recv_forward=None)}),
    ]
    unserved += [
        ({}, {"p2p_communicator": _subclassed(kind)}) for kind in megatron_release.load_megatron().multi_module
    ]
    fake = _Fake("forward_backward_no_pipelining")
    warnings: list[str] = []
    with megatron_core.installed(), mock.patch.object(getattr(schedules, fake.__name__), "theirs", fake):
        for fields, arguments in unserved:
            with with_fields(run.config, fields):
                with logged() as lines, megatron_core.installed():
                    assert schedules.get_forward_backward_func().theirs is fake
                    for _ in range(2):
                        assert call_schedule(run, **arguments) == ["megatron's own"]
                assert all(item in fake.calls[-1].items() for item in arguments.items())
                before = len(fake.calls)
                with megatron_core.installed(strict=True):
                    words = "does not serve"
                    error = raised(megatron_core.NotServedError, words, lambda a=arguments: call_schedule(run, **a))
                reason = error.partition("; install()")[0]
                said = [line.partition(": Megatron-core's own")[0] for line in lines]
                known = any(line.startswith(reason) for line in warnings)  # two kinds of calls may have the same reason
                assert said == ([] if known else [reason]), "one warning for all calls of one reason"
                warnings += lines
                assert len(fake.calls) == before, "strict must not call Megatron's function"
        with (
            mock.patch.object(run.config, "overlap_moe_expert_parallel_comm", True, create=True),
            megatron_core.installed(),
        ):
            before = len(fake.calls)
            assert len(call_schedule(run, forward_only=True)) == case.microbatches, "evaluation is not combined"
            assert len(fake.calls) == before
    return warnings


def raised(kind: type[Exception], words: str, function: Any) -> str:
    with pytest.raises(kind) as caught:
        function()
    assert words in str(caught.value)
    return str(caught.value)


def impossible_arguments_are_errors(case: Case) -> list[str]:
    """Assert that each contradiction raises on every rank before a message is sent, and that a step runs afterwards."""
    run = megatron_lab.Run(case)
    one = iter(())
    messages = []
    with megatron_core.installed():
        for fields, arguments, words in (
            ({"overlap_p2p_comm": True, "batch_p2p_comm": True}, {}, "overlap_p2p_comm"),
            ({"pipeline_dtype": None}, {}, "pipeline_dtype"),
            ({"microbatch_group_size_per_vp_stage": 1}, {}, "microbatch_group_size_per_vp_stage is 1"),
            ({"virtual_pipeline_model_parallel_size": 3}, {}, "virtual_pipeline_model_parallel_size is 3"),
            ({}, {"num_microbatches": 0}, "num_microbatches is 0"),
            ({}, {"num_microbatches": 3}, "the last group has 1 of 2 microbatches"),
            ({}, {"num_microbatches": 1}, "fewer microbatches than ranks"),
            ({}, {"model": run.chunks[0]}, "list of model chunks"),
            ({}, {"data_iterator": one}, "list of data iterators"),
            ({}, {"data_iterator": [one]}, "1 data iterators were given for 2"),
            ({}, {"adjust_tensor_shapes_fn": lambda receive, send: (receive, send)}, "adjust_tensor_shapes_fn"),
            ({"pipeline_schedule": "zb_v"}, {}, "zb_v"),
            ({"pipeline_schedule": "zigzag"}, {}, "zigzag"),
            ({"sequence_slices": 2}, {}, "attention keeps no keys and values from slice to slice"),
            ({"pipeline_schedule": "vocab_1f1b"}, {}, "which splits the output layer over all ranks"),
            ({"skip_tensors": "a=0>1"}, {}, "Megatron's models give a stage one tensor"),
            ({"hybrid_context_parallel": True}, {}, "its pipelined schedules ignore the flag"),
        ):
            with with_fields(run.config, fields):
                messages.append(raised(ScheduleInputError, words, lambda a=arguments: call_schedule(run, **a)))
        with megatron_core.installed(any_microbatch_count=True):
            call_schedule(run, num_microbatches=3)
        missing = "is missing the keyword argument(s) data_iterator, model, num_microbatches"
        schedule = schedules.get_forward_backward_func()
        messages.append(raised(TypeError, missing, lambda: schedule(forward_step_func=print)))
        reports = call_schedule(run)
        assert len(reports) == (case.microbatches if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else 0)
        lengths = {"seq_length": torch.tensor(case.model.seq), "num_microbatches": torch.tensor(case.microbatches)}
        assert len(call_schedule(run, **lengths, forward_only=None)) == len(reports), "as in Megatron"
    return messages


def _without_groups() -> None:
    more = {"forward_step_func": None, "data_iterator": None, "seq_length": 1, "micro_batch_size": 1}
    schedules.forward_backward_no_pipelining(model=None, num_microbatches=1, **more)


def parallel_state_is_not_initialised(case: Case) -> str:
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    with megatron_core.installed():
        return raised(ScheduleInputError, "parallel_state is not initialised", _without_groups)


def distributed_is_not_initialised(case: Case) -> str:
    """Destroy this rank's process group and return the error; these processes can run no other check afterwards."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    with megatron_core.installed():
        return raised(ScheduleInputError, "init_process_group", _without_groups)


def own_groups_and_communicator_are_taken(case: Case) -> list[float]:
    """Pass process groups and Megatron's communicator, as scripts that train several models do. Return the losses.

    If a group that the release needs is missing, the call raises at once, not after the step.
    """
    run = megatron_lab.Run(case)
    megatron = megatron_release.load_megatron()
    groups = megatron.default_groups()
    communicator = p2p_communication.P2PCommunicator(pp_group=groups.pp, config=run.config)
    with megatron_core.installed(), torch.no_grad():
        for name in megatron.row.groups:
            some = {megatron.row.groups_keyword: types.SimpleNamespace(**{**vars(groups), name: None})}
            delattr(some[megatron.row.groups_keyword], name)
            raised(ScheduleInputError, f" has no {name}; ", lambda some=some: call_schedule(run, **some))
        reports = call_schedule(run, p2p_communicator=communicator, **{megatron.row.groups_keyword: groups})
    return [float(report["loss"]) for report in reports]


class _Teacher(torch.nn.Module):
    """A model on one rank."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer, self.config = torch.nn.Linear(4, 1, bias=False), config
        torch.nn.init.constant_(self.layer.weight, 0.5)

    def set_input_tensor(self, given: Any) -> None: ...

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.layer(data)

    def step(self) -> list[torch.Tensor]:
        """Run a step by the schedule without a pipeline, and return the losses and the gradient."""
        reports = schedules.forward_backward_no_pipelining(
            forward_step_func=lambda data, model: (model(next(data)), lambda o: (o.mean(), {"loss": o.detach()[0]})),
            data_iterator=iter(torch.arange(12.0).view(3, 1, 4)),
            model=self,
            num_microbatches=3,
            seq_length=1,
            micro_batch_size=1,
        )
        return [*(report["loss"] for report in reports), self.layer.weight.grad]


def a_rank_runs_a_model_of_its_own(case: Case) -> int | None:
    """Run a model of one rank between steps of a pipeline in a V, for which the settings are. Return the number of its
    tensors, which are equal to those by Megatron's own function; None under 0.14, whose models cannot be built for a
    V."""
    if megatron_release.load_megatron().row.release < (0, 15):
        return None
    with megatron_core.installed(strict=True):
        run = megatron_lab.Run(case)
    fields = {"grad_scale_func": None, "no_sync_func": None, "finalize_model_grads_func": None}
    with with_fields(run.config, fields):
        config = copy.copy(run.config)
    theirs, ours = _Teacher(config).step(), []
    with megatron_core.installed(strict=True):
        call_schedule(run, forward_only=False)
        if not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            ours = _Teacher(config).step()
        call_schedule(run, forward_only=False)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=bool(ours)))
    return len(ours)


def checkpointed_microbatches(case: Case) -> list[list[Any]]:
    """Return the checkpointing arguments that forward_step_func gets under Megatron's schedule and under ours."""
    received: list[list[Any]] = []
    run = megatron_lab.Run(case)
    run.config.num_microbatches_with_partial_activation_checkpoints = 1

    def forward_step(data_iterator: Any, model: Any, *more: Any) -> Any:
        received[-1].append(more)
        return megatron_lab.forward_step(False, data_iterator, model)

    for engine in (contextlib.nullcontext, megatron_core.installed):
        received.append([])
        with engine():
            call_schedule(run, forward_step_func=forward_step, forward_only=False)
    return [[list(more) for more in calls] for calls in received]


def outputs_that_a_hook_reads_keep_their_data(case: Case) -> list[float]:
    """Run two steps under our engine, one that frees outputs and one that keeps them. Assert equal bits, and return the
    largest absolute value of each gradient."""
    run = megatron_lab.Run(case)
    gradients = []

    def forward_step(data_iterator: Any, model: Any) -> Any:
        output, loss_func = megatron_lab.forward_step(False, data_iterator, model)
        if output.dim() == 3:  # the tensor that the next stage gets
            output.register_hook(lambda grad: grad * (1.0 + 0.1 * torch.sin(output.detach())))
        return output, loss_func

    for deallocate in (True, False):
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        with with_fields(run.config, {"deallocate_pipeline_outputs": deallocate}), megatron_core.installed():
            call_schedule(run, forward_step_func=forward_step, forward_only=False)
        gradients.append({name: grad.clone() for name, grad in run.gradients().items()})
    freed, kept = gradients
    assert all(torch.equal(freed[name], kept[name]) for name in kept)
    return [float(grad.abs().max()) for grad in kept.values()]


def shapes_are_those_of_the_release(case: Case) -> list[float]:
    """Run under a release whose stages send more than the hidden size, as hyper-connections do. Return the losses.

    Its function gives one shape for all ranks, or, as on Megatron's branch dev, one for what a rank receives and one
    for what it sends: wider between stages, and of the hidden size where the pipeline begins and ends.
    """
    run = megatron_lab.Run(case)
    theirs, streams = schedules.get_tensor_shapes, 3
    asked: list[Any] = []

    def get_tensor_shapes(*, config: Any, **arguments: Any) -> Any:
        asked.append((config, arguments["seq_length"]))
        return [(*shape[:-1], streams * shape[-1]) for shape in theirs(config=config, **arguments)]

    def shapes_of_a_side(*, config: Any, pp_group: Any, is_recv: bool = True, **arguments: Any) -> Any:
        between = pp_group.rank() > 0 if is_recv else pp_group.rank() < pp_group.size() - 1
        return get_tensor_shapes(config=config, **arguments) if between else theirs(config=config, **arguments)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        given = run.chunks[0].module.decoder.input_tensor
        if given is not None:
            model.module.decoder.set_input_tensor(given.chunk(streams, -1)[0].contiguous())
        output, loss_func = megatron_lab.forward_step(False, data_iterator, model)
        return (torch.cat([output] * streams, -1) if output.dim() == 3 else output), loss_func

    losses: list[float] = []
    with megatron_core.installed():
        expected = [float(report["loss"]) for report in call_schedule(run, forward_only=False)]
        for replacement in (get_tensor_shapes, shapes_of_a_side):
            with mock.patch.object(schedules, "get_tensor_shapes", replacement):
                reports = call_schedule(run, forward_step_func=forward_step, forward_only=False)
            assert asked, replacement
            assert all(one == (run.config, case.model.seq) for one in asked)
            asked.clear()
            losses = [float(report["loss"]) for report in reports]
            assert losses == expected
    return losses


def interleaved_shapes_ignore_the_decoders_length(case: Case) -> int:
    """Assert what the name says, as in Megatron's interleaved schedule. Return the number of reports."""
    with megatron_core.installed():
        return len(call_schedule(megatron_lab.Run(case), decoder_seq_length=1))


def evaluation_leaves_autograd_as_it_is(case: Case) -> list[bool]:
    """Evaluate with a forward that computes a gradient, as a model of forces does. Return whether gradients were
    enabled and disabled in stages."""
    run = megatron_lab.Run(case)
    before = {name: grad.clone() for name, grad in run.gradients().items()}
    seen: list[bool] = []

    def forward_step(data_iterator: Any, model: Any) -> Any:
        seen.append(torch.is_grad_enabled())
        given = model.module.decoder.input_tensor
        assert given is None or given.requires_grad, "as what Megatron's communicator receives"
        output, loss_func = megatron_lab.forward_step(False, data_iterator, model)
        if seen[-1]:
            (force,) = torch.autograd.grad(output.sum(), next(model.parameters()), retain_graph=True, allow_unused=True)
            seen.append(force is not None or given is None or output.requires_grad)
        return output, loss_func

    with megatron_core.installed():
        with_grad = call_schedule(run, forward_step_func=forward_step)
        with torch.no_grad():
            without = call_schedule(run, forward_step_func=forward_step)
    assert [float(report["loss"]) for report in with_grad] == [float(report["loss"]) for report in without]
    assert all(torch.equal(grad, before[name]) for name, grad in run.gradients().items())
    return seen


def evaluation_gives_graphs_back(case: Case) -> int:
    """Return the most graphs of forwards that were alive when another forward began: none is kept for a send."""
    run = megatron_lab.Run(case)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def forward_step(data_iterator: Any, model: Any) -> Any:
        nonlocal most
        most = max(most, len(alive))
        output, loss_func = megatron_lab.forward_step(False, data_iterator, model)
        held = output.new_ones(())
        alive.add(held)
        return output * _Keeping.apply(output, held), loss_func

    with megatron_core.installed():
        call_schedule(run, forward_step_func=forward_step)
    assert len(alive) == 0
    return most


class _Keeping(torch.autograd.Function):
    """A node of the autograd graph that keeps `held` alive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        ctx.held = held
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None
