"""CPU tensors that report a CUDA device.

In a rank's thread every tensor is on the virtual device, except tensors that were put on the CPU by name
(``device="cpu"``, ``.cpu()``, pinned memory). A TorchFunctionMode answers ``tensor.device`` accordingly, accepts
``cuda`` wherever torch accepts a device, and makes a copy when a tensor moves between host and device.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_pp.weight_grad.deferred import tensors_in
from testkit.streams.device import VirtualDevice
from testkit.streams.host_process import calls_cuda

CPU = torch.device("cpu")

_GETTERS = {"is_cuda": lambda host: not host, "is_cpu": bool}
_TO_HOST = {"tolist", "numpy"}  # need the values


class CudaTensors(TorchFunctionMode):
    """The function mode of one rank. ``target``: where the running call puts its result, "cpu" or "cuda"; empty if the
    call does not say."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device = device
        self.target = ""
        self._special = {name: getattr(self, f"_{name}") for name in ("to", "cuda", "cpu", "get_device", "type")}
        self._special["pin_memory"] = self._pinned
        self._plain: set[Any] = set()  # functions that have been called, and need no special treatment

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_plain = not kwargs and func in self._plain
        result = func(*args) if is_plain else self._handle(func, args, kwargs or {})
        if isinstance(result, torch.Tensor):
            self.device.nodes.made((result,))
        elif isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            self.device.nodes.made(tensors_in(result))
        return result

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            asked = getattr(func.__self__, "__name__", "")
            if asked == "device":
                return CPU if self.device.is_host_memory(args[0]) else self.device.place
            answer = _GETTERS.get(asked)
            if answer is not None:
                return answer(self.device.is_host_memory(args[0]))
            self._plain.add(func)
            return func(*args, **kwargs)
        special = self._special.get(name)
        if special is not None:
            return special(func, *args, **kwargs)
        if name not in _TO_HOST:
            self._plain.add(func)
        elif not self.device.is_host_memory(args[0]):
            self.device.synchronize([self.device.stream], name)
        return self._call(func, *args, **kwargs)

    def _call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``func`` on CPU tensors, and record the device that it was given."""
        if not kwargs:
            return func(*args)
        before = self.target
        given = kwargs.get("device")
        if kwargs.pop("pin_memory", False):
            self.target = "cpu"
        elif given is not None:
            self.target = _kind(given)
        if given is not None:
            kwargs["device"] = CPU
        try:
            result = func(*args, **kwargs)
            if self.target == "cpu" and func is torch.tensor:  # the recorder sees no operation that makes it
                self.device.keep_on_host(result.untyped_storage())
            return result
        finally:
            self.target = before

    # -- functions with special treatment -----------------------------------------------------------------------------

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("device")
        rest = list(args)
        if target is not None:
            kwargs["device"] = CPU
        elif rest and isinstance(rest[0], torch.Tensor):
            target = "cpu" if self.device.is_host_memory(rest[0]) else "cuda"
        elif rest and isinstance(rest[0], (torch.device, str, int)):
            target, rest[0] = rest[0], CPU
        if target is not None:
            tensor = self._move(tensor, target, kwargs.get("non_blocking", len(rest) > 2 and rest[2]))
        return func(tensor, *rest, **kwargs)

    def _cuda(self, func: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Any:
        return self._move(tensor, "cuda", non_blocking)

    def _cpu(self, func: Any, tensor: torch.Tensor, *args: Any, **_: Any) -> Any:
        return self._move(tensor, "cpu", False)

    def _pinned(self, func: Any, tensor: torch.Tensor, *args: Any, **_: Any) -> torch.Tensor:
        return self._move(tensor, "cpu", False)

    def _get_device(self, func: Any, tensor: torch.Tensor) -> int:
        return -1 if self.device.is_host_memory(tensor) else self.device.process.index

    def _type(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        said = func(tensor, *args, **kwargs)
        on_device = isinstance(said, str) and not self.device.is_host_memory(tensor)
        return said.replace("torch.", "torch.cuda.", 1) if on_device else said

    def _move(self, tensor: torch.Tensor, target: Any, non_blocking: bool) -> torch.Tensor:
        kind = _kind(target)
        if kind == ("cpu" if self.device.is_host_memory(tensor) else "cuda"):
            return tensor
        before, self.target = self.target, kind
        try:
            moved = tensor.clone()
        finally:
            self.target = before
        if not non_blocking:
            self.device.synchronize([self.device.stream], "a copy between host and device")
        return moved

    # -- for the recorder ------------------------------------------------------------------------------------------

    def puts_on_host(self, given: list[torch.Tensor]) -> bool:
        """Whether the result of an operation on ``given`` is in host memory."""
        return self.target == "cpu" if self.target else bool(given) and all(map(self.device.is_host_memory, given))

    def is_blocking_copy(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether this is a ``copy_`` for which the host waits: one between host and device that is not
        ``non_blocking``."""
        if name != "copy_" or (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
            return False
        return self.device.is_host_memory(args[0]) != self.device.is_host_memory(args[1])


def _kind(device: Any) -> str:
    """``cuda`` or ``cpu``. A number is a CUDA device. Putting a tensor on a CUDA device counts as a call of CUDA."""
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    if kind == "cuda":
        calls_cuda("a tensor", device)
    return kind
