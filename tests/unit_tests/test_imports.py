"""Imports go one way also where only a type checker follows them (``lint-imports`` leaves these out)."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import PROJECT_ROOT

grimp = pytest.importorskip("grimp")  # which import-linter brings
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Imports for type checkers that close a circle, and why each is there.
IN_CIRCLES = {
    # The core asks a feature's hooks, and these are asked about its plans, specs and rules.
    "megatron_pp.plan.ir.feature": {
        "megatron_pp.plan.hooks",
        "megatron_pp.plan.ir.instruction",
        "megatron_pp.plan.ir.ledger",
        "megatron_pp.plan.ir.rules",
    },
    "megatron_pp.plan.lower.lowering": {"megatron_pp.plan.hooks"},
    # A spec holds what was measured, whose costs are counted by a spec's instructions.
    "megatron_pp.plan.ir.spec": {"megatron_pp.plan.costs.measured"},
    "megatron_pp.plan.lower.turns": {"megatron_pp.plan.costs.measured"},
    # What an object does where a step fails is in a module that loads then.
    "megatron_pp.faults.failing": {"megatron_pp.faults.guard"},
    "megatron_pp.faults.store.failures": {"megatron_pp.faults.store.fault_store"},
}


def layers() -> list[set[str]]:
    """The layers of the contract on the whole package."""
    text = (PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = tomllib.loads(text)["tool"]["importlinter"]["contracts"][0]
    return [{name.strip() for name in layer.split("|")} for layer in contract["layers"]]


def test_no_room_names_a_type_of_a_room_above() -> None:
    graph = grimp.build_graph("megatron_pp", cache_dir=None, exclude_type_checking_imports=False)
    order = layers()
    assert len(order) > 8
    upwards = []
    for number, lower in enumerate(order):
        above = set().union(*order[:number]) | (lower if len(lower) > 1 else set())
        for room in lower:
            for module in {room, *graph.find_descendants(room)}:
                for imported in graph.find_modules_directly_imported_by(module):
                    there = {one for one in above - {room} if imported == one or imported.startswith(f"{one}.")}
                    if there:
                        upwards.append(f"{module} imports {imported}")
    assert sorted(upwards) == []


def test_types_close_no_circle_but_those_with_a_reason() -> None:
    drawn = grimp.build_graph("megatron_pp", cache_dir=None, exclude_type_checking_imports=True)
    graph = grimp.build_graph("megatron_pp", cache_dir=None, exclude_type_checking_imports=False)
    modules = graph.modules
    found: dict[str, set[str]] = {}
    for module in modules:
        of_types = graph.find_modules_directly_imported_by(module) - drawn.find_modules_directly_imported_by(module)
        closing = {one for one in of_types & modules if graph.chain_exists(importer=one, imported=module)}
        if closing:
            found[module] = closing
    assert found == IN_CIRCLES
