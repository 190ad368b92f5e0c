"""Imports torch's pipelining and the Megatron-cores. A benchmark with peers forks its ranks from a process that has
imported this module, so that the imports happen once for all ranks."""

from __future__ import annotations

import contextlib

import torch.distributed.pipelining  # noqa: F401

from benchmarks.megatron_library import MAIN, load
from benchmarks.work import Unavailable

for _engine in ("megatron", MAIN):
    with contextlib.suppress(Unavailable):
        load(_engine)
