"""What belongs to models and groups goes without Python code that runs when they die, where Ctrl-C would be lost."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch

import megatron_pp
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import StepSettings
from megatron_pp.runtime.model_checks import unsynchronised
from megatron_pp.testing.toy import toy_config

PACKAGE = Path(megatron_pp.__file__).parent
CALLBACKS = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}


def test_a_value_is_removed_with_its_key_and_never_found_under_another() -> None:
    table: ObjectTable[str] = ObjectTable()
    one, two = torch.nn.Identity(), torch.nn.Identity()
    table[one] = "one"
    assert table.setdefault(one, "again") == "one"
    assert table.setdefault(two, "two") == "two"
    assert table.pop(two) == "two"
    assert table.get(two) is None
    number = id(one)
    del one
    assert table.items() == []
    table._entries[number] = (lambda: two, "another's")  # type: ignore[assignment]
    assert table.get(torch.nn.Identity()) is None


class AnotherThread(dict[int, Any]):
    """A dict whose entries another thread removes right after they are looked up."""

    def get(self, number: int, default: Any = None) -> Any:
        return super().pop(number, default)


def test_two_threads_may_drop_the_entry_of_the_same_key() -> None:
    table: ObjectTable[str] = ObjectTable()
    key = torch.nn.Identity()
    table[key] = "gone"
    table._entries = AnotherThread(table._entries)
    del key
    assert table.items() == []
    assert not table._entries


def test_the_death_of_a_model_that_was_trained_runs_no_code_of_tables() -> None:
    called: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_filename)

    model = torch.nn.Linear(1, 1)
    config = toy_config()
    settings = StepSettings.from_config(config)
    place: Any = type("Place", (), {"homes": [(0, 0)]})
    list(unsynchronised.unsynchronised(settings, [model], place, None, None))
    assert unsynchronised._SEEN.get(model)
    sys.setprofile(profile)
    try:
        del model
    finally:
        sys.setprofile(None)
    assert not called


def test_the_package_uses_no_weak_container_whose_cleanup_runs_python_code() -> None:
    """The virtual devices are left out, because they are for tests."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if "testing" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if getattr(node, "attr", getattr(node, "id", None)) in CALLBACKS
    ]
    assert not found
