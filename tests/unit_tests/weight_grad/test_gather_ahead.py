"""The communication that a weight gradient needs runs while the one before it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_pp.weight_grad import linear, split_weight_grad
from megatron_pp.weight_grad.linear import DeferredLinear


class Gathering:
    """In place of an all-gather over a group of one rank; notes when it begins and when it is waited for."""

    events: list[str]

    def __init__(self, part: Tensor, group: str) -> None:
        self.part, self.group = part, group
        self.events.append(f"begin {group}")

    def wait(self) -> Tensor:
        self.events.append(f"wait {self.group}")
        return self.part


def test_w_begins_the_next_gather_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Gathering.events = []
    compute = DeferredLinear.compute

    def noted(deferred: DeferredLinear, fused: bool = True) -> Iterator[tuple[Tensor, Any]]:
        deferred.group = deferred.name
        for result in compute(deferred, fused):
            events.append(f"done {deferred.name}")
            yield result

    def prepare(deferred: DeferredLinear) -> None:
        deferred.group = deferred.name
        plain_prepare(deferred)

    plain_prepare = DeferredLinear.prepare
    monkeypatch.setattr(linear, "Gathering", Gathering)
    monkeypatch.setattr(DeferredLinear, "compute", noted)
    monkeypatch.setattr(DeferredLinear, "prepare", prepare)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    store = split_weight_grad(model)
    with store.step({0: 0}):
        loss = model(torch.ones(1, 2)).sum()
        with store.backward(0, 0):
            loss.backward()
        assert events == []
        store.run(0, 0)
    assert events == [
        "begin 1", "begin 2", "wait 2", "done 2", "begin 0", "wait 1", "done 1", "wait 0", "done 0",
    ]  # fmt: skip
