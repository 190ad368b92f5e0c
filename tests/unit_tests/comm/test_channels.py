"""Groups of two for one-way channels, on real gloo: the order they are made in, waiting for the other end, and what
torch knows of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.comm import abort
from megatron_pp.comm.channels import ChannelGroups, ChannelKey, in_rounds
from megatron_pp.comm.nccl.nccl_transport import channel_options
from megatron_pp.comm.transport import ACT, GRAD
from megatron_pp.errors import CommunicatorClosedError, P2PTimeoutError
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.testing.threads import run_ranks
from testkit.virtual_groups import VirtualNCCL

PATIENCE = timedelta(seconds=20)
LIMIT = timedelta(seconds=30)
GLOBAL_RANKS = [7, 5, 3, 1]


def keys_of(placement: Placement) -> list[ChannelKey]:
    return [key for s, t in placement.rank_edges for key in ((s, t, ACT), (t, s, GRAD))]


def longest_chain(keys: list[ChannelKey]) -> int:
    """Meetings one after the other until the last channel is made, where each rank makes its own in this order and a
    meeting takes 1."""
    free: Counter[int] = Counter()
    for source, target, _ in keys:
        free[source] = free[target] = max(free[source], free[target]) + 1
    return max(free.values())


@pytest.mark.parametrize(
    ("kind", "size", "chunks", "rounds", "in_sorted_order"),
    [(LOOP, 64, 2, 4, 128), (LOOP, 64, 1, 4, 126), (V_SHAPE, 64, 2, 8, 252), (LOOP, 63, 2, 6, 126), (LOOP, 2, 2, 4, 4)],
)
def test_rounds_do_not_grow_with_the_pipeline(
    kind: str, size: int, chunks: int, rounds: int, in_sorted_order: int
) -> None:
    keys = keys_of(Placement(kind, size, chunks))
    made = in_rounds(keys)
    assert len(made) == rounds
    assert sorted(key for together in made for key in together) == sorted(keys)
    for together in made:
        ends = [rank for key in together for rank in key[:2]]
        assert len(ends) == len(set(ends))
    assert longest_chain([key for together in made for key in together]) == rounds
    assert longest_chain(keys) == in_sorted_order


class CountingStore:
    """A store that counts its calls."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


def groups_of(rank: int, store: dist.Store) -> ChannelGroups:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = LIMIT
    return ChannelGroups(store, "a pipeline", rank, GLOBAL_RANKS, options)


def test_groups_of_a_loop() -> None:
    """Every rank makes its channels in the order of rounds, and a message goes through each."""
    store, size = dist.HashStore(), 4
    keys = [key for together in in_rounds(keys_of(Placement(LOOP, size, 2))) for key in together]
    names_before = dict(dist.distributed_c10d._world.pg_names)

    def rank_main(rank: int) -> dict[ChannelKey, tuple[Any, ...]]:
        groups = groups_of(rank, store)
        assert groups.make(keys, PATIENCE) == [key for key in keys if rank in key[:2]]
        seen, works = {}, []
        for key, (group, peer) in groups.channels.items():
            number = torch.tensor([float(keys.index(key))]) if rank == key[0] else torch.zeros(1)
            works.append((group.send if rank == key[0] else group.recv)([number], peer, 0))
            seen[key] = (group.group_name, group.group_desc, dist.get_process_group_ranks(group), number)
        for work in works:
            work.wait(PATIENCE)
        made = [channel.group for channel in groups.channels.values()]
        groups.close()
        assert not any(group in dist.distributed_c10d._world.pg_group_ranks for group in made)
        return seen

    results = run_ranks(size, rank_main)
    assert names_before == dist.distributed_c10d._world.pg_names  # they count in names of later groups
    names = set()
    for index, key in enumerate(keys):
        source, target, kind = key
        (name, desc, ranks, sent), (other_name, _, other_ranks, received) = (results[rank][key] for rank in key[:2])
        assert name == other_name
        assert desc == f"megatron_pp {kind} {source} to {target}"
        assert ranks == other_ranks == [GLOBAL_RANKS[source], GLOBAL_RANKS[target]]
        assert sent.item() == received.item() == index
        names.add(name)
    assert len(names) == len(keys)


