#!/usr/bin/env python3
"""``torchrun`` with the same arguments, that prints in one line how a run ended, with its exit code.

    0            every rank has done all its steps
    128 + signal a signal (Ctrl-C, SIGTERM) to this launcher or to a rank: the ranks have finished their step and saved
    2            bad input: flags, data, a folder, a checkpoint of another layout
    3            the run or checkpoint to resume is damaged or of another version
    4            a checkpoint could not be written
    5            another run is working in the run's folder
    1            any other failure

A rank has printed the reason of 2, 3, 4 or 5; after 1 the last line says which rank failed, at which instruction, and
why. When this launcher ends, however it ends, its ranks end too (Linux).

With ``--max-restarts`` all but 0 and a signal to the launcher start the ranks again, which then continue their run.
See examples/gpt/program.py for the ranks' own exit codes, which are the same.
"""

import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

gc.disable()  # a seventh of the time to import torch goes into finding no garbage

from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure  # noqa: E402
from torch.distributed.run import main, parse_args  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_pp.comm.bound_stores import bind_stores  # noqa: E402

gc.freeze()
gc.enable()

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


def summary(rank: int, failure: ProcessFailure, logs: Path) -> str:
    """Why the run has failed, in one line: what a rank has reported of another, else of itself, in the last start."""
    found = []
    for path in logs.glob("*/attempt_*/*/error.json"):
        with suppress(ValueError):  # cut short by a signal
            said = json.loads(path.read_text())["message"]["message"].partition("\n")[0]
            of_peer, start, local_rank = said.startswith("PipelinePeerError: "), path.parts[-3], int(path.parts[-2])
            line = said.partition(": ")[2] if of_peer else f"rank {rank - failure.local_rank + local_rank}: {said}"
            found.append((-int(start.removeprefix("attempt_")), not of_peer, local_rank, line))
    reasons = [line for *_, line in sorted(found)[:1]]
    code = failure.exitcode
    if code < 0:
        reasons.insert(0, f"rank {rank} (pid {failure.pid}) was killed by {signal.Signals(-code).name}")
    return f"launch.py: failed: {'; '.join(reasons) or f'rank {rank} (pid {failure.pid}) ended with exit code {code}'}"


def others_read_here() -> bool:
    """Whether this is the first of several nodes."""
    arguments = parse_args(sys.argv[1:])
    return arguments.nnodes.rpartition(":")[2] != "1" and arguments.node_rank == 0


def run(logs: Path) -> int:
    """Run ``torchrun``; the exit code. The ranks' errors are left in ``logs``."""
    bind_stores()  # torch's listen on all interfaces, for anyone
    here = ["--local-addr", "127.0.0.1"] if "--standalone" in sys.argv else []
    try:
        main(["--log-dir", str(logs), *here, *sys.argv[1:]])
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except KeyboardInterrupt:  # before the ranks were started
        return 128 + signal.SIGINT
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in PASSED_ON:
            return failure.exitcode
        print(summary(rank, failure, logs), file=sys.stderr, flush=True)
        if others_read_here():
            time.sleep(FAREWELL)
        return 1
    return 0


def end_process(code: int) -> NoReturn:
    """End without the interpreter's finalisation: after a signal torchrun leaves the thread that keeps its rendezvous
    alive, and a thread that is inside a call of torch's store then would abort the process ("terminate called")."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # What they log of a rank that has ended, the ranks and the last line say.
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="megatron_pp_"))
    try:
        code = run(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    end_process(code)
