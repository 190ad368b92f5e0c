"""Calls that take over what an earlier call has found: how many files of the package they pass, and that a change of
anything between two calls has the effect that it has on a first call.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import hashlib
import os
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import megatron_pp
from megatron_pp.config.step_fields import IN_ENVIRONMENT, StepFields
from megatron_pp.runtime import kept_calls, run_step
from megatron_pp.runtime.communicators import close_communicators
from testkit import autograd_draw
from testkit.models.linear_stage import LinearStage, forward_step
from testkit.mutants.blind_kept_calls import settings_without
from testkit.processes import run_processes
from testkit.sweeps import EXHAUSTIVE
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = pytest.mark.callers_thread

FILES = 25
"""The most files whose code a call may run, microbatches included. A reader cannot follow more in one go."""
MICROBATCHES, LENGTH, WIDTH = 4, 4, 8

Change = tuple[str, Callable[["Program"], None]]


@dataclass
class Program:
    """A rank of a training program: its model and its arguments of schedules. ``made``: the steps of its calls."""

    library: Any
    state: Any  # Megatron's parallel_state, or the library's
    chunks: int
    size: int
    fields: Mapping[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = {
            "pipeline_model_parallel_size": self.size,
            "virtual_pipeline_model_parallel_size": None if self.chunks == 1 else self.chunks,
        }
        self.ended = True
        self.make_groups()
        sizes = {"num_layers": 4, "hidden_size": WIDTH, "num_attention_heads": 1, **self.sizes}
        self.config = self.library.TransformerConfig(pipeline_dtype=torch.float32, **sizes, **self.fields)
        self.build()
        theirs = run_step._executor

        def noted(step: Any, *more: Any) -> Any:
            executor = theirs(step, *more)
            self.made.append((step, executor))
            return executor

        run_step._executor = noted

    def make_groups(self) -> None:
        """Make the process groups again after a call that failed amid its messages, as a program that goes on does."""
        if self.ended:
            self.end()
            self.state.initialize_model_parallel(**self.sizes)
        self.ended = False

    def end(self) -> None:
        close_communicators()
        self.state.destroy_model_parallel()

    def build(self) -> None:
        torch.manual_seed(1)
        self.model = [LinearStage(self.config, chunk, WIDTH) for chunk in range(self.chunks)]

    def call(self) -> list[Any]:
        count = self.arguments.get("num_microbatches", MICROBATCHES)
        data = [iter([torch.ones(LENGTH, 1, WIDTH)] * count) for _ in self.model]
        listed = self.chunks > 1
        given = {
            "forward_step_func": forward_step,
            "data_iterator": data if listed else data[0],
            "model": self.model if listed else self.model[0],
            "num_microbatches": MICROBATCHES,
            "seq_length": LENGTH,
            "micro_batch_size": 1,
            "forward_only": False,
        }
        losses: list[Any] = self.library.get_forward_backward_func()(**given | self.arguments)
        return losses

    def outcome(self) -> list[tuple[str, Any]]:
        """Call the schedule, and return by name the step, losses and gradients, or the error."""
        self.made.clear()
        parameters = [parameter for chunk in self.model for parameter in chunk.parameters()]
        for parameter in parameters:
            parameter.grad = None
        try:
            losses = self.call()
        except Exception as error:
            self.ended = bool(self.made)
            if self.ended:  # each rank has a different error, by chance
                return [("error", "within a step")]
            return [("error", f"{type(error).__name__}: {error}")]
        ((step, executor),) = self.made
        own = {"inputs", "of_rank", "is_known", "communicator", "observers", "draft"}
        return [
            *((name, value) for name, value in vars(step).items() if name not in own),
            *((f"of_rank.{name}", value) for name, value in vars(step.of_rank).items()),
            ("communicator", step.communicator if step.communicator.size > 1 else None),
            ("observers", [type(one) for one in step.observers]),
            *((name, getattr(executor, name)) for name in ("deallocate", "max_pending_sends", "message_bytes")),
            ("losses", [repr(loss) for loss in losses]),
            ("gradients", [None if one.grad is None else one.grad.tolist() for one in parameters]),
        ]

    def wrongly_taken_over(self, named: Change) -> list[str]:
        """Return the differences of a call after the change from a first call."""
        self.build()  # a schedule of the change before may have converted the last one
        before = copy.copy(vars(self.config)), dict(self.arguments), self.model, dict(os.environ)
        (name, error), *_ = self.outcome()
        assert name != "error", f"what was before {named[0]} has ended the program: {error}"
        named[1](self)
        again = self.outcome()
        kept_calls._CALLS.emptied()
        self.make_groups()
        first = self.outcome()
        self.make_groups()
        values, self.arguments, self.model, environment = before
        vars(self.config).clear()
        vars(self.config).update(values)
        os.environ.clear()
        os.environ.update(environment)
        if len(again) != len(first):
            return [f"{again[0][1]} instead of {first[0][1]}"]
        pairs = zip(again, first, strict=True)
        return [f"{name}: {one} instead of {other}" for (name, one), (_, other) in pairs if one != other]


def set_field(name: str, value: Any) -> Change:
    def change(program: Program) -> None:
        setattr(program.config, name, value)

    return f"config.{name} = {value!r}", change


def set_argument(name: str, value: Any) -> Change:
    def change(program: Program) -> None:
        program.arguments[name] = value

    return f"{name} = {value!r}", change


def set_variable(name: str, value: str) -> Change:
    def change(program: Program) -> None:
        os.environ[name] = value

    return f"environment {name}={value}", change


def hook(*args: Any, **more: Any) -> Any:
    return args[0] if args else None


def other_values(name: str, value: Any, kind: Any) -> list[Any]:
    """Return values of a field that differ from ``value``; some of them are impossible."""
    if name in SPECIAL:
        return SPECIAL[name]
    if isinstance(value, bool):
        return [not value, int(value), None]
    if isinstance(value, (int, float)):
        return [value + 1, float(value), None]
    if isinstance(value, str):
        return [f"{value}x", None]
    if callable(value) or "Callable" in str(kind):
        return [hook, [hook, hook], 3]
    return [1, True, 2.5, "x"]


# What other values would leave out, or what would end more than the call: fields of a run that goes on after them.
SPECIAL: dict[str, list[Any]] = {
    "pipeline_schedule": ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "none"],
    "p2p_channels": ["shared", "one_way"],
    "pipeline_dtype": [None, "float32"],
    "no_sync_func": [torch.enable_grad, [torch.enable_grad], 3],
    "variable_seq_lengths": [True],
    "trace_dir": ["traces"],
    "trace_steps": ["1"],
    "measure": [1, -1],
    "defer_embedding_wgrad_compute": [0, None],  # else Megatron's function fails on the last rank alone
    "moe_paged_stash": [0, None],  # Megatron keeps a state of it from call to call
    "enable_autocast": [1],  # messages then have a different dtype
    "timers": [3],
    "step_number": [7, lambda: 8, -1],
    "grad_scale_func": [lambda loss: 2 * loss, 3],
    "p2p_timeout": [30.0, -1],
    "compute_timeout": [60.0, 0],
}


def changes_of(program: Program) -> list[Change]:
    kinds = {one.name: one.type for one in dataclasses.fields(program.config)}
    fields = []
    for name in dict.fromkeys([*StepFields._fields, *kinds]):
        values = other_values(name, getattr(program.config, name, None), kinds.get(name))
        if name not in StepFields._fields:  # only functions of Megatron read them
            values = values[:1] if program.chunks == 1 else []
        fields += [set_field(name, value) for value in values]
    arguments = [
        set_argument("num_microbatches", 6),
        set_argument("num_microbatches", True),
        set_argument("seq_length", 2 * LENGTH),
        set_argument("seq_length", float(LENGTH)),
        set_argument("seq_length", None),
        set_argument("seq_length", "x"),
        set_argument("micro_batch_size", True),
        set_argument("micro_batch_size", None),
        set_argument("decoder_seq_length", LENGTH),
        set_argument("decoder_seq_length", 2 * LENGTH),
        set_argument("decoder_seq_length", "x"),
        set_argument("forward_only", True),
        set_argument("collect_non_loss_data", True),
        set_argument("first_val_step", True),
        set_argument("adjust_tensor_shapes_fn", lambda receive, send: (receive, send)),
        set_argument("forward_step_func", lambda data, model: (model(2 * next(data)), lambda out: (out.sum(), {}))),
        ("another model", Program.build),
        ("the model in a wrapper", wrap),
        ("chunks for other places", misplace),
    ]
    variables = [set_variable(f"MEGATRON_PP_{name.upper()}", "1") for name in IN_ENVIRONMENT]
    return [*fields, *arguments, *variables]


def wrap(program: Program) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *given: Any) -> Any:
            return self.module(*given)

    program.model = [Wrapper(chunk) for chunk in program.model]  # type: ignore[misc]


def misplace(program: Program) -> None:
    program.build()
    for chunk in program.model:
        chunk.pre_process = chunk.post_process = True


def files_of_a_call(program: Program) -> dict[str, str]:
    """Map each file of the package to the place where a call first enters it. Replacements of a GPU are left out."""
    root = str(Path(megatron_pp.__file__).parent) + os.sep
    found: dict[str, str] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root) and not name.startswith(root + "tools"):
            file = name.removeprefix(root)
            caller = frame.f_back
            if file not in found:
                where = caller.f_code.co_filename.removeprefix(root) if caller is not None else "nowhere"
                line = 0 if caller is None else caller.f_lineno
                found[file] = f"{frame.f_code.co_name}, called in {where}, line {line}"

    program.outcome()
    program.outcome()
    sys.setprofile(note)
    try:
        program.call()
    finally:
        sys.setprofile(None)
    return found


def is_drawn(change: Change, chunks: int, seed: str) -> bool:
    """Whether a run tries this change with so many chunks.

    With two chunks it draws half of them, field by field and argument by argument, and with one chunk a third: what is
    compared is the same. Fields that only functions of Megatron's read change with one chunk alone, and of these a run
    draws half.
    """
    if EXHAUSTIVE:
        return True
    what = change[0].partition(" = ")[0]  # the rest may have the address of a function, which ranks do not share
    if chunks == 2:
        return hashlib.sha256(f"{seed} {what} of two".encode()).digest()[0] % 2 == 0
    of_a_step = not what.startswith("config.") or what.removeprefix("config.") in StepFields._fields
    return hashlib.sha256(f"{seed} {what}".encode()).digest()[0] % (3 if of_a_step else 2) == 0


def checked(rank: int, size: int, installed: bool, seed: str) -> dict[str, Any]:
    """Return, for one and for two chunks, the files of a call and the changes after which a call differs from a first
    one; also the number of calls, and how many of them took over an earlier call's results."""
    library, state = the_library(installed)
    os.chdir(os.environ["FOLDER"])
    taken = noted_calls()
    more = {"finalize_model_grads_func": hook} if installed else {}  # Megatron's loop always has it
    found: dict[str, Any] = {}
    for chunks in (1, 2):
        program = Program(library, state, chunks, size, more)
        found[f"files, {chunks} chunks"] = files_of_a_call(program)
        program.end()
    for chunks in (1, 2):
        program = Program(library, state, chunks, size, more)
        for change in [one for one in changes_of(program) if is_drawn(one, chunks, seed)]:
            wrong = program.wrongly_taken_over(change)
            if wrong:
                found[f"{change[0]}, {chunks} chunks"] = wrong
        program.end()
    return {**found, "taken over": sum(one is not None for one in taken), "calls": len(taken)}


