"""Which functions of a release differ from those of all releases that the plug-in was read against."""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType

import pytest

from megatron_pp.integrations.megatron.releases import differences as megatron_differences
from megatron_pp.integrations.megatron.releases import sources as megatron_sources
from megatron_pp.integrations.megatron.releases import versions as megatron_versions
from megatron_pp.integrations.megatron.releases.differences import expected_signatures
from megatron_pp.integrations.megatron.releases.sources import NEEDED, Functions, digest
from megatron_pp.integrations.megatron.releases.versions import COMMUNICATOR, ENTRIES, Row
from tests.unit_tests.integrations.test_megatron_versions import published_schedules

KNOWN = megatron_sources.KNOWN


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-in of 0.20.0 the only release that was read."""
    schedules = published_schedules("0.20.0")
    functions = {name: f for name, f in vars(schedules).items() if inspect.isfunction(f)}
    digests = {name: digest(function) for name, function in functions.items() if name in KNOWN}
    assert set(ENTRIES) < set(digests)
    monkeypatch.setattr(megatron_sources, "KNOWN", digests)


@pytest.mark.usefixtures("known")
def test_a_known_release_is_known() -> None:
    schedules = published_schedules("0.20.0")
    assert not megatron_sources.functions_of(schedules).changed
    assert megatron_differences.sentence((), "0.20.0") is None


@pytest.mark.usefixtures("known")
def test_functions_that_differ_are_named() -> None:
    body = "return send_to_two_stages(model)"
    schedules = published_schedules("0.20.0", body, backward_step="input_tensor, output_tensor, grads, config")
    changed = megatron_sources.functions_of(schedules).changed
    assert set(changed) == {ENTRIES[0], "backward_step"}
    said = megatron_differences.sentence(changed, "0.21.0")
    assert said is not None
    assert said.startswith("megatron-core 0.21.0 differs from every release that megatron_pp knows")
    assert f" {ENTRIES[0]}" in said
    assert " backward_step" in said


@pytest.mark.usefixtures("known")
def test_functions_replaced_by_the_program_are_not_counted_as_megatrons() -> None:
    schedules = published_schedules("0.20.0", "return None")

    @functools.wraps(schedules.backward_step)
    def profiled(*args: object) -> None: ...

    def own(model: object) -> None: ...

    schedules.backward_step = profiled  # around Megatron's
    setattr(schedules, ENTRIES[0], own)
    functions = megatron_sources.functions_of(schedules)
    assert functions.changed == ()
    assert "backward_step" in functions.known
    assert ENTRIES[0] not in functions.known


@pytest.mark.usefixtures("known")
def test_callees_of_known_functions_are_not_read() -> None:
    assert known_entries(published_schedules("0.20.0")) == [*ENTRIES]
    assert known_entries(published_schedules("0.20.0", "return None")) == [*ENTRIES[1:]]
    replaced = published_schedules("0.20.0")
    setattr(replaced, ENTRIES[1], lambda model: None)
    assert known_entries(replaced) == [ENTRIES[0], ENTRIES[2]]


def known_entries(schedules: ModuleType) -> list[str]:
    functions = megatron_sources.functions_of(schedules)
    return [name for name in ENTRIES if name in functions.known]


@pytest.mark.parametrize("row", megatron_versions.TABLE, ids=lambda row: "{}.{}".format(*row.release))
def test_functions_whose_signatures_matter_have_digests(row: Row) -> None:
    """A function with a known digest then has the signature of the table."""
    assert {*expected_signatures(row), COMMUNICATOR} == NEEDED
    assert set(KNOWN) > NEEDED


# Two minor releases without a row of their own, and the branches, have the newest.
@pytest.mark.parametrize(
    ("number", "row"), [*enumerate([*megatron_versions.TABLE, *[megatron_versions.TABLE[-1]] * 3])]
)
def test_known_functions_are_of_the_release_of_their_schedules(number: int, row: Row) -> None:
    digests = {name: KNOWN[name].split() for name in NEEDED}
    assert {len(digests[name]) for name in ENTRIES} == {8}
    known = {name: found[number if name in ENTRIES else 0] for name, found in digests.items()}
    assert [one for one in megatron_versions.TABLE if Functions(known, ()).are_of(one)] == [row]
    assert not Functions(known, ("get_tensor_shapes",)).are_of(row)
    mixed = {**known, ENTRIES[0]: digests[ENTRIES[0]][number - 1]}
    assert not Functions(mixed, ()).are_of(row)
    for name in NEEDED:
        assert not Functions({one: digest for one, digest in known.items() if one != name}, ()).are_of(row)


@pytest.mark.parametrize("name", KNOWN)
def test_digests_are_written_once(name: str) -> None:
    digests = KNOWN[name].split()
    assert len(set(digests)) == len(digests)
    assert {len(one) for one in digests} == {12}


def test_without_a_source_there_is_nothing_to_compare() -> None:
    assert digest(len) == digest(compile("1", "<nowhere>", "exec")) == ""
    assert megatron_sources.functions_of(sys) == Functions({}, ())
    assert megatron_sources.known_steps(sys, Functions({}, ())) == {}
