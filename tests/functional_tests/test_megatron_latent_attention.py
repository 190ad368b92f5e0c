"""Which gradients of Megatron-core's multi-latent attention are wrong under tensor parallelism. The CPU stand-in must
build the attention so that only gradients which are wrong with Transformer Engine are wrong."""

from __future__ import annotations

import pytest

from tests.functional_tests.megatron_support import needs_megatron

from testkit.megatron.cases import Case, Job  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip

pytestmark = needs_megatron
PLAIN, ENGINE, FUSED = "plain layers", "as with Transformer Engine", "one down-projection"
Found = dict[str, float] | None


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Found]]:
    check = "tests.functional_tests.megatron_latent_checks:differences"
    (outcome,) = run_jobs([Job(Case(tp=2), check=check, deadline=120.0)])
    assert outcome.status == "ok", outcome.message
    return outcome.facts


def wrong(of_ranks: list[dict[str, Found]], form: str, sequence: bool = False, mended: bool = False) -> list[set[str]]:
    """Return for each rank the names of gradients that differ from those of one process."""
    return [set(found[f"{form}, {sequence=}, {mended=}"] or ()) - {"sum of ranks"} for found in of_ranks]


def test_each_rank_has_the_rotary_key_of_its_own_heads(of_ranks: list[dict[str, Found]]) -> None:
    """The gradient that goes on to the layers below has the same fault."""
    assert wrong(of_ranks, ENGINE) == [{"rotary rows", "input"}] * 2
    found = [one[f"{ENGINE}, sequence=False, mended=False"] or {} for one in of_ranks]
    assert found[0]["rotary rows"] + found[1]["rotary rows"] == pytest.approx(1.0, abs=1e-5)
    assert max(one["sum of ranks"] for one in found) < 1e-5, "the sum over the ranks is right"
    assert wrong(of_ranks, ENGINE, mended=True) == [set()] * 2, "nothing else is wrong"


def test_sequence_parallelism_sums_the_rotary_key_with_whole_down_projections(of_ranks: list[dict[str, Found]]) -> None:
    """Recipes with Transformer Engine have this setting."""
    assert wrong(of_ranks, ENGINE, sequence=True) == [set()] * 2


def test_gathered_down_projections_do_not_sum_the_rotary_key_under_sequence_parallelism(
    of_ranks: list[dict[str, Found]],
) -> None:
    forms = [PLAIN, *([FUSED] if of_ranks[0].get(f"{FUSED}, sequence=True, mended=False") else [])]
    for form in forms:
        assert wrong(of_ranks, form, sequence=True) == [{"rotary rows", "input"}] * 2, form
        assert wrong(of_ranks, form, sequence=True, mended=True) == [set()] * 2, form


def test_one_fused_down_projection_crashes_or_does_not_sum_the_rotary_key(of_ranks: list[dict[str, Found]]) -> None:
    """Megatron-core 0.17 and 0.18 split it at sizes of one process."""
    found = [one[name] for one in of_ranks for name in one if name.startswith(FUSED) and name.endswith("mended=False")]
    assert all(one is None or "rotary rows" in one for one in found)


def test_the_norm_of_queries_is_summed_once_more_without_sequence_parallelism(
    of_ranks: list[dict[str, Found]],
) -> None:
    """If the norm is a layer by itself, each rank has the whole gradient, and Megatron adds up those of all ranks."""
    for one in of_ranks:
        assert (one[f"{PLAIN}, sequence=False, mended=False"] or {})["q_layernorm.weight"] == pytest.approx(2.0)
    assert wrong(of_ranks, PLAIN, mended=True) == [{"q_layernorm.weight"}] * 2
