"""``scripts/train.py`` with one fault: torchrun ... faulty_train.py WHAT RANK NUMBER FOLDER <flags of train.py>.

The fault is put into WHAT, of rank RANK, at its NUMBERth call (from 1), and only once for a FOLDER, in which it leaves
its mark:

    data             reading a training microbatch raises OSError
    data-killed      the process is killed there
    data-stopped     the process is stopped there, as by SIGSTOP
    validation       reading a validation microbatch raises OSError
    optimizer        the optimizer's step raises OSError
    optimizer-signalled   the process gets SIGTERM there
    save-killed      the process is killed at that file operation in the run's checkpoints
    save             an OSError there
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.gpt.checkpoint import CheckpointWriter
from examples.gpt.data import SampleOrder
from examples.gpt.optimizer import NamedAdamW
from examples.gpt.process import end_process
from examples.gpt.program import VALIDATION_SEED, main

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Fault:
    """Counts calls, and strikes once."""

    def __init__(self, what: str, number: int, folder: Path) -> None:
        self.kind = what.rpartition("-")[2]
        self.mark = folder / "struck"
        self.left = number

    def call(self) -> None:
        """One call of what the fault is in."""
        self.left -= 1
        if self.left == 0 and not self.mark.exists():
            self.mark.touch()
            self.strike()

    def strike(self) -> None:
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "signalled":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise OSError(5, "the disk has gone away")


def put_into_data(fault: Fault, validation: bool) -> None:
    """Into the microbatches to learn from, or to validate on."""
    read: Callable[..., Any] = SampleOrder.microbatch

    def microbatch(self: SampleOrder, *args: Any) -> Any:
        if (self.seed == VALIDATION_SEED) == validation:
            fault.call()
        return read(self, *args)

    SampleOrder.microbatch = microbatch  # type: ignore[method-assign]


def put_into_optimizer(fault: Fault) -> None:
    """Into the optimizer's steps, between those of the pipeline."""
    step: Callable[..., Any] = NamedAdamW.step

    def stepping(self: NamedAdamW, *args: Any) -> None:
        fault.call()
        step(self, *args)

    NamedAdamW.step = stepping  # type: ignore[method-assign]


def put_into_saving(fault: Fault) -> None:
    """Into the file operations of the checkpoint writer's folder."""
    folders: list[str] = []
    save: Callable[..., Any] = CheckpointWriter.save

    def saving(self: CheckpointWriter, *args: Any) -> Any:
        folders.append(str(self.folder))
        try:
            return save(self, *args)
        finally:
            folders.clear()

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if folders and event in FILE_EVENTS and str(args[0]).startswith(folders[0]):
            fault.call()

    CheckpointWriter.save = saving  # type: ignore[method-assign]
    sys.addaudithook(on_event)


if __name__ == "__main__":
    what, rank, number, folder, *flags = sys.argv[1:]
    if os.environ["RANK"] == rank:
        fault = Fault(what, int(number), Path(folder))
        if what.startswith("save"):
            put_into_saving(fault)
        elif what.startswith("optimizer"):
            put_into_optimizer(fault)
        else:
            put_into_data(fault, what.startswith("validation"))
    end_process(main(flags))
