"""Runs ``megatron-pp parity`` for tests. Each command runs in a process forked from one that has imported
Megatron-core.

    done = run_parity(["--json", script, "--num-layers", "8"], folder, {**os.environ, "PYTHONPATH": path})

Importing torch and Megatron-core takes longer than most comparisons. The server process starts with the first command,
and ends with this process. Its children are in the state of ``python -W ignore -m megatron_pp parity`` after the
imports that every script needs. This module is also the program of the server process.
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

from megatron_pp.tools.parity.workers.process_tree import end_with_parent, leave

ROOT = Path(__file__).resolve().parents[2]


def run_parity(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], deadline: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``megatron-pp parity`` with the arguments ``words`` in ``folder``. Raises subprocess.TimeoutExpired after
    ``deadline`` seconds, after the command was killed."""
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
        bufsize=0,  # unbuffered, so that select() sees every unread line
        env=environment,
        start_new_session=True,
    )
    atexit.register(_kill, server)
    return server


def end_server() -> None:
    """End the server process. The next command starts another one."""
    _kill(_server())
    _server.cache_clear()


def _kill(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # the command's processes end with it
    server.wait()


def serve() -> None:
    """The body of the server process. It runs a command for each line of its input, and writes the exit code as a
    line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of libraries are not answers
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
    """Import the modules that a comparison needs for a script without imports. With GPUs the imports depend on the
    layout, so each command does them."""
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
    """The body of a command's process, which is then in the state of an interpreter that has just started."""
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
