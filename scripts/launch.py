#!/usr/bin/env python3
"""``torchrun``, except that Ctrl-C ends it without a traceback: same arguments and exit codes, 128 + signal after one.

``torchrun`` hands the signal to the ranks and waits for them; they finish their step and save.
"""

import os
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main

# How long they may take, in seconds, before they are killed. Older releases of torch do not read it and wait for 30.
os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")

if __name__ == "__main__":
    try:
        main()
    except SignalException as stop:
        sys.exit(128 + int(stop.sigval))
