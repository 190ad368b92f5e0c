"""Parallel groups: ranks as points of a grid tensor x context x data x pipeline. Never imports torch."""

import math
from typing import NamedTuple

from megatron_pp.config.checks import whole_number
from megatron_pp.config.nearest import nearest_multiples
from megatron_pp.errors import WorldSizeError

# From the fastest-running dimension to the slowest, Megatron's default order: ranks of one tensor parallel group are
# neighbours (they exchange most), those of one pipeline are furthest apart (they exchange least).
DIMENSIONS = ("tp", "cp", "dp", "pp")


class Grid(NamedTuple):
    """tensor_parallel * context_parallel * data_parallel * pipeline_parallel ranks, in the order of DIMENSIONS."""

    tensor_parallel: int
    context_parallel: int
    data_parallel: int
    pipeline_parallel: int

    @property
    def world_size(self) -> int:
        return math.prod(self)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is in each dimension."""
        place = {}
        for name, size in zip(DIMENSIONS, self, strict=True):
            rank, place[name] = divmod(rank, size)
        return place

    def groups(self, *along: str) -> list[list[int]]:
        """All groups of ranks that differ only in the named dimensions; each ascending, every rank in exactly one."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            elsewhere = tuple(at for name, at in self.coordinates(rank).items() if name not in along)
            members.setdefault(elsewhere, []).append(rank)
        return list(members.values())


def fit_grid(
    world_size: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    data_parallel: int | None = None,
) -> Grid:
    """The grid of ``world_size`` ranks. Without ``data_parallel``, the data-parallel size is the quotient. Raises
    WorldSizeError, with the nearest world sizes that fit, if the sizes do not divide the world size, and ConfigError
    for sizes below 1."""
    whole_number("tensor_model_parallel_size", tensor_parallel)
    whole_number("pipeline_model_parallel_size", pipeline_parallel)
    whole_number("context_parallel_size", context_parallel)
    replica = tensor_parallel * context_parallel * pipeline_parallel
    product = (
        f"tensor_model_parallel_size {tensor_parallel} x context_parallel_size {context_parallel} x "
        f"pipeline_model_parallel_size {pipeline_parallel}"
    )
    if data_parallel is None and world_size % replica:
        fitting = nearest_multiples(world_size, replica)
        raise WorldSizeError(
            f"the world size is {world_size}, which {product} = {replica} does not divide; nearest: {fitting} processes"
        )
    if data_parallel is None:
        data_parallel = world_size // replica
    wanted = replica * whole_number("data_parallel_size", data_parallel)
    if world_size != wanted:
        raise WorldSizeError(
            f"the world size is {world_size}, but {product} x data_parallel_size {data_parallel} is {wanted}"
        )
    return Grid(tensor_parallel, context_parallel, data_parallel, pipeline_parallel)
