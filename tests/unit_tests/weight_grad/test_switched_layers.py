"""Layers of Transformer Engine that were built without ``delay_wgrad_compute``: they delay in pipeline steps alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.errors import WeightGradError
from megatron_pp.weight_grad import check_wrappers, split_weight_grad, unsplit_weight_grad
from testkit.stand_ins.transformer_engine_python import on_cpu
from tests.unit_tests.weight_grad.steps import run_split, with_main_grads
from tests.unit_tests.weight_grad.test_delayed_layers import (
    MICROBATCHES,
    MODES,
    WIDTH,
    differing,
    gradients,
    harm,
    loss_of,
    new_model,
    split_step,
    whole_gradients,
    whole_step,
    with_megatrons_hooks,
)

pytestmark = pytest.mark.xdist_group("transformer_engine")


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with on_cpu() as module:
        yield module


@pytest.mark.parametrize("mode", MODES)
def test_gradients_and_hooks_are_those_of_the_layers_as_built(te: Any, mode: str) -> None:
    assert harm(te, mode, (1, 0, 2), built=False) == []
    assert harm(te, mode, None, built=False, kind=torch.bfloat16) == []


def test_weight_gradients_wait_for_their_w(te: Any) -> None:
    model = new_model(te, delay=False)
    store = split_weight_grad(model)
    with store.step({0: 0}):
        loss = loss_of(model, 0)
        with store.backward(0, 0):
            loss.backward()
        assert [layer.wgrad_store.context.qsize() for layer in model[:3]] == [1, 1, 2]
        assert all(model.get_parameter(f"{layer}.weight").grad is None for layer in (0, 1, 3))
        store.run(0, 0)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_outside_of_a_step_the_layers_compute_as_they_were_built(te: Any) -> None:
    model = new_model(te, delay=False)
    split_weight_grad(model)
    whole_step(model)
    assert differing(whole_gradients(te), gradients(model), exact=True) == []


def test_a_step_that_fails_leaves_nothing_in_the_queues(te: Any) -> None:
    model = new_model(te, delay=False)
    store = split_weight_grad(model)

    def without_w() -> None:
        with store.step({0: 0}):
            loss = loss_of(model, 0)
            with store.backward(0, 0):
                loss.backward()

    with pytest.raises(WeightGradError, match="were left behind"):
        without_w()
    assert [layer.wgrad_store.context.qsize() for layer in model[:3]] == [0, 0, 0]
    model.zero_grad()
    whole_step(model)
    assert differing(whole_gradients(te), gradients(model), exact=True) == []


def test_undone_and_copied_layers_have_the_queue_that_they_were_built_with(te: Any) -> None:
    model = new_model(te, delay=False)
    built = [layer.wgrad_store for layer in model[:3]]
    split_weight_grad(model)
    assert not any(layer.wgrad_store.delay_wgrad_compute() for layer in copy.deepcopy(model)[:3])
    unsplit_weight_grad(model)
    assert [layer.wgrad_store for layer in model[:3]] == built


def test_the_switch_is_off_where_it_is_not_wanted(te: Any, caplog: pytest.LogCaptureFixture) -> None:
    report = split_weight_grad(new_model(te, delay=False), delay_transformer_engine=False).report
    assert (report.split, report.delayed, report.switched, report.whole) == (1, 0, 0, 3)
    assert [layer.kind for layer in report.whole_layers] == ["Linear", "LayerNormLinear", "LayerNormMLP"]
    assert all("delay_transformer_engine is off" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 3


def test_a_layer_that_cannot_delay_stays_whole_and_says_why(te: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model(te, delay=False)
    model[0].ub_bulk_wgrad = True
    model[1].wgrad_store = None
    model[2] = te.Linear(WIDTH, WIDTH, parameters_split=("a", "b"), device=torch.device("cpu"))
    report = split_weight_grad(model).report
    assert (report.switched, report.whole) == (0, 3)
    reasons = ["Userbuffers overlap its weight gradient", "has no delay_wgrad_compute", "is in several parameters"]
    for reason, layer, record in zip(reasons, report.whole_layers, caplog.records, strict=True):
        assert reason in layer.reason
        assert reason in record.getMessage()


@pytest.mark.parametrize("flag", ["tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag"])
def test_layers_whose_operands_userbuffers_overwrite_stay_whole(te: Any, flag: str) -> None:
    """Under --tp-comm-overlap: layers of one name share a buffer, and W would read that of another layer."""
    attribute = {"tp_comm_overlap_ag": "ub_overlap_ag_dgrad"}.get(flag, flag.replace("tp_comm", "ub"))
    model = new_model(te, delay=False)
    setattr(model[1], attribute, True)
    report = split_weight_grad(model).report
    (layer,) = report.whole_layers
    assert layer.name == "1"
    assert flag in layer.reason


def test_torchs_distributed_data_parallel_is_taken_around_such_layers(te: Any) -> None:
    wrapped = object.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    check_wrappers(split_weight_grad(new_model(te, delay=False)), [wrapped])


def test_a_loss_that_uses_a_weight_beside_its_layer(te: Any) -> None:
    """The gradient that autograd has for the weight is real then, and is added."""
    expected, model = (new_model(te, delay=False) for _ in range(2))

    def loss(of: nn.Module, mb: int) -> Tensor:
        return loss_of(of, mb) + of[0].weight.square().sum()  # type: ignore[index, union-attr]

    for mb in range(MICROBATCHES):
        loss(expected, mb).backward()
    run_split(split_weight_grad(model), lambda mb: loss(model, mb), MICROBATCHES)
    assert differing(gradients(expected), gradients(model), exact=False) == []


# -- Megatron's wrappers -----------------------------------------------------------------------------------------------


def test_megatrons_guarded_backward_dw_does_not_stop_the_weight_gradient(te: Any) -> None:
    """Megatron's subclasses call Transformer Engine's ``backward_dw`` only if their config says so."""

    class Guarded(te.Linear):  # type: ignore[misc, name-defined]
        __module__ = "megatron.core.extensions.transformer_engine"

        def backward_dw(self) -> None:
            if False:
                super().backward_dw()

    model = new_model(te, delay=False)
    guarded = Guarded(WIDTH, WIDTH, device=torch.device("cpu"))
    guarded.load_state_dict(model[0].state_dict())
    model[0] = guarded
    split_step(model, (0, 1, 2), built=False)
    assert differing(whole_gradients(te), gradients(model), exact=False) == []


class Grouped(nn.Module):
    """A grouped linear layer between two plain ones, as experts are."""

    def __init__(self, te: Any, fuse: bool, bias: bool) -> None:
        super().__init__()
        common = {"fuse_wgrad_accumulation": fuse, "bias": bias, "device": torch.device("cpu")}
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = te.GroupedLinear(2, WIDTH, WIDTH, **common)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return self.experts(self.before(x), sizes)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()


def _grouped_loss(model: Grouped, mb: int) -> Tensor:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(mb))
    return model(x, ([2, 3], [5, 0], [1, 4])[mb]).square().sum()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["grad", "main_grad, hooks", "fused, hooks"])
def test_grouped_layers_defer_their_weight_gradients(te: Any, mode: str, bias: bool) -> None:
    fuse = "fused" in mode
    expected, model = Grouped(te, fuse, bias), Grouped(te, fuse, bias)
    fired = None
    for each in (expected, model):
        if mode != "grad":
            fired = with_megatrons_hooks(with_main_grads(each))
    for mb in range(MICROBATCHES):
        _grouped_loss(expected, mb).backward()
    store = split_weight_grad(model)
    assert (store.report.switched, store.report.whole) == (1, 0)
    run_split(store, lambda mb: _grouped_loss(model, mb), MICROBATCHES)
    assert differing(gradients(expected), gradients(model), exact=False) == []
    if fired is not None:
        assert [fired[parameter] for parameter in model.parameters()] == [1] * len(list(model.parameters()))
