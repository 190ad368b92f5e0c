"""The grid of ranks: groups along each dimension, and world sizes that do not fit."""

from __future__ import annotations

import re
from itertools import product

import pytest

from megatron_pp import parallel_state
from megatron_pp.config.parallel_grid import DIMENSIONS, Grid, fit_grid
from megatron_pp.errors import ConfigError, WorldSizeError


def test_tensor_parallel_ranks_are_neighbours_and_pipelines_span_the_world():
    grid = Grid(tensor_parallel=2, context_parallel=1, data_parallel=2, pipeline_parallel=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("tp", "pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("sizes", list(product((1, 2, 3), repeat=4)))
def test_parallel_groups_equal_megatrons(sizes):
    """Megatron-core's own rank generator as the oracle."""
    megatron = pytest.importorskip("megatron.core.parallel_state")
    tensor, context, data, pipeline = sizes
    generator = megatron.RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp")
    grid = Grid(*sizes)
    for along in (("tp",), ("cp",), ("dp",), ("pp",), ("cp", "dp"), ("tp", "pp"), ("tp", "cp")):
        names = "-".join(name for name in DIMENSIONS if name in along)
        assert sorted(grid.groups(*along)) == sorted(generator.get_ranks(names)), along


def test_data_parallel_size_is_the_rest_of_the_world_size():
    assert fit_grid(12, tensor_parallel=2, pipeline_parallel=3) == Grid(2, 1, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"world_size": 6, "pipeline_parallel": 4}, "world size is 6.*nearest: 4 or 8 processes"),
        ({"world_size": 2, "pipeline_parallel": 4, "tensor_parallel": 2}, "nearest: 8 processes"),
        ({"world_size": 8, "pipeline_parallel": 2, "data_parallel": 2}, "data_parallel_size 2 is 4"),
    ],
)
def test_worlds_that_do_not_fit_are_refused(arguments, sentence):
    with pytest.raises(WorldSizeError, match=sentence):
        fit_grid(**arguments)


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ConfigError, match=re.escape("is 0; the smallest legal value is 1")):
        fit_grid(4, **{name: 0})


def test_parallel_state_before_initialisation_names_the_function_to_call():
    assert not parallel_state.model_parallel_is_initialized()
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
    with pytest.raises(parallel_state.ParallelStateError, match="initialize_model_parallel"):
        parallel_state.get_pipeline_model_parallel_rank()
    with pytest.raises(parallel_state.ParallelStateError, match="init_process_group"):
        parallel_state.initialize_model_parallel()
    parallel_state.destroy_model_parallel()
