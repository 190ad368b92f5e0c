"""When a step is given up, and what is said: the rules, one by one, on invented observations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from megatron_pp.faults.causes.diagnosis import (
    around_positions,
    busy_ranks,
    doing,
    instruction_at,
    stall_text,
    waits_on,
    working_ranks,
)
from megatron_pp.faults.causes.liveness import ALIVE, DEAD, STOPPED, TRACED, UNKNOWN, state_of
from megatron_pp.faults.causes.stall_detector import OwnState, find_stall
from megatron_pp.faults.heartbeat import Pace
from megatron_pp.faults.store.peers import Peers
from megatron_pp.faults.store.processes import this_process
from megatron_pp.faults.store.records import DONE, ENTERING, IN_STEP, Process, Progress
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from testkit.inputs.plan_text import placed

TIMEOUT = 60.0
HERE = "this machine"


def _process(rank: int) -> Process:
    return Process(HERE, 100 + rank, 1)


def _progress(
    rank: int, step: int = 5, state: str = IN_STEP, idle: float = 0.0, beat: int = 1, text: str = ""
) -> Progress:
    return Progress(step, state, 3, text, idle, beat, _process(rank))


def _peers(*reads: tuple[float, dict[int, Progress]]) -> Peers:
    peers = Peers()
    for now, records in reads:
        peers.note_progress(records, now)
    return peers


def _every(seconds: range, of: Callable[[int], dict[int, Progress]]) -> Peers:
    return _peers(*((float(t), of(t)) for t in seconds))


def _gone(*ranks: int) -> Callable[[Process], str]:
    return lambda process: DEAD if process.pid - 100 in ranks else ALIVE


class Look(NamedTuple):
    """What rank 0 of 3 knows at ``now``, in step 5, without progress for ``idle`` seconds; and the stall that it finds
    (suspects None: no stall; none: not compared)."""

    idle: float
    now: float
    peers: Peers
    suspects: tuple[int, ...] | None = None
    words: str = ""
    waits_on: tuple[int, ...] = ()
    state: Callable[[Process], str] = _gone()
    failed: str = ""
    working: tuple[int, ...] = ()
    patience: float | None = None
    mutual: tuple[str, tuple[int, ...]] = ("", ())


READ_ONCE = _peers((0.0, {1: _progress(1), 2: _progress(2)}))
READ_AGAIN = _peers(
    (0.0, {1: _progress(1), 2: _progress(2)}), (3600.1, {1: _progress(1, beat=9), 2: _progress(2, beat=9)})
)
FINISHED = _peers((0.0, {1: _progress(1, state=DONE), 2: _progress(2)}))
# Rank 1 moved 50 seconds ago, rank 2 did not for an hour.
SLOW = _every(range(70), lambda t: {1: _progress(1, idle=50.0, beat=t), 2: _progress(2, idle=3600.0, beat=t)})
SILENT = _every(range(0, 61, 10), lambda t: {1: _progress(1, beat=1), 2: _progress(2, beat=t)})
STILL = _every(range(0, 62, 5), lambda t: {r: _progress(r, idle=t, beat=t) for r in (1, 2)})
STILL_LONGER = _every(range(0, 122, 5), lambda t: {r: _progress(r, idle=t, beat=t) for r in (1, 2)})
WITHOUT_2 = _every(range(0, 62, 5), lambda t: {1: _progress(1, idle=t, beat=t)})
EARLIER = _progress(2, step=4, state=DONE)
BEHIND = _every(range(0, 62, 5), lambda t: {1: _progress(1, idle=t, beat=t), 2: EARLIER})
MUTUAL = ("F0.2 and B0.1", (1, 2))
BROKEN = Peers(broken_since=10.0, broken="DistNetworkError: reset")
LOOKS = {
    "it moves": Look(0.0, 1000.0, Peers()),
    "a slow rank that lives and moves": Look(3600.0, 69.0, SLOW, waits_on=(1,)),
    "a rank that has finished and ended": Look(10.0, 1.0, FINISHED, waits_on=(1,), state=_gone(1)),
    "a rank that nobody waits for has ended": Look(10.0, 1.0, READ_ONCE, waits_on=(2,), state=_gone(1)),
    "a hiccup of the store while it moves": Look(1.0, 100.0, Peers(broken_since=0.0, broken="reset")),
    "a dead process that is waited for": Look(
        1.5, 0.1, READ_ONCE, (1,), "the process of rank 1 (pid 101) is gone", waits_on=(1,), state=_gone(1)
    ),
    "any dead process after a failed transfer": Look(0.0, 0.1, READ_ONCE, (2,), state=_gone(2), failed="it failed"),
    "silence before the timeout": Look(60.0, 59.0, SILENT, waits_on=(1,)),
    "silence for the timeout": Look(
        61.0, 61.0, SILENT, (1,), "pid 101 is stopped, as by SIGSTOP", waits_on=(1,), state=lambda process: STOPPED
    ),
    # The clock says that nothing came for an hour; but nothing was asked, either.
    "a reader that was itself stopped": Look(3600.0, 3600.0, READ_ONCE, waits_on=(1,)),
    "the same after its next look": Look(3600.0, 3600.2, READ_AGAIN, waits_on=(1,)),
    "nobody moves before the timeout": Look(59.0, 60.0, STILL),
    "nobody moves for the timeout": Look(61.0, 61.0, STILL, (), "no rank has made progress for 61 s"),
    "a rank computes": Look(119.0, 119.0, STILL_LONGER, waits_on=(1,), working=(2,), patience=120.0),
    "no rank computes": Look(
        119.0, 119.0, STILL_LONGER, (), "no rank has made progress", waits_on=(1,), patience=120.0
    ),
    "a rank computes for too long": Look(
        121.0, 121.0, STILL_LONGER, (), "made progress for 121 s", waits_on=(1,), working=(2,), patience=120.0
    ),
    "operations wait for each other": Look(
        61.0, 61.0, STILL, (1, 2), "for 61 s: F0.2 and B0.1", working=(1, 2), patience=120.0, mutual=MUTUAL
    ),
    "they wait for each other, but not for long": Look(
        59.0, 60.0, STILL, working=(1, 2), patience=120.0, mutual=MUTUAL
    ),
    "they wait for each other, but a rank moves": Look(
        3600.0, 69.0, SLOW, working=(1, 2), patience=7200.0, mutual=MUTUAL
    ),
    "a rank has never entered": Look(
        61.0, 61.0, WITHOUT_2, (2,), "rank 2 has not entered step 5 (rank 2 has reported no step at all"
    ),
    "it may not have called install": Look(61.0, 61.0, WITHOUT_2, (2,), "every rank calls install()"),
    "a rank is in an earlier step": Look(61.0, 61.0, BEHIND, (2,)),
    "the store has just failed": Look(10.0, 12.0, BROKEN),
    "the store has failed": Look(10.0, 14.0, BROKEN, (), "DistNetworkError: reset"),
    "the store does not answer yet": Look(60.0, 69.0, Peers(asked_at=10.0)),
    "the store does not answer": Look(61.0, 71.0, Peers(asked_at=10.0), (), "the network"),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_step_is_given_up_by_the_stall_rules(look: Look) -> None:
    own = OwnState(0, 3, 5, look.idle, look.waits_on, look.failed, working=look.working, mutual=look.mutual)
    more = () if look.patience is None else (look.patience,)
    found = find_stall(look.peers, own, TIMEOUT, look.now, look.state, *more)
    assert (found is None) == (look.suspects is None)
    if found is not None:
        assert found.suspects == look.suspects or not look.suspects
        assert look.words in found.why


def _given_up(
    state: Callable[[float], str],
    timeout: float = 480.0,
    beats: Callable[[int], int] = lambda second: 1,
    upto: int = 700,
) -> tuple[float, str] | None:
    """Rank 1 of 3, which rank 0 waits for, is in the ``state`` of each second; its heartbeat is ``beats`` of it. Rank 0
    looks once a second: when it gives up the step, and why."""
    peers = Peers()
    for second in range(upto):
        now = float(second)
        peers.note_progress({1: _progress(1, beat=beats(second)), 2: _progress(2, beat=second)}, now)
        own = OwnState(0, 3, 5, idle=now, waits_on=(1,))
        states = {101: state(now), 102: ALIVE}
        found = find_stall(peers, own, timeout, now, lambda process, of=states: of[process.pid])  # type: ignore[misc]
        if found is not None:
            assert found.suspects == (1,)
            return now, found.why
    return None


@pytest.mark.parametrize(
    ("state", "timeout", "seconds"),
    [
        (STOPPED, 480.0, 62.0),
        (STOPPED, 3600.0, 452.0),  # who sets a longer time has an eighth of it
        (STOPPED, 30.0, 30.0),
        (ALIVE, 480.0, 480.0),  # code that keeps the interpreter's lock sends no heartbeats either
        (TRACED, 480.0, 480.0),
        (UNKNOWN, 480.0, 480.0),
    ],
)
def test_a_stopped_process_is_found_before_a_silent_one(state: str, timeout: float, seconds: float) -> None:
    found = _given_up(lambda second: state, timeout)
    assert found is not None
    when, why = found
    assert seconds <= when <= seconds + 2.0
    assert ("is stopped, as by SIGSTOP" in why) == (state in (STOPPED, TRACED))


def test_a_process_that_is_stopped_again_and_again_is_not_given_up_before_its_time() -> None:
    """The rank also holds the interpreter's lock, so it sends no heartbeat in between."""
    found = _given_up(lambda second: ALIVE if second % 50 == 49 else STOPPED)
    assert found is not None
    assert found[0] >= 480.0


