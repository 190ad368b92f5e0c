"""``megatron-pp parity`` for tests, each command in a process that is forked from one that has imported Megatron-core.

    done = run_parity(["--json", script, "--num-layers", "8"], folder, {**os.environ, "PYTHONPATH": path})

Importing torch and Megatron-core takes longer than most comparisons. The process starts with the first command and ends
with this one; its children are what an interpreter that runs ``python -W ignore -m megatron_pp parity`` is once it has
imported what every script needs. This module is also the program of that process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_pp.tools.parity.process_tree import end_with_parent, leave

ROOT = Path(__file__).resolve().parents[2]


def run_parity(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], deadline: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``megatron-pp parity`` with the arguments ``words`` in ``folder``. Raises subprocess.TimeoutExpired after
    ``deadline`` seconds, when the command has been killed."""
    command = ["megatron-pp", "parity", *words]
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="megatron_pp_command_") as scratch:
        outputs = [str(Path(scratch, name)) for name in ("stdout", "stderr")]
        request = {"words": command, "folder": str(folder), "environment": dict(environment), "outputs": outputs}
        server.stdin.write(json.dumps(request).encode() + b"\n")
        ready, _, _ = select.select([server.stdout], [], [], deadline)
        line = server.stdout.readline() if ready else b""
        if not line:
            end_server()
            raise subprocess.TimeoutExpired(command, deadline)
        printed, complained = (Path(output).read_text() for output in outputs)
    return subprocess.CompletedProcess(command, int(line), printed, complained)


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "testkit.megatron.parity_commands"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # so that select() sees every line that has not been read
        env=environment,
        start_new_session=True,
    )
    atexit.register(_kill, server)
    return server


def end_server() -> None:
    """End the process; the next command starts another one."""
    _kill(_server())
    _server.cache_clear()


def _kill(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # with which the command's processes end
    server.wait()


def serve() -> None:
    """The body of the process: for each line of the input one command, and its exit code on a line of the output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    _import_what_comparisons_need()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            answers.close()
            _be_the_command(**request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _import_what_comparisons_need() -> None:
    """As a comparison does, for a script that imports nothing itself. With GPUs what is imported, and how, depends on
    the layout, and each command does it."""
    import torch

    from megatron_pp.tools.parity.runs import Program, prepare

    if torch.cuda.is_available():
        return
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "nothing.py")
        script.touch()
        path = [*sys.path]
        prepare(Program(str(script), module=False, steps=1, deadline=1.0, gpu=False, load=None))
        sys.path[:] = path
    gc.freeze()


def _be_the_command(words: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> NoReturn:
    """The body of a command's process, from here on as an interpreter's that has just started."""
    from megatron_pp.tools.cli.command_line import main

    code: Any = 1
    try:
        os.setsid()
        end_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, output in enumerate(outputs, 1):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0] = folder
        sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.argv = [*words]
        code = main(words[1:])
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    leave(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve()
