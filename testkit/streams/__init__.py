"""A race checker for streams. It runs the real engine on CPU tensors, on virtual devices that record what a GPU may do
in another order. See ``docs/streams.md``.

``check_streams`` runs a step and reports its races. It uses ``StreamNetwork`` (devices and transfers) and
``virtual_cuda`` (``torch.cuda`` for threads that are ranks).
"""

from testkit.streams.call_log import CallLog
from testkit.streams.check import StreamReport, check_streams
from testkit.streams.memory import StreamRace
from testkit.streams.network import StreamNetwork
from testkit.streams.rules import LATER_STEPS, DeviceRules
from testkit.streams.torch_calls.cuda import virtual_cuda

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
