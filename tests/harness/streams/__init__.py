"""A race checker for streams: the real engine on CPU tensors, on devices that keep the books of what a GPU may do in
another order. See ``docs/streams.md``.

``check_streams`` runs a step and reports its races. Below it: ``StreamNetwork`` (devices and transfers) and
``virtual_cuda`` (``torch.cuda`` for threads that are ranks).
"""

from tests.harness.streams.call_log import CallLog
from tests.harness.streams.check import StreamReport, check_streams
from tests.harness.streams.cuda import virtual_cuda
from tests.harness.streams.memory import StreamRace
from tests.harness.streams.network import StreamNetwork
from tests.harness.streams.rules import LATER_STEPS, DeviceRules

__all__ = [
    "LATER_STEPS",
    "CallLog",
    "DeviceRules",
    "StreamNetwork",
    "StreamRace",
    "StreamReport",
    "check_streams",
    "virtual_cuda",
]
