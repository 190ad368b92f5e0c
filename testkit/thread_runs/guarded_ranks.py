"""Ranks as threads under the fault guard. Each runs its program of steps until one raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from megatron_pp.faults.store.fault_store import FaultStore
from megatron_pp.faults.store.records import Entry
from megatron_pp.testing.toy import ToyData
from testkit.thread_runs.step_runs import Rank, pipeline


class Call(NamedTuple):
    """One step of the toy model. ``number``: the program's own step number."""

    microbatches: int = 3
    number: int | None = None
    forward_only: bool = False


class Outcome(NamedTuple):
    """The number of steps that a rank has finished, and the error of the next one."""

    finished: int
    error: Exception | None


def run_programs(
    programs: Sequence[Iterable[Call]], fields_of: Callable[[int], dict[str, Any]] = lambda rank: {}
) -> list[Outcome]:
    """Run the calls of each rank's program. ``fields_of(rank)``: fields of its config."""

    def run_program(rank: Rank) -> Outcome:
        finished = 0
        for call in programs[rank.rank]:
            rank.config.step_number = call.number
            try:
                rank.step(rank.model(), data=ToyData(call.microbatches), forward_only=call.forward_only)
            except Exception as error:
                return Outcome(finished, error)
            finished += 1
        return Outcome(finished, None)

    return pipeline(len(programs), 1, 0, run_program, guarded=True, fields_of=fields_of)


def published_entries(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """A list to which every comparison before a step adds one entry for each rank."""
    entries: list[Entry] = []
    publish = FaultStore.publish

    def counted(store: FaultStore, record: Any) -> None:
        if isinstance(record, Entry):
            entries.append(record)
        publish(store, record)

    monkeypatch.setattr(FaultStore, "publish", counted)
    return entries
