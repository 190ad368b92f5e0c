"""The findings that are made of the answer of Megatron's parser and checks."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_pp.tools.check.jobs import megatron_flags


def answer(**fields: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"given": {}, "args": {}, "spelling": {}, "said": [], "assumed": [], "refusals": []}
    return {**empty, "failed": [], **fields}


def refused(text: str) -> dict[str, Any]:
    return {"text": text, "condition": "", "settings": ["num_layers"], "place": ""}


def test_a_library_that_this_machine_lacks_is_no_refusal_of_the_job() -> None:
    refusals = [refused("apply_rope_fusion is not available. Please install TE >= 1.4."), refused("install nothing")]
    here = answer(refusals=refusals, assumed=["transformer_engine"])
    assert [one.text for one in megatron_flags._refusals(here)] == ["Megatron refuses: install nothing"]
    assert len(megatron_flags._refusals(answer(refusals=refusals))) == 2


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("fused permutation is not available. Please install TE >= 2.1.0.", False),
        ("Only transformer-engine>=1.7.0 supports MoE FP8 training, but your version is 0.0.0.", False),
        ("For fine-grained activation offloading with TE >= 2.10.0, NVTE_CPU_OFFLOAD_V1 should be set to 1", False),
        ("CPU offloading is supported by the implementation transformer_engine alone, and local was chosen", True),
    ],
)
def test_a_refusal_is_dropped_where_it_asks_for_a_library_or_its_release(text: str, stays: bool) -> None:
    here = answer(refusals=[refused(text)], assumed=["transformer_engine"])
    assert len(megatron_flags._refusals(here)) == stays


def test_a_value_that_megatron_takes_out_of_its_list_is_no_change() -> None:
    given = {"moe_aux_loss_coeff": [0.001], "lr": 1.0}
    changed = answer(given=given, args={"moe_aux_loss_coeff": 0.001, "lr": 2.0})
    assert [one.text for one in megatron_flags._changes(changed)] == ["Megatron changes lr 1.0 to 2.0"]


def test_each_assumption_is_listed() -> None:
    found = megatron_flags._assumed(answer(assumed=["flashinfer", "CUDA_DEVICE_MAX_CONNECTIONS"]))
    assert [one.text.split()[0] for one in found] == ["FlashInfer", "CUDA_DEVICE_MAX_CONNECTIONS"]
