"""The code on the pages, run as it stands there."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron_pp import parallel_state
from tests.harness.processes import run_processes

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class PageOutput(NamedTuple):
    """What a rank printed, and what it logged as a warning."""

    printed: str
    warnings: str


def code_blocks(page: str, language: str = "python") -> dict[str, str]:
    """The page's blocks of ``language`` by their title, or by their place on the page (``block1``) without one."""
    found = [block.groups() for block in _BLOCK.finditer((ROOT / page).read_text())]
    blocks = [(title, code) for kind, title, code in found if kind == language]
    return {title or f"block{place}": code for place, (title, code) in enumerate(blocks, 1)}


def run_page(
    files: dict[str, str], scripts: list[str], folder: Path, ranks: int, timeout: float = 240.0
) -> dict[str, list[PageOutput]]:
    """Write ``files`` (name -> code) into ``folder`` and run each of ``scripts`` on ``ranks`` processes, with
    torchrun's environment variables; by script, what every rank gave. Raises what ``run_processes`` raises.
    """
    for name, code in files.items():
        (folder / name).write_text(code)
    # As torchrun's agent has it: ranks meet at a store that is here already, at a port that nobody else can take.
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in scripts]
    args = str(folder), scripts, [store.port for store in stores]
    options = {"timeout": timeout, "backend": None, "start_method": "forkserver"}
    results = run_processes(_rank_main, ranks, args, **options)
    return {script: [of_rank[place] for of_rank in results] for place, script in enumerate(scripts)}


def _rank_main(rank: int, size: int, folder: str, scripts: list[str], ports: list[int]) -> list[PageOutput]:
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return [_run(script, port) for script, port in zip(scripts, ports, strict=True)]


def _run(script: str, port: int) -> PageOutput:
    os.environ["MASTER_PORT"] = str(port)
    printed, warnings = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(warnings)
    logging.getLogger("megatron_pp").addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    finally:
        logging.getLogger("megatron_pp").removeHandler(handler)
        parallel_state.destroy_model_parallel()  # which a program that ends may leave
    return PageOutput(printed.getvalue(), warnings.getvalue())
