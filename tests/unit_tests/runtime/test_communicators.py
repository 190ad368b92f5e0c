"""The communicator that a pipeline group keeps from step to step."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp.runtime import communicators
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from testkit.models.hook_log import HookLog, logged_config, step_arguments


def test_a_group_keeps_one_communicator_and_nothing_of_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of a config hold the model, and Megatron's ``grad_scale_func`` the optimizer."""
    network, groups = MemoryNetwork(2), [ThreadGroup(rank, 2) for rank in range(2)]
    made: list[int] = []

    def transport_of(group: Any, *_: Any) -> Any:
        made.append(group.rank())
        return network.transport(group.rank())

    monkeypatch.setattr(communicators, "group_transport", transport_of)

    def train(rank: int) -> list[weakref.ref[Any]]:
        log, optimizer = HookLog(), HookLog()
        config = logged_config(
            log, 1, explicit=True, param_sync=True, timers=None, grad_scale_func=lambda loss: optimizer and loss
        )
        stages = log.make_stages(config, 1)
        for _ in range(2):
            collection = SimpleNamespace(pp=groups[rank])
            get_forward_backward_func(2)(**step_arguments(stages, 2), pg_collection=collection)
        return [weakref.ref(held) for held in (log, optimizer, next(stages[0].parameters()))]

    kept = run_ranks(2, train, network.abort)
    gc.collect()
    try:
        assert [held() for held in (*kept[0], *kept[1])] == [None] * 6
        assert sorted(made) == [0, 1]
    finally:
        communicators.close_communicators()
