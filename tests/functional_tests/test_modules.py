"""Pipelines of several modules on gloo: losses and gradients equal to the last bit to one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from testkit.module_grids import module_on
from testkit.module_models import Reference, Setup, in_one_process, places_of, sink_of
from testkit.processes import run_processes
from tests.functional_tests.module_checks import a_rank_gives_no_dict, refused_arguments, steps_of_a_rank

SETUPS = {
    "an encoder": Setup((module_on("vision"), module_on("llm", 1)), {"vision": ["llm"]}),
    "two encoders on one rank": Setup(
        (module_on("vision"), module_on("audio"), module_on("llm", 1)), {"vision": ["llm"], "audio": ["llm"]}
    ),
    "pipelines of unequal length": Setup(
        (module_on("vision", pp=2), module_on("audio", 2), module_on("llm", 3, pp=2)),
        {"vision": ["llm"], "audio": ["llm"]},
        microbatches=5,
    ),
    "fan-in": Setup((module_on("vision", dp=2), module_on("llm", 2, pp=2)), {"vision": ["llm"]}),
    "fan-out": Setup((module_on("vision"), module_on("llm", 1, pp=1, dp=3)), {"vision": ["llm"]}),
    "replicas apart, tensor-parallel": Setup(
        (module_on("vision", dp=2, tp=2), module_on("llm", 4, dp=1, tp=2)), {"vision": ["llm"]}, microbatches=2
    ),
    "one output for two modules": Setup(
        (module_on("vision"), module_on("llm", 1), module_on("images", 2, dp=2)),
        {"vision": ["llm", "images"], "llm": ["images"]},
    ),
    "an encoder in the bubbles": Setup(
        (module_on("vision", dp=2), module_on("llm", pp=2)._replace(chunk=1)), {"vision": ["llm"]}
    ),
    "encoders of two chunks, on few ranks": Setup(
        (
            module_on("vision", 1, pp=2),
            module_on("audio", 2)._replace(chunk=1),
            module_on("llm", pp=3)._replace(chunk=2),
        ),
        {"vision": ["llm"], "audio": ["llm"]},
        microbatches=5,
    ),
    # A gradient goes from rank to rank as an activation does.
    "an encoder's replicas on a tensor-parallel stage": Setup(
        (module_on("vision", dp=4)._replace(times=(4.0, 8.0)), module_on("llm", tp=4)._replace(chunk=1)),
        {"vision": ["llm"]},
        microbatches=3,
    ),
    "an encoder's replicas on the first of two tensor-parallel stages": Setup(
        (module_on("vision", dp=2), module_on("llm", pp=2, tp=2)._replace(chunk=1)), {"vision": ["llm"]}, microbatches=1
    ),
    "fan-in of unequal batches": Setup(
        (module_on("vision", dp=4), module_on("llm", 4, dp=2, pp=1)), {"vision": ["llm"]}, uneven=True
    ),
    "unequal batches of encoders in the bubbles": Setup(
        (module_on("vision", dp=2), module_on("llm", pp=2)._replace(chunk=1)), {"vision": ["llm"]}, uneven=True
    ),
    "fan-out of a batch that cannot be cut equally": Setup(
        (module_on("vision"), module_on("llm", 1, dp=5)), {"vision": ["llm"]}
    ),
    "one output for two modules of a rank": Setup(
        (module_on("vision"), module_on("left", 1), module_on("right", 1), module_on("llm", 2)),
        {"vision": ["left", "right"], "left": ["llm"], "right": ["llm"]},
    ),
    "one output for two modules of a rank, from several replicas": Setup(
        (module_on("vision", dp=2), module_on("left", 2), module_on("right", 2), module_on("llm", 3)),
        {"vision": ["left", "right"], "left": ["llm"], "right": ["llm"]},
        uneven=True,
    ),
    "equal replicas": Setup((module_on("vision", dp=2), module_on("llm", 2, dp=2)), {"vision": ["llm"]}),
}


def run(setup: Setup) -> list[list[Any]]:
    size = 1 + max(rank for module in setup.modules for replica in module.ranks for ranks in replica for rank in ranks)
    return run_processes(steps_of_a_rank, size, (setup,), start_method="forkserver")


def assert_equal(setup: Setup, found: list[list[Any]], wanted: list[Reference]) -> None:
    sink = next(module for module in setup.modules if module.name == sink_of(setup))
    compared = 0
    for rank, steps in enumerate(found):
        for (losses, gradients), reference in zip(steps, wanted, strict=True):
            last = [replica for replica, stages in enumerate(sink.ranks) if rank in stages[-1]]
            assert losses == (reference.losses[last[0]] if last else [])
            assert sorted(gradients) == sorted(places_of(setup, rank))
            for place, own in gradients.items():
                for one, other in zip(own, reference.gradients[place], strict=True):
                    assert (one is None) == (other is None) == setup.forward_only, place
                    if one is not None:
                        assert torch.equal(one, other), place
                        assert one.abs().max() > 0
                    compared += 1
    assert compared > 0


@pytest.mark.parametrize("name", SETUPS)
def test_losses_and_gradients_are_those_of_one_process(name: str) -> None:
    setup = SETUPS[name]
    assert_equal(setup, run(setup), in_one_process(setup))


def test_evaluation_has_the_losses_of_one_process() -> None:
    setup = dataclasses.replace(SETUPS["fan-in"], forward_only=True)
    assert_equal(setup, run(setup), in_one_process(setup))


def test_outputs_may_be_kept() -> None:
    setup = dataclasses.replace(SETUPS["fan-in"], config={"deallocate_pipeline_outputs": False})
    assert_equal(setup, run(setup), in_one_process(setup))


def test_a_forgotten_output_is_an_error_on_all_ranks() -> None:
    setup = SETUPS["pipelines of unequal length"]
    errors = run_processes(a_rank_gives_no_dict, 5, (setup,), start_method="forkserver")
    assert errors[0].startswith("ScheduleInputError: forward_step_func gave a dict of other; on this rank it must give")
    assert all(error.startswith("PipelinePeerError") and "a dict of other" in error for error in errors[1:]), errors


def test_impossible_settings_are_refused_before_any_communication() -> None:
    (found, other) = run_processes(refused_arguments, 2, (SETUPS["an encoder"],), start_method="forkserver")
    assert found == other
    wanted = ("variable_seq_lengths=True", "no pipeline_schedule 'zb_h1'", "no p2p_channels 'shared'", "pipeline_dtype")
    assert all(words in line for words, line in zip(wanted, found, strict=True)), found