BLIND = ["pipeline_schedule", "hidden_size", "overlap_p2p_comm", "grad_sync_func", "microbatch_group_size_per_vp_stage"]


def checked_blindly(rank: int, size: int) -> dict[str, list[str]]:
    """Return for each field of BLIND the changes that are found if the comparison leaves out that field alone."""
    library, state = the_library(False)
    compared, found = kept_calls._compared, {}
    for name in BLIND:
        kept_calls._compared = settings_without(name)
        program = Program(library, state, 2, size, {})
        changes = [change for change in changes_of(program) if change[0].startswith(f"config.{name} ")]
        found[name] = [change[0] for change in changes if program.wrongly_taken_over(change)]
        kept_calls._compared = compared
        program.end()
    return found


def the_library(installed: bool) -> tuple[Any, Any]:
    if not installed:
        from megatron_pp import parallel_state

        return megatron_pp, parallel_state
    gc.disable()  # a fifth of the time to import Megatron-core
    from megatron_pp.tools.parity import cpu_stand_in

    cpu_stand_in.redirect()
    with cpu_stand_in.triton_stand_in():
        from megatron.core import parallel_state, pipeline_parallel
        from megatron.core.transformer import TransformerConfig
    from megatron_pp.integrations import megatron_core

    megatron_core.install(strict=True)
    library = types.SimpleNamespace(
        TransformerConfig=TransformerConfig, get_forward_backward_func=pipeline_parallel.get_forward_backward_func
    )
    return library, parallel_state


