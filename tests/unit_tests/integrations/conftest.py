"""What all tests of this folder have: modules in the place of Megatron-core's."""

from __future__ import annotations

import logging

import pytest

from megatron_pp.integrations.megatron.releases import sources as megatron_sources


@pytest.fixture(autouse=True)
def stand_ins_have_no_sources_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins have the signatures of releases but not their sources, for which `install()` would log a warning."""
    monkeypatch.setattr(megatron_sources, "KNOWN", {})


@pytest.fixture(autouse=True)
def warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing below them, whatever pytest's `--log-level` is: at INFO, `install()` names the releases it joins."""
    caplog.set_level(logging.WARNING, logger="megatron_pp")
