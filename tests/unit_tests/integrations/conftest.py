"""What all tests of this folder have: modules in the place of Megatron-core's."""

from __future__ import annotations

import pytest

from megatron_pp.integrations.megatron.releases import sources as megatron_sources


@pytest.fixture(autouse=True)
def stand_ins_have_no_sources_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the signatures of releases and not their sources, of which `install()` would say so."""
    monkeypatch.setattr(megatron_sources, "KNOWN", {})
