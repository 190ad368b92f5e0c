"""``scripts/train.py`` with one fault: torchrun ... faulty_train.py WHAT RANK NUMBER FOLDER <flags of train.py>.

The fault strikes rank RANK at its NUMBERth call (from 1) of WHAT, and only once for a FOLDER, in which it leaves its
mark:

    data-killed   reading a training microbatch: the process is killed
    validation    reading a validation microbatch: OSError
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if __name__ == "__main__":
    gc.disable()  # while torch is imported, as in train.py

from examples.gpt.data import SampleOrder
from examples.gpt.optimizer import NamedAdamW
from examples.gpt.process import end_process
from examples.gpt.program import VALIDATION_SEED, main


class Fault:
    """Counts calls, and strikes once: by ``number``, or by an OSError without one."""

    def __init__(self, call: int, folder: Path, number: signal.Signals | None = None) -> None:
        self.number = number
        self.mark = folder / "struck"
        self.left = call

    def call(self) -> None:
        """One call of what the fault is in."""
        self.left -= 1
        if self.left == 0 and not self.mark.exists():
            self.mark.touch()
            if self.number is None:
                raise OSError(5, "the disk has gone away")
            os.kill(os.getpid(), self.number)


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


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    what, rank, call, folder, *flags = sys.argv[1:]
    if os.environ["RANK"] == rank:
        number = signal.SIGKILL if what == "data-killed" else None
        put_into_data(Fault(int(call), Path(folder), number), what == "validation")
    end_process(main(flags))
