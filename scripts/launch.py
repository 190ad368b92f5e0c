#!/usr/bin/env python3
"""``torchrun`` with the same arguments, that prints in one line how a run ended, with its exit code.

    0            every rank has done all its steps
    128 + signal a signal (Ctrl-C, SIGTERM) to this launcher or to a rank: the ranks have finished their step and saved
    2            bad input: flags, data, a folder, a checkpoint of another layout
    3            the run or checkpoint to resume is damaged or of another version
    4            a checkpoint could not be written
    5            another run is working in the run's folder
    1            any other failure

A rank has printed the reason of 2, 3, 4 or 5. When this launcher ends, however it ends, its ranks end too (Linux).

With ``--max-restarts`` all but 0 and a signal to the launcher start the ranks again, which then continue their run.
See examples/gpt/program.py for the ranks' own exit codes, which are the same.
"""

import os
import signal
import sys
import time

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main, parse_args

PASSED_ON = (2, 3, 4, 5, 128 + signal.SIGINT, 128 + signal.SIGTERM)

# Seconds that the first of several nodes stays after a failure: it holds the store, in which the ranks of the others
# read what has failed.
FAREWELL = 8.0

# c10d's client of a store that is gone writes a page of stack for each call; the ranks say it in a sentence.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# The ranks end with this process: see scripts/train.py.
os.environ["MEGATRON_PP_LAUNCHER"] = str(os.getpid())

# How long they may take, in seconds, before they are killed. Older releases of torch do not read it and wait for 30.
os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")


def ending_of(rank: int, failure: ProcessFailure) -> str:
    """How the rank that failed first ended."""
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"launch.py: rank {rank} (pid {failure.pid}) was the first to fail: it {how}"


def others_read_here() -> bool:
    """Whether this is the first of several nodes."""
    arguments = parse_args(sys.argv[1:])
    return arguments.nnodes.rpartition(":")[2] != "1" and arguments.node_rank == 0


if __name__ == "__main__":
    try:
        main()
    except SignalException as stop:
        sys.exit(128 + int(stop.sigval))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode not in PASSED_ON:
            print(ending_of(rank, failure), file=sys.stderr, flush=True)
            if others_read_here():
                time.sleep(FAREWELL)
        sys.exit(failure.exitcode if failure.exitcode in PASSED_ON else 1)
