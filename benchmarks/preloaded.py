"""What the process that ranks are forked from imports for the benchmarks that run peers."""

from __future__ import annotations

import contextlib

import torch.distributed.pipelining  # noqa: F401

from benchmarks.engines import Unavailable
from benchmarks.megatron_library import MAIN, load

for _engine in ("megatron", MAIN):
    with contextlib.suppress(Unavailable):
        load(_engine)
