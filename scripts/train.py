#!/usr/bin/env python3
"""Train a byte-level GPT through a pipeline: torchrun --nproc-per-node 2 scripts/train.py --help

The program is examples/gpt. On Linux, under scripts/launch.py, this process ends when its launcher ends.
"""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Make the system kill this process when its launcher ends. Kill it now if the launcher has already ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get("MEGATRON_PP_LAUNCHER", "")
    if launcher.isdecimal() and not os.path.exists(f"/proc/{launcher}") and os.path.exists("/proc/self"):
        print(f"train.py: process {launcher}, its launcher, has ended", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    # Until the training loop handles Ctrl-C, it ends this process at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher()
    # This script's checkout comes before an installed package.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    gc.disable()  # while torch is imported, the collector takes a seventh of the time and finds no garbage
    try:
        from examples.gpt.process import end_process
        from examples.gpt.program import main
    except ModuleNotFoundError as error:
        if error.name != "tyro":
            raise
        sys.exit(f"train.py: {error}; install the project's extra: pip install -e '.[train]'")
    gc.freeze()  # later collections skip the imported objects
    gc.enable()
    end_process(main(sys.argv[1:]))
