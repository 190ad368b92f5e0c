"""Runs the code of the pages unchanged."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.run

from megatron_pp import parallel_state
from testkit.processes import run_processes

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class PageOutput(NamedTuple):
    """The prints of a rank, and its logged warnings."""

    printed: str
    warnings: str


def code_blocks(page: str, language: str = "python") -> dict[str, str]:
    """The page's blocks of ``language`` by title. A block without a title is named by its place (``block1``)."""
    found = [block.groups() for block in _BLOCK.finditer((ROOT / page).read_text())]
    blocks = [(title, code) for kind, title, code in found if kind == language]
    return {title or f"block{place}": code for place, (title, code) in enumerate(blocks, 1)}


def run_commands(commands: list[str], folder: Path, timeout: float = 300.0) -> list[str]:
    """Run the commands in ``folder``, with this tree's ``megatron-pp``. Returns their outputs. Raises AssertionError if
    one fails."""
    tools = folder.parent / f"{folder.name}_bin"
    tools.mkdir(exist_ok=True)
    command = tools / "megatron-pp"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_pp "$@"\n')
    command.chmod(0o755)
    path = [str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT)}
    printed = []
    for text in commands:
        done = subprocess.run(
            ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{text}\nends with {done.returncode}: {done.stderr[-2000:]}"
        printed.append(done.stdout)
    return printed


def run_torchrun(command: str, folder: Path, timeout: float = 240.0) -> list[PageOutput]:
    """Run ``[NAME=VALUE ...] torchrun FLAGS SCRIPT [ARGUMENTS]`` in ``folder``, or with ``-m MODULE``. Returns the
    output of each rank. torchrun's own parser reads the flags. The ranks are forked, because torchrun and each of its
    ranks would import torch first. Raises SystemExit for a wrong flag, and the errors of ``run_processes``.
    """
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words[: words.index("torchrun")])
    given = torch.distributed.run.parse_args(words[len(variables) + 1 :])
    assert given.standalone, f"{command}: ranks would look for a host"
    program = [*["-m"] * given.module, given.training_script, *given.training_script_args]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options: dict[str, Any] = {"timeout": timeout, "backend": None, "start_method": "forkserver"}
    args = str(folder), [program], [store.port]
    results = run_processes(_rank_main, int(given.nproc_per_node), args, environment=variables, **options)
    return [outputs[0] for outputs in results]


def run_page(
    files: dict[str, str], scripts: list[str], folder: Path, ranks: int, timeout: float = 240.0
) -> dict[str, list[PageOutput]]:
    """Write ``files`` (name -> code) into ``folder``, and run each of ``scripts`` on ``ranks`` processes with
    torchrun's environment variables. Returns the output of every rank, by script. Raises the errors of
    ``run_processes``.
    """
    for name, code in files.items():
        (folder / name).write_text(code)
    # As with torchrun's agent, ranks meet at a store that already exists, so no other process can take its port.
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in scripts]
    args = str(folder), [[script] for script in scripts], [store.port for store in stores]
    options = {"timeout": timeout, "backend": None, "start_method": "forkserver"}
    results = run_processes(_rank_main, ranks, args, **options)
    return {script: [of_rank[place] for of_rank in results] for place, script in enumerate(scripts)}


def _rank_main(rank: int, size: int, folder: str, programs: list[list[str]], ports: list[int]) -> list[PageOutput]:
    """Run ``programs`` on one rank. Each is a script, or ``-m`` and a module, with its arguments."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    outputs = [_run(program, port) for program, port in zip(programs, ports, strict=True)]
    atexit._run_exitfuncs()  # an interpreter does this at its end, but a process of multiprocessing does not
    return outputs


def _run(program: list[str], port: int) -> PageOutput:
    os.environ["MASTER_PORT"] = str(port)
    printed, warnings = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(warnings)
    logging.getLogger("megatron_pp").addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed):
            _be(program)
    finally:
        logging.getLogger("megatron_pp").removeHandler(handler)
        parallel_state.destroy_model_parallel()  # a program may leave it at its end
    return PageOutput(printed.getvalue(), warnings.getvalue())


def _be(program: list[str]) -> None:
    """Run ``program`` as ``python PROGRAM`` would. Raises if its exit code is not 0."""
    is_module = program[0] == "-m"
    sys.argv = program[1:] if is_module else program
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{program} exits with {ended.code}") from ended
