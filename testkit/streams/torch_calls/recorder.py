"""A TorchDispatchMode that records on the device which memory each operation of a thread reads and writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pp.weight_grad.deferred import tensors_in
from testkit.streams.device import VirtualDevice, is_quiet
from testkit.streams.kernels import kernel_of
from testkit.streams.memory import READ, WRITE
from testkit.streams.timelines import Timeline
from testkit.streams.torch_calls.cuda_tensors import CudaTensors

Given = tuple[int | str, torch.Tensor]
"""An argument: its position or name, and the tensor, or one tensor of a list."""

# These read the shape of their argument, not its data.
_OF_SHAPE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}
# Changes the storage of a tensor, and no memory.
_PLACING = "set_"
# These do not write their result.
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# The host needs the values, so it waits for the current stream.
_SYNCHRONIZING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}


class _Effects(NamedTuple):
    """The effects of an operator. ``written``: positions and names of the arguments that it writes to."""

    name: str
    written: frozenset[int | str]
    reads: bool
    writes_result: bool
    synchronizes: bool


@cache
def _effects_of(func: Any) -> _Effects:
    name = func._schema.name.split("::")[1]
    written: set[int | str] = set()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and name != _PLACING:
            written |= {position, argument.name}
    return _Effects(name, frozenset(written), name not in _OF_SHAPE, name not in _UNWRITTEN, name in _SYNCHRONIZING)


@contextmanager
def recording(device: VirtualDevice, checks: bool = True) -> Iterator[None]:
    """A context in which this thread's tensors are on ``device``. With ``checks`` the device records their uses."""
    device.tensors = tensors = CudaTensors(device)
    with tensors, _Recorder(device, tensors, checks):
        yield


class PassingMode(TorchDispatchMode):
    """A mode that passes operations on. Around threads with their own modes it restores torch's flags of modes, which
    belong to the process, not to a thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True, so that torch does not wrap ``__torch_dispatch__``, which would cost time in each operation. Nothing is
        compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Recorder(PassingMode):
    """Records each operation of this thread on ``device``."""

    def __init__(self, device: VirtualDevice, tensors: CudaTensors, checks: bool) -> None:
        super().__init__()
        self.device = device
        self.tensors = tensors
        self.checks = checks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_quiet():
            return func(*args, **kwargs)
        effects = _effects_of(func)
        with torch._C.DisableTorchFunction():
            if not self.checks and effects.synchronizes:  # the host has run ahead of the device, and waits here
                self.device.synchronize([self.device.stream], effects.name)
            result = func(*args, **kwargs)
            self._enter(effects, args, kwargs, result)
        return result

    def _enter(self, effects: _Effects, args: Any, kwargs: Any, result: Any) -> None:
        device = self.device
        given: list[Given] = []
        for at, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                given.append((at, value))
            elif isinstance(value, (list, tuple)):
                given += [(at, t) for t in tensors_in(value)]
        storages = {t.untyped_storage()._cdata for _, t in given}
        results = [result] if isinstance(result, torch.Tensor) else list(tensors_in(result))
        new = [t for t in results if t.untyped_storage()._cdata not in storages]
        if results and not new and not effects.written:
            return  # a view
        if not self.checks:
            device.launches(kernel_of(effects.name, [*(t for _, t in given), *new], False))
            return
        placed_on_host = self.tensors.puts_on_host([t for _, t in given])
        for tensor in new if placed_on_host else ():
            device.keep_on_host(tensor.untyped_storage())
        on_host = all(map(device.is_host_memory, [*(t for _, t in given), *new]))
        if not on_host:
            device.launches(kernel_of(effects.name, [*(t for _, t in given), *new], placed_on_host))
        lane = (device.host_step if on_host else device.stream_step)(effects.name)
        if device.network.looks_for_races:
            self._note_uses(effects, given, new, lane)
        device.log.issued(device.rank)
        if effects.synchronizes or self.tensors.is_blocking_copy(effects.name, args, kwargs):
            device.synchronize([device.stream], effects.name)

    def _note_uses(self, effects: _Effects, given: Sequence[Given], new: list[torch.Tensor], lane: Timeline) -> None:
        for at, tensor in given:
            if at in effects.written:
                self.device.access(tensor, WRITE, lane, effects.name)
            elif effects.reads:
                self.device.access(tensor, READ, lane, effects.name)
        for tensor in new:
            if effects.writes_result:
                self.device.access(tensor, WRITE, lane, effects.name)
            else:
                self.device.block_of(tensor.untyped_storage())
