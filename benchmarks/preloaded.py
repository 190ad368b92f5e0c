"""The process from which a benchmark with peers forks its ranks imports this module, once for all ranks."""

from __future__ import annotations

import contextlib

import torch.distributed.pipelining  # noqa: F401

from benchmarks.megatron_library import MAIN, load
from benchmarks.work import Unavailable

for _engine in ("megatron", MAIN):
    with contextlib.suppress(Unavailable):
        load(_engine)
