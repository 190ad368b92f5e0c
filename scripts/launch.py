#!/usr/bin/env python3
"""``torchrun`` with the same arguments. At the end it prints in one line how the run ended. Its exit codes:

    0            every rank has done all its steps
    128 + signal a signal (Ctrl-C, SIGTERM) to this launcher or to a rank: the ranks have finished their step and saved
    2            bad input: flags, data, a folder, a checkpoint of another layout
    3            the run or checkpoint to resume is damaged or of another version
    4            a checkpoint could not be written
    5            another run is working in the run's folder
    1            any other failure

For 2, 3, 4 and 5 a rank has printed the reason. For 1 the last line says which rank failed, at which instruction, and
why. On Linux the ranks end when this launcher ends, for whatever reason.

With ``--max-restarts`` the ranks start again after every code except 0 and except a signal to the launcher. They then
continue their run. The ranks' own exit codes are the same; examples/gpt/program.py has them.
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

gc.disable()  # while torch is imported, the collector takes a seventh of the time and finds no garbage

from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure  # noqa: E402
from torch.distributed.run import main, parse_args  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_pp.comm.bound_stores import bind_stores  # noqa: E402

gc.freeze()
gc.enable()

PASSED_ON = (2, 3, 4, 5, 128 + signal.SIGINT, 128 + signal.SIGTERM)

# Seconds that the first of several nodes stays after a failure. It holds the store from which ranks of other nodes
# read the failure.
FAREWELL = 8.0

# If the store is gone, c10d's client logs a page of stack frames for each call. The ranks report it in one sentence.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# The ranks end with this process: see scripts/train.py.
os.environ["MEGATRON_PP_LAUNCHER"] = str(os.getpid())

# Seconds that the ranks may take to end before they are killed. Older releases of torch ignore it and wait for 30 s.
os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")


def summary(rank: int, failure: ProcessFailure, logs: Path) -> str:
    """Why the run failed, in one line. It is the report of the last start: of a rank about another, or else about
    itself."""
    found = []
    for path in logs.glob("*/attempt_*/*/error.json"):
        with suppress(ValueError):  # cut short by a signal
            said = json.loads(path.read_text())["message"]["message"].partition("\n")[0]
            of_peer = said.startswith("PipelinePeerError: ")
            start = path.parts[-3]
            local_rank = int(path.parts[-2])
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
    """Run ``torchrun`` and return the exit code. The ranks' error files are in ``logs``."""
    bind_stores()  # torch's stores would listen on all interfaces
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
    """End without the interpreter's finalisation. After a signal torchrun leaves a thread that keeps its rendezvous
    alive. If that thread is inside a call of torch's store, finalisation would abort the process ("terminate called").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # These loggers repeat what the ranks and the last line already say.
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="megatron_pp_"))
    try:
        code = run(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    end_process(code)
