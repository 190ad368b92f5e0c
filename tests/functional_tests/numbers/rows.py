"""A row of a table: a run of real processes on gloo, with a feature under a schedule, and the expected numbers.

To add a test of numbers, add a row to the table of the host that runs the step, rather than a file:

    library.py          the library's own training loop
    torch_stages.py     torch's pipeline stages
    odd_models.py       odd models in torch's stages
    several_modules.py  pipelines of several modules

    ROWS["my feature, zb_v"] = Row(run, expected, size=2)

``run(place)`` takes the steps on one rank and returns the rank's numbers by name: losses, gradients, buffers.
``expected(place)`` returns all numbers of a single-process run of the same model; in a comparison with another runtime,
the numbers of that runtime on this rank. Both run on the rank, so references that several rows share belong in a
``functools.cache``. Further checks of a row are assertions within ``run``. The test names each row that differs. An
error within a row names it, and ends the other rows of the same processes. To run one row alone, choose its test with
``-k``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_pp.errors import MegatronPPError
from testkit.processes import run_processes

Numbers = Mapping[str, Tensor | float | None]
MOST_WORDS = 5  # how many of a rank's differences an error shows


class Place(NamedTuple):
    """The position of this process in the pipelines of a row."""

    size: int
    """Ranks of a pipeline."""
    rank: int
    """The rank of this process in its pipeline."""
    group: Any
    """The process group of its pipeline."""
    replica: int
    across: Any
    """The group of this rank in all replicas."""


class Row(NamedTuple):
    """A run of ``replicas`` pipelines of ``size`` ranks. ``near``: how far a number may be from the expected one, in
    units of the largest number that the row expects."""

    run: Callable[[Place], Numbers]
    expected: Callable[[Place], Numbers]
    size: int
    replicas: int = 1
    near: float = 0.0

    @property
    def ranks(self) -> int:
        return self.size * self.replicas


class Compared(NamedTuple):
    """The result of one rank in a row."""

    differences: list[str]
    found: set[str]
    """Names of the numbers that this rank has."""
    expected: set[str]


class RowFailedError(MegatronPPError, RuntimeError):
    """A rank raised in a row; the message names the row."""


def asked(request: pytest.FixtureRequest, names: Iterable[str]) -> list[str]:
    """Return the ``names`` whose tests pytest has chosen in this module, so that one row can be run by itself."""
    tests = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params.get("name") for item in tests if hasattr(item, "callspec")}
    return [name for name in names if name in wanted]


def run_rows(table: str, names: Iterable[str], world: int, **more: Any) -> dict[str, list[Compared]]:
    """Run the rows on ``world`` processes, as many at a time as fit, and return by row the results of the ranks that
    took part. ``table``: ``module:attribute`` of a dict of rows by name. ``more``: arguments of ``run_processes``."""
    names = list(names)
    given = {"timeout": 240.0, "start_method": "mixed", **more}
    ranks = run_processes(rank_main, world, (table, names), **given)
    return {name: [of_rank[name] for of_rank in ranks if name in of_rank] for name in names}


def assert_equal(row: Row, ranks: list[Compared]) -> None:
    """Assert that the ranks found all expected numbers, and that no number differs."""
    assert len(ranks) == row.ranks
    texts = [f"rank {rank}: {text}" for rank, of_rank in enumerate(ranks) for text in of_rank.differences]
    found, expected = set[str](), set[str]()
    for of_rank in ranks:
        found |= of_rank.found
        expected |= of_rank.expected
    texts += [f"no rank has {name}" for name in sorted(expected - found)]
    assert not texts, "\n".join(texts)
    assert found, "nothing was compared"


def rank_main(rank: int, world: int, table: str, names: list[str]) -> dict[str, Compared]:
    """Run the rows of ``names`` in which this process takes part, and return its results."""
    torch.set_num_threads(1)
    module, _, attribute = table.partition(":")
    rows: dict[str, Row] = getattr(importlib.import_module(module), attribute)
    layouts = _layouts(rank, world, [rows[name] for name in names])
    turns = dict.fromkeys(layouts, 0)
    results = {}
    for name in names:
        row = rows[name]
        lane, place = layouts[row.size, row.replicas]
        if turns[row.size, row.replicas] % (world // row.ranks) == lane:
            results[name] = _compared(name, row, place)
        turns[row.size, row.replicas] += 1
    return results


def _layouts(rank: int, world: int, rows: list[Row]) -> dict[tuple[int, int], tuple[int, Place]]:
    """Return by (size, replicas) the lane of this process, and its place. Lanes take rows in turn."""
    groups: dict[tuple[int, ...], Any] = {}

    def group_of(ranks: range) -> Any:
        if tuple(ranks) not in groups:
            groups[tuple(ranks)] = dist.new_group(list(ranks))
        return groups[tuple(ranks)]

    layouts = {}
    for size, replicas in sorted({(row.size, row.replicas) for row in rows}):
        taken = size * replicas
        for lane in range(world // taken):
            first = lane * taken
            pipelines = [group_of(range(first + size * k, first + size * (k + 1))) for k in range(replicas)]
            across = [group_of(range(first + k, first + taken, size)) for k in range(size)]
            if first <= rank < first + taken:
                replica, place = divmod(rank - first, size)
                layouts[size, replicas] = lane, Place(size, place, pipelines[replica], replica, across[place])
        layouts.setdefault((size, replicas), (-1, Place(size, -1, None, -1, None)))
    return layouts


def _compared(name: str, row: Row, place: Place) -> Compared:
    try:
        found, expected = row.run(place), row.expected(place)
    except Exception as error:
        raise RowFailedError(f"in the row {name!r}: {type(error).__name__}: {error}") from error
    return Compared(differences(found, expected, row.near)[:MOST_WORDS], set(found), set(expected))


def differences(found: Numbers, expected: Numbers, near: float = 0.0) -> list[str]:
    """Return the differences of the numbers found from the expected ones, as text."""
    texts = [f"{name} was not expected" for name in found.keys() - expected.keys()]
    largest = max((_size(number) for number in expected.values()), default=0.0) if near else 0.0
    for name in sorted(found.keys() & expected.keys()):
        one, other = found[name], expected[name]
        if one is None or other is None:
            if one is not other:
                texts.append(f"{name} is {one}, and {other} was expected")
            continue
        one, other = _tensor(one), _tensor(other)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            texts.append(f"{name} is {one.dtype} of {list(one.shape)}, not {other.dtype} of {list(other.shape)}")
        elif not (torch.equal(one, other) if not near else _size(one.double() - other.double()) <= near * largest):
            texts.append(f"{name} differs by {_size(one.double() - other.double())}")
    return texts


def _size(number: Tensor | float | None) -> float:
    tensor = _tensor(0.0 if number is None else number)
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _tensor(number: Tensor | float) -> Tensor:
    return number.detach() if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor as a dense one; gathered from all ranks if FSDP2 has sharded it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor.to_dense() if tensor.is_sparse else tensor
