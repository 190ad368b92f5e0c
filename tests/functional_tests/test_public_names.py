"""The names that Megatron's ``schedules`` and ``p2p_communication`` export exist here, and take the same arguments.

The tests read the signatures of the installed Megatron-core in another process. So code for Megatron can use this
package after a change of its imports.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

import megatron_pp.p2p_communication
import megatron_pp.schedules
from megatron_pp.schedules import StepArguments
from tests.functional_tests.megatron_support import in_megatrons_process, needs_megatron

ENTRY_POINTS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
FUNCTIONS = (
    "get_forward_backward_func",
    "deallocate_output_tensor",
    "custom_backward",
    "forward_step",
    "backward_step",
    "get_schedule_table",
    "get_pp_rank_microbatches",
    "get_tensor_shapes",
)
Parameters = list[list[Any]]  # name, kind, and whether it may be left out, of each parameter


def parameters_of(function: Any) -> Parameters:
    return [
        [p.name, p.kind.name, p.default is not inspect.Parameter.empty]
        for p in inspect.signature(function).parameters.values()
    ]


def is_property(member: Any) -> bool:
    return isinstance(member, property)


def megatrons_names(case: Any) -> dict[str, Any]:
    """Return Megatron's signatures, and some of its results."""
    from megatron.core.pipeline_parallel import p2p_communication as p2p
    from megatron.core.pipeline_parallel import schedules

    found: dict[str, Any] = {name: parameters_of(getattr(schedules, name)) for name in (*FUNCTIONS, *ENTRY_POINTS)}
    methods = dict(inspect.getmembers(p2p.P2PCommunicator, inspect.isfunction))
    found["methods"] = {name: parameters_of(f) for name, f in methods.items() if name == "__init__" or name[0] != "_"}
    found["properties"] = [name for name, _ in inspect.getmembers(p2p.P2PCommunicator, is_property)]
    found["is_single_shape"] = parameters_of(p2p.is_single_shape)
    found["tables"] = [schedules.get_schedule_table(*arguments) for arguments in TABLES]
    found["numbers"] = [schedules.get_pp_rank_microbatches(*n, p2p_communicator=communicator(*c)) for c, n in numbers()]
    return found


TABLES = [(m, v, g) for m in (1, 2, 5, 8, 11) for v in (1, 2, 3) for g in (1, 2, 3, 4, 8)]


def communicator(rank: int, size: int, virtual: int | None) -> Any:
    from types import SimpleNamespace

    from megatron_pp.testing.threads import ThreadGroup

    return SimpleNamespace(pp_group=ThreadGroup(rank, size), virtual_pipeline_model_parallel_size=virtual)


def numbers() -> list[tuple[tuple[int, int, int | None], tuple[Any, ...]]]:
    """Return (rank, size, V) with (M, chunks, group size, forward_only, overlap_moe_expert_parallel_comm)."""
    return [
        ((rank, size, virtual), (m, virtual or 1, group, forward_only, moe))
        for size in (1, 2, 4)
        for rank in range(size)
        for virtual in (None, 1, 2, 3)
        for m in (1, 4, 9)
        for group in (size, size + 2)
        for forward_only in (False, True)
        for moe in (False, True)
    ]


@pytest.fixture(scope="module")
def megatron() -> dict[str, Any]:
    return in_megatrons_process(megatrons_names)


def check_accepts(ours: Any, theirs: Parameters) -> None:
    """Raise TypeError or AssertionError if a call that suits ``theirs`` does not suit ``ours``."""
    names = {name: name for name, *_ in theirs}
    positional = [name for name, kind, _ in theirs if kind == "POSITIONAL_OR_KEYWORD"]
    by_keyword = {name: name for name in names if name not in positional}
    required = {name: name for name, _, optional in theirs if not optional}
    for arguments, keywords in (([], names), ([], required), (positional, by_keyword)):
        bound = inspect.signature(ours).bind(*arguments, **keywords).arguments
        assert all(name == given for name, given in bound.items()), bound


