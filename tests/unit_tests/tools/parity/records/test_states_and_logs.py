"""The values of a step other than parameters: buffers, the optimizer's state and schedule, reports, and logged
lines."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron_pp.tools.parity.records import states
from megatron_pp.tools.parity.records.logs import Logged, numbers_of, why_stale
from megatron_pp.tools.parity.records.parameters import Place

GROUPS = ("TP", "PP", "CP", "DP", "EP", "ETP")
ALONE = Place(dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 1))
LINE = (
    " [2026-11-28 04:44:01.123456] iteration        1/       4 | consumed samples:            4 | elapsed time per "
    "iteration (ms): 81.5 | learning rate: 9.996875E-04 | global batch size:     4 | lm loss: 4.852030E+00 | mtp_1 "
    "loss: nan | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("local_tokens_per_expert", torch.zeros(4), persistent=False)


def test_buffers_are_those_that_a_checkpoint_has():
    model = nn.ModuleDict({"router": Router(), "norm": nn.BatchNorm1d(2)})
    names = [name for name, _ in states.named_buffers(model, ALONE)]
    of_norm = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert names == ["router.expert_bias", *of_norm]


class ChainOfTwo:
    """A chain like Megatron's: if it has several optimizers, its attribute ``optimizer`` cannot be read."""

    def __init__(self, chained_optimizers: list[object]) -> None:
        self.chained_optimizers = chained_optimizers

    @property
    def optimizer(self) -> object:
        raise AssertionError("more than one optimizer")


def test_the_state_of_an_optimizer_by_parameter():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    chain = ChainOfTwo([optimizer, SimpleNamespace(chained_optimizers=[optimizer])])
    found = {(name, key): value for name, key, value, _, _ in states.optimizer_states([chain, optimizer], names)}
    assert set(found) == {(name, key) for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")}
    assert found["weight", "exp_avg"].shape == (2, 3)


def test_the_state_of_a_sharded_optimizer_knows_where_its_part_begins():
    whole, shard = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))
    inner = torch.optim.SGD([shard], lr=0.1, momentum=0.9)
    shard.grad = torch.arange(4.0)
    inner.step()
    optimizer = SimpleNamespace(
        optimizer=inner,
        model_param_group_index_map={whole: (0, 0)},
        _get_model_param_range_map=lambda parameter: {"param": SimpleNamespace(start=2, end=6)},
    )
    ((name, key, value, parameter, begin),) = states.optimizer_states([optimizer], {id(whole): "layer.weight"})
    assert (name, key, begin, parameter is whole) == ("layer.weight", "momentum_buffer", 2, True)
    assert value.tolist() == [0, 1, 2, 3]


def test_the_schedule_of_each_kind_of_group():
    groups = [{"lr": 0.1, "weight_decay": 0.01, "lr_mult": 1.0, "wd_mult": 0.0}, {"lr": 0.2}, {"lr": torch.ones(())}]
    assert states.schedule_values(groups) == {
        "learning rate (lr_mult 1, wd_mult 0)": 0.1,
        "weight decay (lr_mult 1, wd_mult 0)": 0.01,
        "learning rate": 0.2,
    }


def test_reports_are_numbers_by_microbatch():
    reports = [{"lm loss": torch.tensor([6.0, 3.0]), "name": "x"}, {"lm loss": (4, torch.tensor(2.0))}, 7.0]
    found = [(number, name, value.tolist()) for number, name, value in states.report_values(reports)]
    assert found == [(0, "lm loss", [6, 3]), (1, "lm loss", [4, 2])]
    assert list(states.report_values(None)) == []


@pytest.mark.parametrize(("p", "of_config"), [(0.3, 0.0), (0.0, 0.2), (0.0, 0.0)])
def test_dropout_is_switched_off(p, of_config):
    layer = nn.Dropout(p)
    layer.config = SimpleNamespace(hidden_dropout=of_config, attention_dropout=0.0)
    assert states.without_dropout(layer) is (p + of_config > 0)
    assert (layer.p, layer.config.hidden_dropout) == (0.0, 0.0)
    assert states.without_dropout(layer) is False


def test_numbers_of_a_log_with_the_unit_of_their_last_digit():
    found = {one.name: one for one in numbers_of(LINE)}
    assert set(found) == {
        *("consumed samples", "learning rate", "global batch size", "lm loss", "mtp_1 loss", "loss scale", "grad norm"),
        "number of skipped iterations",
    }
    assert found["lm loss"] == Logged("lm loss", 4.85203, pytest.approx(1e-6))
    assert found["learning rate"].resolution == pytest.approx(1e-10)
    assert found["grad norm"].resolution == pytest.approx(1e-3)
    assert found["global batch size"].resolution == 0
    assert np.isnan(found["mtp_1 loss"].value)


@pytest.mark.parametrize(
    ("name", "overlapped", "stale"),
    [("params norm", True, True), ("params norm", False, False), ("lm loss", True, False)],
)
def test_the_norm_of_parameters_that_are_not_gathered_yet_is_not_compared(name, overlapped, stale):
    chunks = [SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=overlapped)), nn.Linear(1, 1)]
    assert bool(why_stale(name, chunks)) is stale
