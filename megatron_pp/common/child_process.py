"""A process that answers questions, each a line of JSON. Long computations in a thread would delay this process."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_pp.common.finalizers import finalize_here

_POLL = 0.05  # seconds between two calls of ``check``
_PIECE = 1 << 16  # bytes


class Child:
    """Runs ``main`` of ``module``, which calls ``answer_questions``. The process ends with this object. It imports the
    standard library, installed packages and this one, and nothing from the current folder or PYTHONPATH."""

    def __init__(self, module: str) -> None:
        root = str(Path(__file__).resolve().parents[2])
        program = f"import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
        command = [sys.executable, "-I", "-c", program]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
        self._unsent = self._received = b""
        self.end = finalize_here(self, _end, self.process)

    @property
    def _pipes(self) -> tuple[int, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin.fileno(), self.process.stdout.fileno()

    def ask(self, question: Any) -> None:
        """Send a question. Never blocks: ``answer`` sends what the pipe does not take now."""
        self._unsent += json.dumps(question).encode() + b"\n"
        self._send()

    def answer(self, seconds: float | None = None, check: Callable[[], None] = lambda: None) -> Any:
        """Wait for the answer, for at most ``seconds``. ``check`` is called in between and may raise. Raises
        ChildProcessError if the process has ended, TimeoutError, and RuntimeError if the answer is an error."""
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._received:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"(pid {self.process.pid}) has not answered for {seconds:g} s")
            check()
            self._exchange()
        line, _, self._received = self._received.partition(b"\n")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["answer"]

    def _exchange(self) -> None:
        """Read and write as much as the pipes allow, and return soon."""
        into, out = self._pipes
        readable, writable, _ = select.select([out], [into] if self._unsent else [], [], _POLL)
        if writable:
            self._send()
        if readable:
            piece = os.read(out, _PIECE)
            if not piece:
                raise ChildProcessError(f"ended with code {self.process.wait()}")
            self._received += piece

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._pipes[0], self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which ``answer`` reports
            self._unsent = b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()


def answer_questions(answer: Callable[[Any], Any], niceness: int) -> None:
    """In the child: answer until the standard input ends."""
    if hasattr(os, "nice"):
        os.nice(niceness)
    for line in sys.stdin:
        try:
            text = json.dumps({"answer": answer(json.loads(line))})
        except Exception as error:  # ``Child.answer`` raises it
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except OSError:  # the program has ended, so nothing reads the answer
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer
            return
