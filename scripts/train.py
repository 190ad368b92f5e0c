#!/usr/bin/env python3
"""Train a byte-level GPT through a pipeline: torchrun --nproc-per-node 2 scripts/train.py --help"""

import signal
import sys
from pathlib import Path

# A launcher may have its children ignore Ctrl-C; until the training loop answers it, it ends this process at once.
signal.signal(signal.SIGINT, signal.SIG_DFL)

# The checkout that this script lies in comes first, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_pp.training.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
