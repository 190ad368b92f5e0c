"""Point-to-point communication between pipeline stages, under the name of Megatron's module."""

from megatron_pp.comm.communicator import is_single_shape
from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.comm.wait_handle import WaitHandle

__all__ = ["P2PCommunicator", "WaitHandle", "is_single_shape"]
