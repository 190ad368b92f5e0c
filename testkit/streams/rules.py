"""Rules of devices that a run may be under, beside those of streams and memory, which always hold."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pp.plan.costs.transports import MAX_CTAS


@dataclass(frozen=True)
class DeviceRules:
    """By default a device is that of a job's first steps: the first launch of each kernel waits (``kernels.py``), under
    the context's lock (``host_process.py``). None of the others holds.

    first_launches    False: the device has loaded all kernels, as in later steps
    hardware_queues   streams share so many of each device (``hardware.py``); 0: each has one of its own
    multiprocessors   of each device (``hardware.py``), for kernels that wait for peers and for compute; 0: without end
    thread_blocks     that a transfer takes of these, where its communicator does not say
    memory            bytes of each device; 0: without end. Where no more are left, an allocation gives cached blocks
                      back (``memory.py``)
    context_lock      False: calls of other threads go through while a launch loads a kernel or memory is given back
    eager_bytes       a send of so many bytes or fewer, not in a batch, may end before its receive is posted
                      (``eager.py``). The seed chooses which do; without a seed all
    one_device        the ranks share cuda:0; else each has a device of its own, rank r cuda:r
    queries_block     an event's query blocks while another thread of the rank's process waits for the device
                      (``host_process.py``)
    """

    first_launches: bool = True
    hardware_queues: int = 0
    multiprocessors: int = 0
    thread_blocks: int = MAX_CTAS
    memory: int = 0
    context_lock: bool = True
    eager_bytes: int = 0
    one_device: bool = False
    queries_block: bool = False

    @property
    def may_hang(self) -> bool:
        """Whether what was issued may wait forever though every transfer has met its peer's end."""
        return bool(self.hardware_queues or self.multiprocessors)


LATER_STEPS = DeviceRules(first_launches=False)
"""Kernels were loaded before."""
