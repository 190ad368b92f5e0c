"""When a step is given up, and what is said: the rules, one by one, on invented observations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from megatron_pp.faults.consistency import RECEIVES, SENDS, arrived, find_mismatch
from megatron_pp.faults.diagnosis import (
    around_positions,
    busy_ranks,
    doing,
    instruction_at,
    stall_text,
    waits_on,
    working_ranks,
)
from megatron_pp.faults.heartbeat import Pace
from megatron_pp.faults.liveness import ALIVE, DEAD, STOPPED, UNKNOWN, state_of, this_process
from megatron_pp.faults.records import DONE, ENTERING, IN_STEP, Entry, Process, Progress
from megatron_pp.faults.stall_detector import OwnState, Peers, Stall, find_stall
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from tests.harness.plan_text import placed

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


def _all_alive(process: Process) -> str:
    return ALIVE


def _gone(*ranks: int) -> object:
    return lambda process: DEAD if process.pid - 100 in ranks else ALIVE


def _own(idle: float = 0.0, waits_on: tuple[int, ...] = (), failed: bool = False, size: int = 3) -> OwnState:
    return OwnState(0, size, 5, idle, waits_on, failed)


def _find(peers: Peers, own: OwnState, now: float, state: object = _all_alive) -> Stall | None:
    return find_stall(peers, own, TIMEOUT, now, state)  # type: ignore[arg-type]


# -- nothing is wrong ---


def test_a_rank_that_moves_has_nothing_to_report() -> None:
    assert _find(Peers(), _own(), 1000.0) is None


def test_a_slow_rank_that_lives_and_moves_is_no_error() -> None:
    """This rank has waited for an hour; rank 1 moved 50 seconds ago, rank 2 did not for an hour."""
    reads = [(float(t), {1: _progress(1, idle=50.0, beat=t), 2: _progress(2, idle=3600.0, beat=t)}) for t in range(70)]
    assert _find(_peers(*reads), _own(idle=3600.0, waits_on=(1,)), 69.0) is None


def test_a_rank_that_has_finished_and_ended_is_not_missed() -> None:
    peers = _peers((0.0, {1: _progress(1, state=DONE), 2: _progress(2)}))
    assert _find(peers, _own(idle=10.0, waits_on=(1,)), 1.0, _gone(1)) is None


def test_a_rank_that_nobody_waits_for_may_end_before_it_says_that_it_finished() -> None:
    peers = _peers((0.0, {1: _progress(1), 2: _progress(2)}))
    assert _find(peers, _own(idle=10.0, waits_on=(2,)), 1.0, _gone(1)) is None


def test_a_hiccup_of_the_store_is_no_error_while_this_rank_moves() -> None:
    peers = Peers(broken_since=0.0, broken="reset")
    assert _find(peers, _own(idle=1.0), 100.0) is None


# -- dead, silent, stuck, cut off ---


def test_a_dead_process_that_is_waited_for_is_found_at_once() -> None:
    peers = _peers((0.0, {1: _progress(1), 2: _progress(2)}))
    found = _find(peers, _own(idle=1.5, waits_on=(1,)), 0.1, _gone(1))
    assert found is not None
    assert found.suspects == (1,)
    assert "the process of rank 1 (pid 101) is gone" in found.why


def test_after_a_failed_transfer_any_dead_process_counts() -> None:
    peers = _peers((0.0, {1: _progress(1), 2: _progress(2)}))
    found = _find(peers, _own(failed="a transfer failed"), 0.1, _gone(2))
    assert found is not None
    assert found.suspects == (2,)


def test_silence_for_the_timeout_is_an_error() -> None:
    reads = [(float(t), {1: _progress(1, beat=1), 2: _progress(2, beat=t)}) for t in range(0, 61, 10)]
    peers = _peers(*reads)
    assert _find(peers, _own(idle=60.0, waits_on=(1,)), 59.0) is None
    found = _find(peers, _own(idle=61.0, waits_on=(1,)), 61.0, lambda process: STOPPED)
    assert found is not None
    assert found.suspects == (1,)
    assert "pid 101 is stopped, as by SIGSTOP" in found.why


def test_a_reader_that_was_itself_stopped_does_not_blame_the_others() -> None:
    """After an hour's stop the clock says that nothing came for an hour; but nothing was asked, either."""
    peers = _peers((0.0, {1: _progress(1), 2: _progress(2)}))
    assert _find(peers, _own(idle=3600.0, waits_on=(1,)), 3600.0) is None
    peers.note_progress({1: _progress(1, beat=9), 2: _progress(2, beat=9)}, 3600.1)
    assert _find(peers, _own(idle=3600.0, waits_on=(1,)), 3600.2) is None


def test_nobody_moving_for_the_timeout_is_an_error() -> None:
    reads = [(float(t), {r: _progress(r, idle=t, beat=t) for r in (1, 2)}) for t in range(0, 62, 5)]
    peers = _peers(*reads)
    assert _find(peers, _own(idle=59.0), 60.0) is None
    found = _find(peers, _own(idle=61.0), 61.0)
    assert found is not None
    assert "no rank has made progress for 61 s" in found.why


def test_a_rank_that_computes_has_more_time() -> None:
    reads = [(float(t), {r: _progress(r, idle=t, beat=t) for r in (1, 2)}) for t in range(0, 122, 5)]
    peers = _peers(*reads)
    own = OwnState(0, 3, 5, 119.0, (1,), working=(2,))
    assert find_stall(peers, own, TIMEOUT, 119.0, _all_alive, 120.0) is None
    assert find_stall(peers, replace(own, working=()), TIMEOUT, 119.0, _all_alive, 120.0) is not None
    found = find_stall(peers, replace(own, idle=121.0), TIMEOUT, 121.0, _all_alive, 120.0)
    assert found is not None
    assert "no rank has made progress for 121 s" in found.why


