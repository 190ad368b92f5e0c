"""A process that answers questions, a line of JSON each: long computations in a thread would hold up this process."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class Child:
    """Runs ``main`` of ``module``, which calls ``answer_questions``. The process ends with this object."""

    def __init__(self, module: str) -> None:
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.end = weakref.finalize(self, _end, self.process)

    def ask(self, question: Any) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended, which ``answer`` reports
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for it. Raises ChildProcessError where the process has ended, RuntimeError where it has failed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"ended with code {self.process.wait()}")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["answer"]


def _end(process: subprocess.Popen[str]) -> None:
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
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
