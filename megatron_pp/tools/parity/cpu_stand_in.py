"""Makes Megatron-core run on a CPU with gloo: for `megatron-pp parity`, for tests, and for trials without a GPU.

Megatron-core uses "cuda" and "nccl" in many places. `redirect()` replaces each use by the CPU's counterpart, so that
the real `GPTModel`, `DistributedDataParallel` and distributed optimizer run unchanged. Training does not import this
module, and a machine with GPUs does not need it. Call it once per process, before Megatron is imported:

    from megatron_pp.tools.parity import cpu_stand_in
    cpu_stand_in.redirect()
    import megatron.core

What is redirected, and why Megatron needs it:

| place                                                   | becomes                 | who asks for it                 |
| ------------------------------------------------------- | ----------------------- | ------------------------------- |
| `device=` of any torch function, `Tensor.cuda/.to`      | the CPU                 | parameters, buffers, scales     |
| `Tensor.type()`                                         | `torch.cuda.…Tensor`    | sorting of parameters by type   |
| `torch.cuda.is_available/current_device/synchronize/…`  | False, the CPU, nothing | parallel_state, timers          |
| `torch.cuda.Stream/Event/stream/current_stream/…`       | objects that do nothing | DDP, MoE dispatchers            |
| `Tensor.record_stream`                                  | nothing                 | schedule plans of combined 1F1B |
| `torch.cuda` random state (get, set, seed)              | the CPU generator       | dropout and initialisation      |
| `tensor_parallel.random._get/_set_cuda_rng_state`       | the CPU generator       | the random-state tracker        |
| `torch.cuda.nvtx`                                       | nothing                 | profiling ranges                |
| `torch.compile`                                         | the function itself     | fused functions                 |
| backend "nccl", `pg_options`, `barrier(device_ids=)`    | gloo, none, none        | parallel_state                  |
| `torch.distributed`'s coalescing                        | one by one              | DDP's and optimizer's buckets   |
| `ReduceOp.AVG`                                          | SUM, then division      | DDP, finalisation               |
| sizes given to `all_to_all_single` as tensors           | lists                   | MoE's all-to-all dispatcher     |
| `all_gather` and `reduce_scatter` of unequal tensors    | one by one              | the same, of split experts      |
| `fused_weight_gradient_mlp_cuda`                        | a product and a sum     | deferred gradients of embeddings |
| state of a `DistributedOptimizer` that restores | zeros         | without TE, Megatron asks Adam for its step |
| `moe_utils.te_general_gemm`                             | None                    | 0.16's router without TE        |
| `inference_layers.Inference…ColumnParallelLinear`       | a class                 | MTP without TE (main branch)    |
| `multi_latent_attention.TELinear`                       | a class                 | latent attention without TE     |
| `random.FP8GlobalStateManager` and its contexts         | FP8 is off              | recomputation without TE        |
| `import triton` (Megatron's main branch only)           | a stand-in, never run   | kernels defined on import       |
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_pp.tools.parity.cpu.cpu_collectives import redirect_distributed
from megatron_pp.tools.parity.cpu.wrapping import wrap

CPU = torch.device("cpu")
_TRAINING_LOOP = "megatron.training.training"


class NoStream:
    """A stand-in for a CUDA stream. The CPU runs operations in order, so there is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else NoEvent()

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class NoEvent:
    """A stand-in for a CUDA event that has always ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _says_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


# Functions of torch, and methods of a tensor, that have an argument for a device.
FACTORIES = (
    *("arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "logspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "scalar_tensor"),
    *("tensor", "as_tensor", "asarray", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)
METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def _redirect_devices() -> None:
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    plain_type = torch.Tensor.type

    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = plain_type(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    tensor_class: Any = torch.Tensor
    tensor_class.type = type_
    tensor_class.cuda = lambda tensor, *args, **kwargs: tensor
    tensor_class.record_stream = lambda tensor, stream: None


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with every CUDA device among its arguments replaced by the CPU."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _says_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*(CPU if _says_cuda(a) else a for a in args), **kwargs)

    return function


def redirect() -> None:
    """Redirects this process to the CPU. It may be called several times, and cannot be undone."""
    if getattr(torch.cuda, "_megatron_pp_stand_in", False):
        return
    torch.cuda._megatron_pp_stand_in = True  # type: ignore[attr-defined]
    importlib.import_module("torch._dynamo")  # it needs the real torch.cuda; torch's optimizers import it later
    _redirect_devices()
    _redirect_cuda_module()
    vars(torch)["compile"] = lambda model=None, **_: model if model is not None else (lambda function: function)
    redirect_distributed()
    _add_fused_gradients()
    with triton_stand_in():
        _redirect_rng_tracker()
        _complete_recomputation()
        _complete_moe_utils()
        _complete_asked_layers()
        _complete_sharded_optimizer()


def _redirect_cuda_module() -> None:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    cuda: Any = torch.cuda
    cuda.is_available = lambda: False
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init", "init"):
        setattr(cuda, name, nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.get_device_capability = lambda *args: (0, 0)
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=0, multi_processor_count=1
    )
    cuda.is_current_stream_capturing = lambda: False

    no_stream = NoStream()
    cuda.Stream = NoStream
    cuda.Event = NoEvent
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: no_stream
    cuda.stream = lambda stream: contextlib.nullcontext()

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))  # not torch.manual_seed, which calls this function

    for module in (cuda, cuda.random):
        module.get_rng_state = _get_state
        module.set_rng_state = _set_state
        module.manual_seed = module.manual_seed_all = seed
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, nothing)
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()


def _get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _add_fused_gradients() -> None:
    """Adds a stand-in for Apex's extension, which adds a weight gradient to the accumulated one, unseen by autograd."""

    @torch.no_grad()
    def wgrad_gemm_accum(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(grad_output.t(), inputs)

    name = "fused_weight_gradient_mlp_cuda"
    if importlib.util.find_spec(name) is None:
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
        module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = wgrad_gemm_accum
        sys.modules[name] = module


@contextlib.contextmanager
def triton_stand_in() -> Iterator[None]:
    """A context for `import megatron...`. Megatron's main branch defines triton kernels on import; the CPU never runs
    them.

    Afterwards triton is absent again. Otherwise torch itself would use the stand-in as a real triton.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return

    class StandIn(types.ModuleType):
        __path__: list[str] = []  # noqa: RUF012

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _kernel

    names = ("triton", "triton.language", "triton.language.core", "triton.language.standard")
    for name in names:
        sys.modules[name] = StandIn(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    sys.modules["triton"].__version__ = "0.0.0"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _kernel(*args: Any, **kwargs: Any) -> Any:
    """A stand-in for all triton decorators, with or without arguments. It returns the function unchanged."""
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _kernel


def _redirect_rng_tracker() -> None:
    import megatron.core.tensor_parallel.random as tracker

    tracker._get_cuda_rng_state = _get_state
    tracker._set_cuda_rng_state = _set_state
    # The tracker warns that the CPU's state changed inside a CUDA fork. Here this is intended.
    logging.getLogger(tracker.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _complete_recomputation() -> None:
    """Adds an FP8 state that is off. Recomputation of a part of a layer reads it, also without Transformer Engine."""
    import megatron.core.tensor_parallel.random as recomputation

    if not hasattr(recomputation, "FP8GlobalStateManager"):
        recomputation.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        for name in ("fp8_autocast", "activation_recompute_forward"):
            setattr(recomputation, name, lambda *args, **kwargs: contextlib.nullcontext())


def _complete_moe_utils() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


_ASKED = {
    "megatron.core.tensor_parallel.inference_layers": (
        "InferenceColumnParallelLinear",
        "InferenceLayerNormColumnParallelLinear",
    ),
    "megatron.core.transformer.multi_latent_attention": ("TELinear",),
}
"""Module -> layers of Transformer Engine that it passes to isinstance. Without Transformer Engine they are mocks, and
isinstance would fail."""


def _complete_asked_layers() -> None:
    for place, names in _ASKED.items():
        with contextlib.suppress(ImportError):
            module = importlib.import_module(place)
            for name in names:
                if not isinstance(getattr(module, name, None), type):
                    setattr(module, name, type(name, (), {}))


def _complete_sharded_optimizer() -> None:
    """Makes Megatron's distributed optimizer restore checkpoints with torch's Adam.

    Megatron expects the Adam of Transformer Engine or Apex. The state of torch's Adam is empty before the first step,
    and has a step for each parameter; Megatron has one step. Parameters in float32 require gradients.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    wrap(DistributedOptimizer, "sharded_state_dict", _with_states)
    wrap(DistributedOptimizer, "_set_main_param_and_optimizer_states", _set_states)
    wrap(DistributedOptimizer, "load_state_dict", _load_with_steps)


def _with_states(original: Any, self: Any, model: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
    if is_loading and self.optimizer is not None and not self.optimizer.state:
        for parameter in (each for group in self.optimizer.param_groups for each in group["params"]):
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}
    return original(self, model, is_loading, *args, **kwargs)


@torch.no_grad()
def _set_states(original: Any, self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    group, index = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
    original(self, model_param, tensors | {name: state[name] for name in ("step",) if name in state})


def _load_with_steps(original: Any, self: Any, state_dict: Any) -> None:
    original(self, state_dict)
    for state in self.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def allow_no_gpu() -> None:
    """Allows Megatron's training loop to begin without a GPU, as soon as it is imported."""
    from megatron_pp.integrations.on_import import WhenImported

    WhenImported((_TRAINING_LOOP,), _allow_no_gpu)


def _allow_no_gpu() -> None:
    training: Any = sys.modules[_TRAINING_LOOP]
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
