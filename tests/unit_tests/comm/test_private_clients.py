"""Clients of a store for one thread, also with releases of torch whose stores cannot be cloned (2.6 and 2.7)."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_pp.comm.stores import private_client

cloned = pytest.mark.parametrize("clones", [True, False], ids=["torch 2.8 and newer", "torch 2.6"])


@pytest.fixture
def store(clones: bool, monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    made = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10))
    if not clones:
        monkeypatch.delattr(dist.Store, "clone")
    return made


@cloned
def test_a_client_has_the_keys_of_its_prefix_alone(store: dist.TCPStore) -> None:
    """As after a restart under torchrun: each attempt has a prefix of its own on the agent's store."""
    attempts = [dist.PrefixStore("default_pg", dist.PrefixStore(f"/worker/attempt_{nth}", store)) for nth in range(2)]
    first, again, second = (private_client(attempts[nth]) for nth in (0, 0, 1))
    first.set("failed", "1")
    assert again.get("failed") == b"1"
    assert not second.check(["failed"])
    assert second.add("made", 1) == 1
    assert [first.add("made", 1), again.add("made", 1)] == [1, 2]


@cloned
def test_a_client_of_a_store_without_a_prefix_has_the_store_s_keys(store: dist.TCPStore) -> None:
    store.set("key", "value")
    assert private_client(store).get("key") == b"value"
