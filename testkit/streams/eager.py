"""Small sends that end before their receive is posted, because their bytes wait in NCCL's buffers (nccl#544).

A wait for such a send says nothing about the receiver.
"""

from __future__ import annotations

import torch

from megatron_pp.testing.adversarial_transports import Window, poison_of
from megatron_pp.testing.memory_transport import End

SLOTS = 8
"""Messages that may wait in one direction of a communicator (``NCCL_STEPS``)."""


class Buffered(End):
    """The bytes of a send that has ended."""


def buffered(end: End, window: Window) -> Buffered:
    """The bytes that ``end`` sends from ``window``; NaN if that memory was freed."""
    sent = window.look()
    content = torch.full(window.shape, poison_of(window.dtype), dtype=window.dtype) if sent is None else sent.clone()
    return Buffered(content, end.direction, True, end.work)
