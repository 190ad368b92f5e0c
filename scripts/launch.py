#!/usr/bin/env python3
"""``torchrun`` with the same arguments, that ends without a traceback where there is nothing to trace.

After Ctrl-C, which ``torchrun`` hands to the ranks (they finish their step and save), it exits with 128 + signal. Where
a rank has said in a line what is wrong with its input (exit code 2, see megatron_pp/training/program.py), with 2.
"""

import os
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

BAD_INPUT = 2

# How long they may take, in seconds, before they are killed. Older releases of torch do not read it and wait for 30.
os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")

if __name__ == "__main__":
    try:
        main()
    except SignalException as stop:
        sys.exit(128 + int(stop.sigval))
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        if first.exitcode != BAD_INPUT:
            raise
        sys.exit(BAD_INPUT)