def as_in_early_releases(name: str, theirs: Parameters) -> Parameters:
    """Return the parameters of Megatron-core's function up to 0.16, from those of any release.

    Since then the groups of ``get_tensor_shapes`` may be left out, but are used unless shapes vary. The choice of a
    schedule takes the groups of several modules, for which this package has a function of its own. ``backward_step``
    has lost ``model_type``; ours is called in both ways (``test_compute.py``).
    """
    if name == "get_tensor_shapes":
        return [[one, kind, optional and not one.endswith("_group")] for one, kind, optional in theirs]
    if name == "backward_step" and "model_type" not in [one for one, *_ in theirs]:
        return [*theirs[:-1], ["model_type", "POSITIONAL_OR_KEYWORD", False], theirs[-1]]
    return [parameter for parameter in theirs if parameter[0] != "schedule_pg_collection"]


@needs_megatron
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_parameters_of_megatrons_functions(megatron: dict[str, Any], name: str) -> None:
    check_accepts(getattr(megatron_pp.schedules, name), as_in_early_releases(name, megatron[name]))


@needs_megatron
def test_communicator_methods_have_the_parameters_of_megatrons_methods(megatron: dict[str, Any]) -> None:
    """Our communicator has all methods of Megatron's, among them the nine of Megatron-core 0.16."""
    assert len(megatron["methods"]) >= 10
    for name, parameters in megatron["methods"].items():
        check_accepts(getattr(megatron_pp.p2p_communication.P2PCommunicator, name), parameters)
    for name in megatron["properties"]:
        assert is_property(getattr(megatron_pp.p2p_communication.P2PCommunicator, name)), name
    assert parameters_of(megatron_pp.p2p_communication.is_single_shape)[0][1:] == megatron["is_single_shape"][0][1:]


@needs_megatron
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_schedules_accept_exactly_megatrons_keywords(megatron: dict[str, Any], name: str) -> None:
    """Both take keywords alone; the type of ``**arguments`` lists ours."""
    assert {kind for _, kind, _ in megatron[name]} == {"KEYWORD_ONLY"}
    assert [kind for _, kind, _ in parameters_of(getattr(megatron_pp.schedules, name))] == ["VAR_KEYWORD"]
    assert list(StepArguments.__annotations__) == [parameter for parameter, *_ in megatron[name]]


@needs_megatron
def test_schedule_tables_equal_megatrons(megatron: dict[str, Any]) -> None:
    ours = [megatron_pp.schedules.get_schedule_table(*arguments) for arguments in TABLES]
    assert json.loads(json.dumps(ours)) == megatron["tables"]


@needs_megatron
def test_warmup_microbatches_equal_megatrons(megatron: dict[str, Any]) -> None:
    for ((rank, size, virtual), arguments), theirs in zip(numbers(), megatron["numbers"], strict=True):
        given = communicator(rank, size, virtual)
        ours = megatron_pp.schedules.get_pp_rank_microbatches(*arguments, p2p_communicator=given)
        assert tuple(ours) == tuple(theirs), (rank, size, virtual, arguments)


def test_the_names_that_are_promised_are_exported() -> None:
    for name in (*ENTRY_POINTS, *FUNCTIONS):
        assert name in megatron_pp.schedules.__all__
        assert callable(getattr(megatron_pp.schedules, name))
    for module in (megatron_pp.schedules, megatron_pp.p2p_communication):
        assert "P2PCommunicator" in module.__all__
        assert all(hasattr(module, name) for name in module.__all__)


def test_the_signature_comparison_finds_mismatches() -> None:
    theirs = parameters_of(lambda a, b, c=0: None)
    check_accepts(lambda a, b=1, c=0, d=0, *, e=0: None, theirs)
    other_order, one_missing, not_optional = lambda b, a, c=0: None, lambda a, b: None, lambda a, b, c: None
    for function in (other_order, one_missing, not_optional, lambda a, b, c=0, *, d: None):
        with pytest.raises((TypeError, AssertionError)):
            check_accepts(function, theirs)
