"""What calls take over from earlier ones: for how long it is kept, and that steps which differ are made anew.

``tests/functional_tests/test_kept_calls.py`` changes everything that a call reads, on real processes.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_pp import schedules
from megatron_pp.common.log_once import logger
from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime import kept_calls
from megatron_pp.runtime.communicators import KEPT, close_communicators
from megatron_pp.runtime.kept_calls import Read
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.runtime.step import Step
from megatron_pp.schedules import forward_backward_no_pipelining
from megatron_pp.testing.toy import ToyBlock, ToyData, toy_config, toy_forward_step

DATA = ToyData(4)


@pytest.fixture(autouse=True)
def no_layers_of_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have made some, with which no call takes over anything."""
    monkeypatch.setattr(kept_calls, "MODULES_OF_MODELS", ())


class Program:
    """A rank alone with one model. ``steps``: those of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        self.config = toy_config(**fields)
        self.model = PipelineStage(ToyBlock(0), self.config)
        self.steps: list[Step] = []
        theirs = schedules.prepared

        def noted(host: Any) -> Step:
            self.steps.append(theirs(host))
            return self.steps[-1]

        monkeypatch.setattr(schedules, "prepared", noted)

    def call(self, **arguments: Any) -> bool:
        """Whether the call takes over what an earlier one has found."""
        given = {"num_microbatches": 4, "seq_length": 8, "micro_batch_size": 1, **arguments}
        forward_backward_no_pipelining(
            forward_step_func=toy_forward_step, data_iterator=DATA.iterator(), model=self.model, **given
        )
        return self.steps[-1].is_known


def test_calls_of_training_and_evaluation_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch)
    assert [program.call(forward_only=only) for only in (False, True) * 3] == [False, False, True, True, True, True]
    one, _, other, *_ = program.steps
    assert one.of_rank is other.of_rank
    assert one.inputs is not other.inputs
    assert one.settings is not other.settings


def test_few_calls_of_a_model_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch)
    counts = [1, 2, 3, 4, 1, 2]
    assert not any(program.call(num_microbatches=count) for count in counts[:4])
    assert all(program.call(num_microbatches=count) for count in counts)
    assert not program.call(num_microbatches=4, forward_only=True)
    assert not program.call(num_microbatches=1)


def test_a_setting_that_is_part_of_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The setting counts even if it adds nothing to the first calls."""
    program = Program(monkeypatch, trace_dir=str(tmp_path), trace_steps="3")
    assert not any(program.call() for _ in range(2))
    assert not list(tmp_path.rglob("*.json*"))
    assert not program.call()
    assert list(tmp_path.rglob("*.json*"))


def test_costs_from_the_second_call_on_may_be_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy compares its elements, also with None."""
    program = Program(monkeypatch)
    assert [program.call() for _ in range(2)] == [False, True]
    program.config.microbatch_costs = np.ones(4)
    assert not program.call()
    assert program.steps[-1].microbatch_costs == (1.0,) * 4


def test_each_call_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick start's loop gives such numbers."""
    program = Program(monkeypatch)
    taken = []
    for number in range(3):
        program.config.step_number = number
        taken.append(program.call())
    assert taken == [False, True, True]
    assert [step.number for step in program.steps] == [0, 1, 2]
    program.config.step_number = -1
    with pytest.raises(ScheduleInputError, match="step_number"):
        program.call()


def test_a_change_made_within_a_step_takes_effect_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the level from which plans are logged."""
    program, before = Program(monkeypatch), logger.level
    program.config.finalize_model_grads_func = lambda *_: logger.setLevel(logging.INFO)
    logger.setLevel(logging.WARNING)
    try:
        assert [program.call() for _ in range(3)] == [False, False, True]
    finally:
        logger.setLevel(before)


@pytest.fixture
def groups() -> Iterator[list[dist.ProcessGroup]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield [dist.new_group([0]) for _ in range(2)]
    close_communicators()
    dist.destroy_process_group()


def test_the_communicator_of_a_destroyed_group_is_closed(
    monkeypatch: pytest.MonkeyPatch, groups: list[dist.ProcessGroup]
) -> None:
    """By the next call in any pipeline: nothing else may ever be called in that of the group."""
    programs = [(Program(monkeypatch), {"pg_collection": SimpleNamespace(pp=group)}) for group in groups]
    (one, of_one), (other, of_other) = programs
    one.steps = other.steps
    assert [one.call(**of_one), other.call(**of_other), other.call(**of_other)] == [False, False, True]
    dist.destroy_process_group(groups[0])
    other.call(**of_other)
    assert [group for group, _ in KEPT.items() if group in groups] == [groups[1]]
    assert other.call(**of_other)


def test_nothing_of_the_program_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch)

    class Hook:
        """A hook whose class holds the model, too."""

        model = program.model

        def __call__(self, *given: Any, **more: Any) -> None: ...

    program.config.finalize_model_grads_func = Hook()
    assert [program.call() for _ in range(2)] == [False, True]
    things = program.model, program.config.finalize_model_grads_func, program.steps[0].inputs
    gone = [weakref.ref(one) for one in things]
    monkeypatch.undo()
    del program, things, Hook
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    other = PipelineStage(ToyBlock(0), toy_config())
    kept_calls._CALLS[other] = []
    assert [one for one, _ in kept_calls._CALLS.items() if one is not other] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((1, True), (1, 1.0), (0, False), (None, 0), ("a", "b"), ([1], [1.0]), ([1], (1,)), ([1], [1, 2])),
        *((print, None), (None, np.ones(2)), (1, np.ones(2)), (torch.ones(2), np.ones(2))),
    ],
)
def test_different_values_of_calls_compare_as_different(one: Any, other: Any) -> None:
    assert Read([one]) == [one]
    assert Read([one]) != [other]
    assert Read([other]) != [one]
    assert Read([one]) != [one, one]


def test_objects_are_equal_to_themselves_alone_and_while_they_live() -> None:
    one, other = torch.nn.Identity(), torch.nn.Identity()
    read = Read([one, [one, other]])
    assert read == [one, [one, other]]
    assert read != [one, [one, one]]
    assert read != [other, [one, other]]
    del one
    assert read != [None, [None, other]]


def test_an_object_without_weak_references_cannot_be_compared() -> None:
    with pytest.raises(TypeError):
        Read([{}])
