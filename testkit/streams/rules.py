"""Optional rules of virtual devices. The rules of streams and memory always hold."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pp.plan.costs.transports import MAX_CTAS


@dataclass(frozen=True)
class DeviceRules:
    """Rules of a run. By default a device behaves as in a job's first steps: the first launch of each kernel waits
    (``kernels.py``), under the context's lock (``host_process.py``). The other rules are off.

    first_launches    False: the device has loaded all kernels, as in later steps
    hardware_queues   number of hardware queues of each device (``hardware.py``); 0: each stream has its own
    multiprocessors   number in a device (``hardware.py``) for kernels that wait for peers and for compute; 0: unlimited
    thread_blocks     multiprocessors that a transfer occupies, if its communicator does not say
    memory            bytes of each device; 0: unlimited. If too few are free, an allocation first gives cached blocks
                      back (``memory.py``)
    context_lock      False: calls of other threads run while a launch loads a kernel or memory is returned
    eager_bytes       a send of at most this many bytes, not in a batch, may end before its receive is posted
                      (``eager.py``). The seed chooses which do; without a seed all
    one_device        the ranks share cuda:0; otherwise rank r has cuda:r
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
        """Whether issued operations may wait forever although every transfer has met its peer's end."""
        return bool(self.hardware_queues or self.multiprocessors)


LATER_STEPS = DeviceRules(first_launches=False)
"""The rules of later steps: all kernels are loaded."""
