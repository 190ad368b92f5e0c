#!/usr/bin/env python3
"""Train a byte-level GPT through a pipeline: torchrun --nproc-per-node 2 scripts/train.py --help"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Until the training loop answers it, Ctrl-C ends this process at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The checkout of this script comes first, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from examples.gpt.program import end_process, main

    end_process(main(sys.argv[1:]))