def test_who_works_and_who_waits() -> None:
    plan = build_plan(PlanSpec("1f1b", 2, 1, 4))
    place = {str(at): k for k, at in enumerate(plan.programs[1])}

    def at(text: str, state: str = IN_STEP) -> dict[int, Progress]:
        return {1: Progress(1, state, place.get(text, 0), text)}

    assert working_ranks(plan, at("F0.2")) == (1,)
    assert working_ranks(plan, at("WAIT_F0.2")) == ()
    assert working_ranks(plan, at("the optimizer step")) == (1,)
    assert working_ranks(None, at("the optimizer step")) == (1,)
    assert working_ranks(plan, at("F0.2", ENTERING)) == ()


def test_who_never_entered_is_named() -> None:
    reads = [(float(t), {1: _progress(1, idle=t, beat=t)}) for t in range(0, 62, 5)]
    found = _find(_peers(*reads), _own(idle=61.0), 61.0)
    assert found is not None
    assert found.suspects == (2,)
    assert "rank 2 has not entered step 5 (rank 2 has reported no step at all" in found.why
    assert "every rank calls install()" in found.why


def test_who_is_still_in_an_earlier_step_is_named() -> None:
    done = _progress(2, step=4, state=DONE)
    reads = [(float(t), {1: _progress(1, idle=t, beat=t), 2: done}) for t in range(0, 62, 5)]
    found = _find(_peers(*reads), _own(idle=61.0), 61.0)
    assert found is not None
    assert found.suspects == (2,)


def test_a_store_that_is_gone_is_an_error_for_who_waits() -> None:
    peers = Peers(broken_since=10.0, broken="DistNetworkError: reset")
    assert _find(peers, _own(idle=10.0), 12.0) is None
    found = _find(peers, _own(idle=10.0), 14.0)
    assert found is not None
    assert "DistNetworkError: reset" in found.why


def test_a_store_that_does_not_answer_is_an_error_after_the_timeout() -> None:
    peers = Peers(asked_at=10.0)
    assert _find(peers, _own(idle=60.0), 69.0) is None
    found = _find(peers, _own(idle=61.0), 71.0)
    assert found is not None
    assert "the network" in found.why


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


# -- entry ---


def _entry(step: int = 1, **description: str) -> Entry:
    return Entry(step, description)


def test_equal_descriptions_agree() -> None:
    entries = {r: _entry(schedule="1f1b", **{"num_microbatches (M)": "8"}) for r in range(3)}
    assert find_mismatch(0, entries, {}, 1) is None
    assert arrived(entries, 1) == {0, 1, 2}


@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_difference_names_the_field_and_both_values(own: int) -> None:
    entries = {r: _entry(policy="overlap", shape="8" if r == 2 else "4") for r in range(3)}
    found = find_mismatch(own, entries, {}, 1)
    assert found is not None
    assert found.field == "shape"
    assert found.values[2] == "8"
    assert set(found.values.values()) == {"4", "8"}
    assert "do not agree on shape" in str(found)
    assert "rank 2 has 8" in str(found)


def test_a_field_that_one_rank_lacks_is_a_difference() -> None:
    found = find_mismatch(0, {0: _entry(a="1"), 1: _entry(a="1", b="2")}, {}, 1)
    assert found is not None
    assert found.values == {0: "nothing", 1: "2"}


def test_shapes_are_compared_along_the_pipeline() -> None:
    """What a rank sends need not be what it receives, but what the next one receives."""
    fits = {0: _entry(**{SENDS: "a", RECEIVES: "x"}), 1: _entry(**{SENDS: "b", RECEIVES: "a"})}
    assert find_mismatch(0, fits, {}, 1) is None
    broken = {0: _entry(**{SENDS: "a", RECEIVES: "x"}), 1: _entry(**{SENDS: "b", RECEIVES: "c"})}
    for own in (0, 1):
        found = find_mismatch(own, broken, {}, 1)
        assert found is not None
        assert found.values == {0: "a", 1: "c"}


def test_a_rank_that_goes_on_with_its_old_plan_differs() -> None:
    """Rank 0 enters step 5 with a new plan; rank 1 is in step 5 with the one of step 1."""
    entries = {0: _entry(5, m="8"), 1: _entry(1, m="4")}
    assert find_mismatch(0, entries, {1: _progress(1, step=4)}, 5) is None  # may yet change
    assert find_mismatch(0, entries, {1: _progress(1, step=5, state=ENTERING)}, 5) is None
    found = find_mismatch(0, entries, {1: _progress(1, step=5)}, 5)
    assert found is not None
    assert found.values == {0: "8", 1: "4"}


# -- in words ---


def placed_one(placement: Placement, rank: int, text: str) -> Instruction:
    return placed(placement, rank, text)[0]


def test_whom_an_instruction_waits_for() -> None:
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


def test_what_a_rank_does() -> None:
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
    assert busy_ranks(plan, {1: busy, 2: waiting}) == (1,)


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


def test_the_pace_is_slower_for_crowds_and_quicker_for_short_timeouts() -> None:
    small, crowd, short = Pace.of(600.0, 8), Pace.of(600.0, 5000), Pace.of(1.0, 8)
    assert small.poll <= 0.25
    assert crowd.poll > small.poll
    assert short.beat < 0.2
