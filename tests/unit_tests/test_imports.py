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


def layers() -> list[set[str]]:
    """Of the contract on the whole package."""
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
