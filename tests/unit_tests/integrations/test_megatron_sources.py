"""Which functions of a release differ from those of all releases that the plug-in was read against."""

from __future__ import annotations

import functools
import inspect
import sys

import pytest

from megatron_pp.integrations.megatron.releases import sources as megatron_sources
from megatron_pp.integrations.megatron.releases import versions as megatron_versions
from megatron_pp.integrations.megatron.releases.versions import ENTRIES, digest
from tests.unit_tests.integrations.test_megatron_versions import published_schedules

KNOWN = megatron_sources.KNOWN


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the stand-in of 0.20.0 were the only release that was read."""
    schedules = published_schedules("0.20.0")
    functions = {name: f for name, f in vars(schedules).items() if inspect.isfunction(f)}
    digests = {name: digest(function) for name, function in functions.items() if name in KNOWN}
    assert set(ENTRIES) < set(digests)
    monkeypatch.setattr(megatron_sources, "KNOWN", digests)


@pytest.mark.usefixtures("known")
def test_a_known_release_is_known() -> None:
    assert megatron_sources.sentence(published_schedules("0.20.0"), "0.20.0") is None


@pytest.mark.usefixtures("known")
def test_functions_that_differ_are_named() -> None:
    body = "return send_to_two_stages(model)"
    schedules = published_schedules("0.20.0", body, backward_step="input_tensor, output_tensor, grads, config")
    assert set(megatron_sources.changed_functions(schedules)) == {ENTRIES[0], "backward_step"}
    said = megatron_sources.sentence(schedules, "0.21.0")
    assert said is not None
    assert said.startswith("megatron-core 0.21.0 differs from every release that megatron_pp knows")
    assert f" {ENTRIES[0]}" in said
    assert " backward_step" in said


@pytest.mark.usefixtures("known")
def test_what_the_program_has_put_there_is_not_megatrons() -> None:
    schedules = published_schedules("0.20.0", "return None")

    @functools.wraps(schedules.backward_step)
    def profiled(*args: object) -> None: ...

    def own(model: object) -> None: ...

    schedules.backward_step = profiled  # around Megatron's
    setattr(schedules, ENTRIES[0], own)
    assert megatron_sources.changed_functions(schedules) == []


@pytest.mark.usefixtures("known")
def test_what_known_functions_make_use_of_need_not_be_read() -> None:
    assert megatron_sources.are_known(published_schedules("0.20.0"), ENTRIES)
    assert not megatron_sources.are_known(published_schedules("0.20.0", "return None"), ENTRIES)
    replaced = published_schedules("0.20.0")
    setattr(replaced, ENTRIES[1], lambda model: None)
    assert not megatron_sources.are_known(replaced, ENTRIES)
    assert megatron_sources.are_known(replaced, ENTRIES[2:])


@pytest.mark.parametrize("name", KNOWN)
def test_digests_are_written_once(name: str) -> None:
    digests = KNOWN[name].split()
    assert len(set(digests)) == len(digests)
    assert {len(one) for one in digests} == {12}


def test_without_a_source_there_is_nothing_to_compare() -> None:
    assert digest(len) == digest(compile("1", "<nowhere>", "exec")) == ""
    assert megatron_versions.known_steps(sys) == {}
