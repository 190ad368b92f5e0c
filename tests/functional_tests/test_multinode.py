"""A pipeline across two "hosts", started by scripts/launch_multinode.sh on each; their cable is unplugged, too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from testkit.faults.namespaces import Cable, Host, two_hosts, why_not
from testkit.training_ranks import train
from tests.functional_tests.test_train_script import INTERLEAVED, SHORT, numbers

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 180.0

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Node:
    """The launcher of one host, and its output."""

    def __init__(self, host: Host, rank: int, master: Host, folder: Path, flags: list[str]) -> None:
        # The script must find the interface itself.
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
        environment |= {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": master.address, "NPROC_PER_NODE": "1"}
        environment |= {"MEGATRON_PP_PYTHON": sys.executable, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}
        self.log = folder / f"node{rank}.log"
        with open(self.log, "w") as log:
            command = host.command("bash", str(ROOT / "scripts" / "launch_multinode.sh"), *flags)
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str, seconds: float = DEADLINE) -> float:
        """Wait until the output has ``words``; return the seconds. Fail after ``seconds``, or if the launcher ends."""
        start = time.monotonic()
        while words not in self.said:
            ended = self.process.poll() is not None
            assert words in self.said or not ended, self.said
            assert time.monotonic() - start < seconds, f"no {words!r} in {seconds} s:\n{self.said}"
            time.sleep(0.02)
        return time.monotonic() - start


@contextmanager
def training(folder: Path, *flags: str) -> Iterator[tuple[Node, Node, Cable]]:
    """Run a training on two hosts until the context ends."""
    with ExitStack() as stack:
        left, right, cable = stack.enter_context(two_hosts())  # which kills the processes that are left
        arguments = [*SHORT, *INTERLEAVED, "--eval-interval", "0", "--save-interval", "0"]
        arguments += ["--run-dir", str(folder / "run"), *flags]
        nodes = [Node(host, rank, left, folder, arguments) for rank, host in enumerate((left, right))]
        yield nodes[0], nodes[1], cable
    for node in nodes:
        node.process.wait(DEADLINE)


def test_two_hosts_train_as_one_also_when_the_cable_is_out_for_a_while(tmp_path: Path) -> None:
    """The cable is out for 2 s. TCP sends again after 0.2, 0.4, 0.8, 1.6 and 3.2 s: the run goes on seconds later."""
    with training(tmp_path, "--train-steps", "40", "--p2p-timeout", "60") as (left, right, cable):
        left.wait_for("step 3/40")
        cable.cut()
        time.sleep(2.0)
        assert left.process.poll() is None, left.said
        last = left.said.splitlines()[-1]
        assert "step 40/40" not in left.said
        time.sleep(0.3)
        assert left.said.splitlines()[-1] == last  # neither host trains
        cable.restore()
        codes = [node.process.wait(DEADLINE) for node in (left, right)]
        assert codes == [0, 0], left.said + right.said
    train(1, tmp_path, [*SHORT, "--eval-interval", "0", "--train-steps", "40", "--run-dir", "alone"])
    assert numbers(tmp_path / "run") == numbers(tmp_path / "alone")
    assert len(numbers(tmp_path / "run")) == 42


def test_a_cable_that_stays_out_is_an_error_on_both_hosts(tmp_path: Path) -> None:
    """Host 0 has the store, so host 1 cannot read the cause there; it raises all the same."""
    timeout = 4.0
    with training(tmp_path, "--train-steps", "100000", "--p2p-timeout", str(timeout)) as (left, right, cable):
        left.wait_for("step 3/")
        cable.cut()
        for rank, node in enumerate((left, right)):
            # A hang would last TCP's quarter of an hour. On an idle machine this takes p2p_timeout and up to 4 s.
            node.wait_for("train.py: PipelineStallError: pipeline stalled: ")
            assert node.process.wait(DEADLINE) == 1, node.said
            # The line of the rank itself, with the instruction, or with its work between two steps.
            here = node.said.partition(f"\n  rank {rank}: step ")[2].partition("\n")[0]
            places = ("instruction ", "the work after the plan", "the norm of", "agreeing on")
            assert any(words in here for words in places), node.said
        # Both hosts are this machine, so that rank 0 may see first that the process of rank 1 has ended. If the cable
        # is cut between two steps of rank 1, rank 0 waits for it in the next one.
        found = ("no heartbeat from rank 1", "the process of rank 1 ", "rank 1 has not entered step")
        assert any(words in left.said for words in found), left.said
        assert "the store has not answered" in right.said, right.said
        assert "Traceback" not in left.said + right.said