def noted_calls() -> list[Any]:
    """Return a list to which each later call adds what it takes over."""
    taken: list[Any] = []
    theirs = kept_calls.taken_over

    def noted(*given: Any) -> Any:
        taken.append(theirs(*given))
        return taken[-1]

    kept_calls.taken_over = noted
    return taken


SEED = autograd_draw.said()  # of the test: its ranks have another value
METHODS = ("forkserver", "spawn")  # the last rank starts with nothing loaded, as under a launcher


@functools.cache
def results(installed: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {"FOLDER": folder}
        ranks = run_processes(
            checked, 2, args=(installed, SEED), timeout=400, environment=environment, start_method=METHODS
        )
    return ranks[-1]


KINDS = [False, pytest.param(True, marks=needs_megatron)]
IDS = ["own loop", "install"]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("installed", KINDS, ids=IDS)
def test_a_call_runs_code_of_few_files(installed: bool, chunks: int) -> None:
    files = results(installed)[f"files, {chunks} chunks"]
    said = "".join(f"\n{file}: {entered}" for file, entered in files.items())
    assert len(files) <= FILES, f"a call passes {len(files)} files, and at most {FILES} are wanted:{said}"


@pytest.mark.parametrize("installed", KINDS, ids=IDS)
def test_a_change_between_two_calls_is_seen(installed: bool) -> None:
    found = dict(results(installed))
    taken, calls = found.pop("taken over"), found.pop("calls")
    wrong = {name: value for name, value in found.items() if not name.startswith("files")}
    assert not wrong, "\n".join(f"{name}: {value}" for name, value in wrong.items())
    assert 30 < taken < calls  # else no call was compared


def test_a_field_that_is_not_compared_is_found() -> None:
    found = run_processes(checked_blindly, 2, timeout=120)[-1]
    assert all(found[name] for name in BLIND), found
