"""The log of what hosts ask of virtual devices."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from megatron_pp.testing.threads import run_ranks
from testkit.streams import StreamNetwork, call_log, virtual_cuda
from testkit.streams.call_log import CallLog


def logged(size: int, program: Any, keeps: bool = True) -> list[dict[str, Any]]:
    """The records of ``program(rank, transport)`` on each of ``size`` ranks."""
    network = StreamNetwork(size, log=CallLog(keeps))

    def main(rank: int) -> None:
        with network.running(rank):
            program(rank, network.transport(rank))

    with virtual_cuda():
        run_ranks(size, main, network.abort)
    return network.log.records


def exchange(rank: int, transport: Any) -> None:
    """Rank 0 sends what it has computed on a side stream, in a range; rank 1 waits for it on the host."""
    tensor, side, event = torch.ones(4), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.nvtx.range("sum"), torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        total = tensor[1:] + 1
    tensor.record_stream(side)
    event.record(side)
    event.wait()
    work = transport.isend(total, 1, "A") if rank == 0 else transport.irecv(tensor[1:], 0, "A")
    work.wait()
    if rank == 1:
        tensor.tolist()


def test_each_call_is_a_line_that_the_format_describes(tmp_path: Path) -> None:
    records = logged(2, exchange)
    described = [line.split("``")[1] for line in (call_log.__doc__ or "").splitlines() if line.startswith("``")]
    assert {record["do"] for record in records} == set(described)
    network = StreamNetwork(2, log=CallLog())
    network.log.write(tmp_path / "calls.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert lines[0] == {"do": "format", "name": call_log.FORMAT, "version": call_log.VERSION}
    assert lines == network.log.records


def test_a_launch_has_the_bytes_that_it_uses_and_a_transfer_its_match() -> None:
    records = logged(2, exchange)
    on_rank_0 = {r["stream"] for r in records if r["do"] == "stream" and r["rank"] == 0}
    allocated = [r for r in records if r["do"] == "allocate" and r["rank"] == 0]
    (add,) = (r for r in records if r["do"] == "launch" and r["what"] == "add" and r["stream"] in on_rank_0)
    ((at, nbytes),), ((into, written),) = add["reads"], add["writes"]
    assert (nbytes, written) == (12, 12)
    assert at - 4 == allocated[0]["address"]
    assert into == allocated[1]["address"]
    assert allocated[1]["stream"] == add["stream"] != allocated[0]["stream"]
    (send,) = (r for r in records if r["do"] == "post" and r["stream"] in on_rank_0)
    (match,) = (r for r in records if r["do"] == "match")
    assert (send["reads"], send["writes"], send["ends"]) == ([[into, 12]], [], 1)
    assert match.items() >= {"send": send["event"], "source": 0, "target": 1, "bytes": 12, "buffered": False}.items()


def test_a_wait_in_the_log_names_its_event() -> None:
    records = logged(2, exchange)
    hosts = {r["stream"]: r["rank"] for r in records if r["do"] == "stream" and r["host"]}
    known: set[int] = set()
    waits: Counter[bool] = Counter()
    for record in records:
        if record["do"] in ("record", "post"):
            known.add(record["event"])
        elif record["do"] == "wait":
            assert record["event"] in known
            waits[record["stream"] in hosts] += 1
    # Of each rank: the side stream, the default stream for the event and for the transfer; the host for ``tolist``.
    assert waits == {False: 6, True: 1}


def test_the_call_log_keeps_nothing_by_default() -> None:
    assert [r["do"] for r in logged(2, exchange, keeps=False)] == ["format"]