def test_a_stop_that_ends_with_a_heartbeat_is_forgotten() -> None:
    assert _given_up(lambda second: STOPPED, beats=lambda second: 1 + second // 50) is None


def test_the_looks_of_a_reader_that_was_itself_stopped_do_not_count() -> None:
    """The whole job was stopped for an hour, and rank 1 goes on a moment later than rank 0."""
    peers = Peers()
    looks = [*range(30), 3630, 3631, 3632]
    for second in looks:
        now = float(second)
        peers.note_progress({1: _progress(1, beat=1), 2: _progress(2, beat=second)}, now)
        found = find_stall(peers, OwnState(0, 3, 5, now, (1,)), 7200.0, now, lambda process: STOPPED)
        assert found is None


def test_ranks_are_told_apart_as_working_or_waiting() -> None:
    plan = build_plan(PlanSpec("1f1b", 2, 1, 4))
    place = {str(at): k for k, at in enumerate(plan.programs[1])}

    def at(text: str, state: str = IN_STEP) -> dict[int, Progress]:
        return {1: Progress(1, state, place.get(text, 0), text)}

    assert working_ranks(plan, at("F0.2")) == (1,)
    assert working_ranks(plan, at("WAIT_F0.2")) == ()
    assert working_ranks(plan, at("the optimizer step")) == (1,)
    assert working_ranks(None, at("the optimizer step")) == (1,)
    assert working_ranks(plan, at("F0.2", ENTERING)) == ()


# -- what is known of processes ---

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_state_of_a_process() -> None:
    assert state_of(this_process()) == ALIVE
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        text = open(f"/proc/{child.pid}/stat").read()  # noqa: SIM115
        known = Process(this_process().host, child.pid, int(text.rpartition(")")[2].split()[19]))
        assert state_of(known) == ALIVE
        os.kill(child.pid, signal.SIGSTOP)
        _wait_for(known, STOPPED)
        os.kill(child.pid, signal.SIGKILL)
        _wait_for(known, DEAD)  # a zombie: nobody has waited for it
    finally:
        child.kill()
        child.wait()
    assert state_of(known) == DEAD
    assert state_of(Process(known.host, os.getpid(), known.started)) == DEAD  # the pid is another process's by now
    assert state_of(Process("another machine", os.getpid(), 1)) == UNKNOWN
    assert state_of(Process()) == UNKNOWN


def _wait_for(process: Process, state: str) -> None:
    for _ in range(500):
        if state_of(process) == state:
            return
        time.sleep(0.01)
    pytest.fail(f"the process did not become {state}")


# -- in words ---


def placed_one(placement: Placement, rank: int, text: str) -> Instruction:
    return placed(placement, rank, text)[0]


def test_waits_on_names_the_peers_of_an_instruction() -> None:
    loop = Placement(LOOP, 4, 2)
    assert waits_on(placed_one(loop, 1, "WAIT_F1.3")) == (0,)
    assert waits_on(placed_one(loop, 0, "WAIT_F1.3")) == (3,)  # chunk 1 on rank 0 follows chunk 0 on rank 3
    assert waits_on(placed_one(loop, 1, "WAIT_B1.3")) == (2,)
    assert waits_on(placed_one(loop, 1, "FREE_F0.3")) == (2,)
    assert waits_on(placed_one(loop, 1, "FREE_B0.3")) == (0,)
    assert waits_on(placed_one(loop, 1, "F0.3")) == ()
    assert waits_on(placed_one(loop, 0, "GRAD_SYNC0")) == ()
    assert waits_on(placed_one(loop, 1, "[SEND_F0.1 RECV_F0.2]")) == (0, 2)
    v = Placement(V_SHAPE, 4, 2)
    assert waits_on(placed_one(v, 1, "WAIT_F1.3")) == (2,)


def test_an_instruction_is_described_in_words() -> None:
    loop = Placement(LOOP, 4, 2)
    words = doing(placed_one(loop, 2, "WAIT_F1.3"))
    assert words == "waits for the activation of chunk 1, microbatch 3 from rank 1"
    words = doing(placed_one(loop, 2, "FREE_B1.3"))
    assert words == "waits for rank 1 to receive the gradient of chunk 1, microbatch 3"
    assert doing(placed_one(loop, 2, "F0.1")) == "is in forward of chunk 0, microbatch 1"


def test_the_message_of_a_stall() -> None:
    plan = build_plan(PlanSpec("1f1b", 3, 1, 6))
    waiting = next(k for k, at in enumerate(plan.programs[2]) if str(at) == "WAIT_F0.3")
    busy = next(k for k, at in enumerate(plan.programs[1]) if str(at) == "F0.3")
    own = Progress(7, IN_STEP, waiting, "WAIT_F0.3", 41.0)
    seen = {1: (Progress(7, IN_STEP, busy, "F0.3"), 41.2), 0: (Progress(7, DONE), 3.0)}
    text = stall_text(2, plan, own, seen, 3, "no rank has moved")
    assert "rank 2 waits for the activation of chunk 0, microbatch 3 from rank 1, which last reported" in text
    assert "last reported forward of chunk 0, microbatch 3, 41.2 s ago" in text
    assert "rank 0: finished step 7, 3.0 s ago" in text
    assert ">F0.3<" in text
    assert ">WAIT_F0.3<" in text
    behind = Progress(7, IN_STEP, busy, "the work after the plan", 41.2)
    assert busy_ranks(plan, {1: seen[1][0], 2: own}) == (1,)
    assert busy_ranks(plan, {1: behind, 2: own}) == (), "it may wait in a collective for a rank of another pipeline"


def test_a_rank_that_was_never_heard_of_has_its_line() -> None:
    plan = build_plan(PlanSpec("1f1b", 2, 1, 2))
    text = stall_text(0, plan, Progress(1, IN_STEP, 0, "F0.0"), {}, 2, "why")
    assert "rank 1: has not reported" in text


def test_the_window_beside_the_plan_is_marked_and_cut() -> None:
    plan = build_plan(PlanSpec("1f1b", 2, 1, 8))
    line = around_positions(plan, {0: 10})
    assert line.startswith("rank 0: ... ")
    assert line.endswith(" ...")
    assert f">{plan.programs[0][10]}<" in line
    first, last = around_positions(plan, {0: 0}), around_positions(plan, {0: len(plan.programs[0]) - 1})
    assert first.startswith(f"rank 0: >{plan.programs[0][0]}<")
    assert last.endswith("<")
    assert instruction_at(plan, 0, 10_000) is None


def test_heartbeats_are_slower_with_many_ranks_and_faster_with_short_timeouts() -> None:
    small, crowd, short = Pace.of(600.0, 8), Pace.of(600.0, 5000), Pace.of(1.0, 8)
    assert small.poll <= 0.25
    assert crowd.poll > small.poll
    assert short.beat < 0.2
