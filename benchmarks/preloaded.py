"""Imported once for all ranks of a benchmark that runs peers, by the process that they are forked from."""

from __future__ import annotations

import contextlib

import torch.distributed.pipelining  # noqa: F401

from benchmarks.megatron_library import MAIN, load
from benchmarks.work import Unavailable

for _engine in ("megatron", MAIN):
    with contextlib.suppress(Unavailable):
        load(_engine)
