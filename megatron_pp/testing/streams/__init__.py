"""A race checker for streams: the real engine on CPU tensors, on devices that keep the books of what a GPU may do in
another order. See ``docs/streams.md``.

``check_streams`` runs a step and reports its races. Below it: ``StreamNetwork`` (devices and transfers) and
``virtual_cuda`` (``torch.cuda`` for threads that are ranks).
"""

from megatron_pp.testing.streams.call_log import CallLog
from megatron_pp.testing.streams.check import StreamReport, check_streams
from megatron_pp.testing.streams.cuda import virtual_cuda
from megatron_pp.testing.streams.memory import StreamRace
from megatron_pp.testing.streams.network import StreamNetwork
from megatron_pp.testing.streams.rules import DeviceRules

__all__ = ["CallLog", "DeviceRules", "StreamNetwork", "StreamRace", "StreamReport", "check_streams", "virtual_cuda"]
