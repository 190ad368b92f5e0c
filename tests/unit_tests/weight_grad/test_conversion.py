"""Converting a model: what is reported, refused and undone."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megatron_pp.errors import WeightGradSplitError
from megatron_pp.weight_grad import split_weight_grad, store_of, unsplit_weight_grad
from megatron_pp.weight_grad.report import weight_work
from megatron_pp.weight_grad.split_forward import why_left_to_megatron
from tests.unit_tests.weight_grad.habits import Everything
from tests.unit_tests.weight_grad.steps import new, run_split, step_on_ones


def test_the_conversion_of_each_layer_is_reported() -> None:
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


def test_undoing_the_conversion_restores_the_layers() -> None:
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


def test_the_weight_of_a_whole_layer_is_not_kept_when_another_replaces_it() -> None:
    model = nn.Linear(2, 2)
    store = split_weight_grad(model)
    run_split(store, lambda mb: torch.vmap(model)(torch.ones(3, 1, 2)).sum())
    assert torch.equal(model.weight.grad, torch.full((2, 2), 3.0))
    before = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    step_on_ones(model, store)
    gc.collect()
    assert before() is None


# -- what is said of layers that stay whole: their names, reasons, and share of the compute ---------------------------


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)  # 24 of 60
        self.norm = nn.LayerNorm(6)
        self.down = OwnForward(6, 4, bias=False)  # 24
        self.gate = nn.Bilinear(2, 2, 3, bias=False)  # 12
        self.rows = nn.Embedding(100, 4, max_norm=1.0)  # a look-up multiplies nothing


def test_each_whole_layer_is_named_with_its_class_its_reason_and_its_share(caplog: pytest.LogCaptureFixture) -> None:
    store = split_weight_grad([nn.ModuleDict({"first": Block(), "second": Block()}), Block()])
    said = [record.getMessage() for record in caplog.records]
    line = "layer {} computes its weight gradient in B, not in W: {}% of the weight gradients' FLOPs)"
    own, none = "its class has a forward of its own (OwnForward, ", "no layer of its class can be split (Bilinear, "
    assert said == [
        line.format("first.down", own + "13.3"), line.format("first.gate", none + "6.7"),
        line.format("second.down", own + "13.3"), line.format("second.gate", none + "6.7"),
        line.format("down", own + "13.3"), line.format("gate", none + "6.7"),
    ]  # fmt: skip
    assert (store.report.split, store.report.whole) == (3, 12)
    assert store.report.deferred_share == pytest.approx(0.4)


def test_layers_whose_names_differ_in_numbers_share_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = split_weight_grad(nn.Sequential(*(OwnForward(4, 4) for _ in range(3)), nn.Linear(4, 4)))
    (record,) = caplog.records
    assert record.getMessage().startswith("layer * (3 layers) computes its weight gradient in B")
    assert "OwnForward, 75.0%" in record.getMessage()
    assert [layer.name for layer in store.report.whole_layers] == ["0", "1", "2"]


def test_a_frozen_matrix_has_no_share(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(OwnForward(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    assert split_weight_grad(model).report.whole_layers == ()
    assert caplog.records == []


def test_an_expert_counts_with_its_share_of_the_tokens() -> None:
    layer = nn.Linear(4, 4)
    layer.config = SimpleNamespace(num_moe_experts=8, moe_router_topk=2, expert_model_parallel_size=2)  # type: ignore[assignment]
    assert weight_work(layer, "mlp.experts.local_experts.0.linear_fc1") == 16 * 2 * 2 / 8
    assert weight_work(layer, "mlp.shared_experts.linear_fc1") == 16


def test_a_reason_found_in_a_step_comes_with_the_share(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 12))

    def loss_of(mb: int) -> Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        (force,) = torch.autograd.grad(model[0](x).sum(), x, create_graph=True)
        return force.square().sum()

    run_split(split_weight_grad(model), loss_of)
    assert [record.getMessage().rpartition(" (")[2] for record in caplog.records] == [
        "Linear, 25.0% of the weight gradients' FLOPs)"
    ]


def test_layers_whose_calls_only_megatron_can_run_stay_whole() -> None:
    """``gtp_remat_size`` and ``output_dtype`` are arguments of Megatron's main branch."""
    call = {"bias": torch.ones(2), "allreduce_dgrad": True, "sequence_parallel": False, "tp_group": object()}
    call |= {"gradient_accumulation_fusion": True, "grad_output_buffer": None, "wgrad_deferral_limit": 0}
    x = torch.ones(1)
    assert why_left_to_megatron(x, call) == ""
    assert why_left_to_megatron(x, {**call, "gtp_remat_size": 1, "output_dtype": None}) == ""
    assert why_left_to_megatron(x, {**call, "gtp_remat_size": 2}) == "its weight is sharded (gtp_remat_size)"
    assert why_left_to_megatron(x, {**call, "output_dtype": torch.float32}) == "it is called with output_dtype"
    with torch.autocast("cpu", torch.bfloat16):
        assert why_left_to_megatron(x, call) == "it is called under autocast"
