"""Work in processes of its own: its answer and errors, and that no process or file is left after any end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_pp.errors import ConfigError
from megatron_pp.tools.parity.workers.keeper import Workplace, work_apart
from megatron_pp.tools.parity.workers.process_tree import descendants
from megatron_pp.tools.parity.workers.processes import RunError
from testkit.faults.ends import as_in_the_foreground
from tests.conftest import PROJECT_ROOT

WHAT = "importing what train.py imports"


def process_of(file: Path) -> int:
    """Waits for the file, and returns the process id in it."""
    end = time.monotonic() + 30
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end, f"no {file.name}"
        time.sleep(0.01)
    return int(file.read_text())


def assert_ended(process: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} is still there")


def test_the_answer_comes_back_and_the_folder_is_removed():
    folder, process = work_apart(lambda place: (str(place.folder), os.getpid()), 30.0, WHAT)
    assert process != os.getpid()
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConfigError("not a size"), RunError, "not a size"),
        (ImportError("no rope", name="rope"), ImportError, "no rope"),
        (KeyError("layer"), RunError, "the comparison itself failed: KeyError: 'layer'"),
        (SystemExit(0), RunError, "the comparison itself failed: SystemExit: 0"),
    ],
)
def test_an_error_is_never_an_answer(error, kind, words, capfd):
    def work(place: Workplace) -> None:
        raise error

    with pytest.raises(kind, match=words) as raised:
        work_apart(work, 30.0, WHAT)
    assert getattr(raised.value, "name", None) == getattr(error, "name", None)


@pytest.mark.parametrize(
    ("prepared", "end", "words"),
    [
        (False, lambda: os._exit(0), f"{WHAT} ended with exit code 0, without an answer"),
        (True, lambda: os._exit(0), "the process that compares ended with exit code 0, without an answer"),
        (False, lambda: os.kill(os.getpid(), signal.SIGKILL), f"{WHAT} was killed by SIGKILL, without an answer"),
        (False, lambda: time.sleep(600), f"{WHAT} did not end within 1 s"),
    ],
)
def test_a_worker_that_ends_or_hangs_is_reported(prepared, end, words):
    def work(place: Workplace) -> None:
        if prepared:
            place.prepared()
        end()

    with pytest.raises(RunError, match=words):
        work_apart(work, 1.0, WHAT)


def test_after_the_preparation_there_is_no_deadline():
    def work(place: Workplace) -> str:
        place.prepared()
        time.sleep(1.5)
        return "done"

    assert work_apart(work, 1.0, WHAT) == "done"


def test_a_process_forked_by_the_script_does_not_answer():
    def work(place: Workplace) -> int:
        if not os.fork():
            raise SystemExit(0)
        os.wait()
        return 7

    assert work_apart(work, 30.0, WHAT) == 7


def test_output_below_python_does_not_enter_the_answer(capfd):
    work_apart(lambda place: os.system("echo printed"), 30.0, WHAT)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "printed\n")


def test_processes_that_are_left_end_those_of_a_dead_parent_too(tmp_path):
    def work(place: Workplace) -> None:
        child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
        with (tmp_path / "pid").open("w") as output:
            subprocess.Popen([sys.executable, "-c", child], stdout=output, start_new_session=True)
        process_of(tmp_path / "pid")
        os._exit(0)

    with pytest.raises(RunError):
        work_apart(work, 30.0, WHAT)
    assert_ended(int((tmp_path / "pid").read_text()))


PROGRAM = """
import os, sys, time
from pathlib import Path
from megatron_pp.tools.parity.workers.keeper import work_apart

def work(place):
    place.prepared()
    Path(sys.argv[1], "folder").write_text(str(place.folder))
    Path(sys.argv[1], "pid").write_text(str(os.getpid()))
    time.sleep(600)

work_apart(work, 60.0, "importing")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_and_removes_everything(tmp_path, number):
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)}
    command = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=as_in_the_foreground,
    )
    worker = process_of(tmp_path / "pid")
    below = descendants(command.pid)
    assert worker in below
    command.send_signal(number)
    assert command.wait(30) in (-number, 1)  # by the signal itself; Python ends with 1 after Ctrl-C's traceback
    for process in below:
        assert_ended(process)
    folder = Path((tmp_path / "folder").read_text())
    end = time.monotonic() + 10
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not folder.exists()


def test_the_handler_of_sigterm_is_as_before():
    before = signal.getsignal(signal.SIGTERM)
    work_apart(lambda place: None, 30.0, WHAT)
    assert signal.getsignal(signal.SIGTERM) is before
    thread = threading.Thread(target=work_apart, args=(lambda place: None, 30.0, WHAT))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