def test_waiting_for_an_absent_peer_does_not_poll_the_store() -> None:
    store = CountingStore(dist.HashStore())
    groups = groups_of(0, store)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(P2PTimeoutError, match="has not begun to make it"):
        groups._meet_other_end(store, 0, 1, "channel 0", timedelta(seconds=0.6))  # type: ignore[arg-type]
    assert time.monotonic() - began < 6
    assert store.calls["wait"] <= 8
    assert store.calls["check"] <= 8


def test_an_abort_ends_the_wait_for_the_other_end() -> None:
    groups = groups_of(0, dist.HashStore())
    threading.Timer(0.2, setattr, (groups, "aborted", True)).start()
    began = time.monotonic()
    with pytest.raises(CommunicatorClosedError, match="closed while channel"):
        groups.make([(0, 1, ACT)], PATIENCE)
    assert time.monotonic() - began < PATIENCE.total_seconds() / 2


def test_a_channel_made_during_an_abort_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort comes after this rank has looked for one, and before the channel is known."""
    aborted: list[dist.ProcessGroup] = []
    monkeypatch.setattr(abort, "abort_groups", aborted.extend)
    store, made = dist.HashStore(), []
    connect = ChannelGroups.connect

    def aborted_meanwhile(groups: ChannelGroups, *args: Any) -> dist.ProcessGroup:
        made.append(connect(groups, *args))
        if groups.rank == 0:
            assert groups.abort() == []
        return made[-1]

    monkeypatch.setattr(ChannelGroups, "connect", aborted_meanwhile)

    def make(rank: int) -> str:
        try:
            groups_of(rank, store).make([(0, 1, ACT)], PATIENCE)
        except CommunicatorClosedError as error:
            return str(error)
        return "made"

    said = run_ranks(2, make)
    assert said == [f"pipeline rank 0: closed while channel {(0, 1, ACT)} was being made", "made"]
    assert len(aborted) == 1
    assert aborted[0] in made


def test_an_abort_ends_channels_made_before_it() -> None:
    store = dist.HashStore()

    def make(rank: int) -> bool:
        groups = groups_of(rank, store)
        groups.make([(0, 1, ACT), (1, 0, GRAD)], PATIENCE)
        whole = groups.make_group(PATIENCE)
        return groups.abort() == [*(channel.group for channel in groups.channels.values()), whole]

    assert run_ranks(len(GLOBAL_RANKS), make) == [True] * len(GLOBAL_RANKS)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The NCCL options of a pipeline group that was made without options."""
    if not hasattr(dist, "ProcessGroupNCCL"):  # a build of torch for CPUs
        monkeypatch.setattr(dist, "ProcessGroupNCCL", VirtualNCCL, raising=False)
    return dist.ProcessGroupNCCL.Options()


@pytest.mark.parametrize(
    ("given", "max_ctas", "expected"),
    [
        ({}, None, 8),
        ({}, 2, 2),
        ({"max_ctas": 16}, None, 16),
        ({"max_ctas": 16}, 2, 2),
        ({"min_ctas": 12}, None, 12),
        ({"min_ctas": 4}, None, 8),
    ],
)
def test_channels_copy_the_pipeline_groups_nccl_options_except_max_ctas(
    options: Any, given: dict[str, int], max_ctas: int | None, expected: int
) -> None:
    for name, value in given.items():
        setattr(options.config, name, value)
    options.config.cga_cluster_size = 2
    made = channel_options(options, max_ctas)
    assert made.is_high_priority_stream
    assert (made.config.max_ctas, made.config.cga_cluster_size) == (expected, 2)
    assert not options.is_high_priority_stream
    assert options.config.max_ctas == given.get("max_ctas", dist.ProcessGroupNCCL.Options().config.max_ctas)


@pytest.mark.slow
def test_making_channels_is_not_blocked_by_another_threads_store_wait() -> None:
    """A client of a TCPStore answers one thread at a time. Two pipelines in two threads wait for each other then."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [server, dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)]
    busy = [threading.Thread(target=_wait_in_vain, args=(client,), daemon=True) for client in clients]
    for thread in busy:
        thread.start()
    time.sleep(0.2)
    begun = time.monotonic()
    run_ranks(2, lambda rank: groups_of(rank, clients[rank]).make([(0, 1, ACT)], PATIENCE))
    assert time.monotonic() - begun < 2.5
    for thread in busy:
        thread.join(30.0)


def _wait_in_vain(store: dist.Store) -> None:
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=4))
