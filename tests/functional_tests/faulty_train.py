"""``scripts/train.py`` with two faults: torchrun -m tests.functional_tests.faulty_train RANK READ VALIDATED FLAGS.

Both are on rank RANK. The process is killed when it reads its READth training microbatch, counted from 1. After
torchrun has started the ranks again, reading the VALIDATEDth validation microbatch raises OSError.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    gc.disable()  # while torch is imported, as in train.py

from examples.gpt.data import SampleOrder
from examples.gpt.optimizer import NamedAdamW
from examples.gpt.process import end_process
from examples.gpt.program import VALIDATION_SEED, main


class Fault:
    """Happens at the ``left``th call: the signal ``number`` to this process, or an OSError if ``number`` is None."""

    def __init__(self, left: int, number: signal.Signals | None = None) -> None:
        self.left, self.number = left, number

    def call(self) -> None:
        """Count one call of the function that has the fault."""
        self.left -= 1
        if self.left == 0:
            if self.number is None:
                raise OSError(5, "the disk has gone away")
            os.kill(os.getpid(), self.number)


def put_into_data(fault: Fault, validation: bool) -> None:
    """Put ``fault`` into the reading of training microbatches, or of validation microbatches if ``validation``."""
    read: Callable[..., Any] = SampleOrder.microbatch

    def microbatch(self: SampleOrder, *args: Any) -> Any:
        if (self.seed == VALIDATION_SEED) == validation:
            fault.call()
        return read(self, *args)

    SampleOrder.microbatch = microbatch  # type: ignore[method-assign]


def put_into_optimizer(fault: Fault) -> None:
    """Put ``fault`` into the optimizer's steps, which are between the steps of the pipeline."""
    step: Callable[..., Any] = NamedAdamW.step

    def stepping(self: NamedAdamW, *args: Any) -> None:
        fault.call()
        step(self, *args)

    NamedAdamW.step = stepping  # type: ignore[method-assign]


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    faulty, read, validated, *flags = sys.argv[1:]
    if os.environ["RANK"] == faulty:
        again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        put_into_data(Fault(int(validated)) if again else Fault(int(read), signal.SIGKILL), validation=again)
    end_process(main(flags))
