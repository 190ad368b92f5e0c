"""Converting a model: what is reported, refused and undone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from megatron_pp.errors import WeightGradSplitError
from megatron_pp.weight_grad import split_weight_grad, store_of, unsplit_weight_grad
from tests.unit_tests.weight_grad.habits import Everything
from tests.unit_tests.weight_grad.steps import new, step_on_ones


def test_what_becomes_of_each_layer_is_reported() -> None:
    report = split_weight_grad(new(Everything)).report
    # embedding, up, down, out_proj, frozen, bias_only, twice, head
    assert (report.split, report.delayed) == (8, 0)
    assert "8 layers defer their weight gradients" in str(report)


def test_converting_twice_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    split_weight_grad(model)
    with pytest.raises(WeightGradSplitError, match="0 was converted before"):
        split_weight_grad(model)


def test_torchscript_is_refused() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(WeightGradSplitError, match="0 is TorchScript"):
        split_weight_grad(model)


def test_undoing_the_conversion() -> None:
    model = new(Everything)
    classes = [type(layer) for layer in model.modules()]
    split_weight_grad(model)
    assert [type(layer) for layer in model.modules()] != classes
    unsplit_weight_grad(model)
    assert [type(layer) for layer in model.modules()] == classes
    assert store_of([model]) is None


def test_copies_and_pickles_are_not_converted() -> None:
    model = new(Everything)
    store = split_weight_grad(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(_plain()))):
        assert store_of([again]) is None
        assert type(again.up if isinstance(again, Everything) else again[0]) is nn.Linear
    assert store_of([model]) is store
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


def _plain() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    split_weight_grad(model)
    return model


def test_a_layer_of_two_chunks_is_converted_once() -> None:
    shared = nn.Linear(2, 2)
    store = split_weight_grad([nn.Sequential(shared), nn.Sequential(shared, nn.Linear(2, 2))])
    assert store.report.split == 2


def test_chunks_must_share_one_store() -> None:
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert store_of(chunks) is None
    split_weight_grad(chunks[0])
    with pytest.raises(WeightGradSplitError, match="call split_weight_grad once"):
        store_of(chunks)


def test_a_parameter_that_is_replaced_is_found() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    del model.bias
    model.register_parameter("bias", None)
    step_on_ones(model, store)
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
