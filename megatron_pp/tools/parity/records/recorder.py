"""Records the values that a rank computes in its training steps, at Megatron-core's own interfaces.

Hooks record layers' outputs and their gradients. A wrapper of `forward_step_func` records the loss of each microbatch,
and the schedule's return value is recorded. Gradients and the learning rate are recorded when the optimizer's step
begins; the gradient norm, the optimizer's state, parameters and buffers after it. Numbers that Megatron's training loop
logs are recorded, too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron_pp.common.module_attributes import unwrapped
from megatron_pp.integrations.on_import import WhenImported
from megatron_pp.tools.parity.cpu.cpu_layers import positions_of
from megatron_pp.tools.parity.cpu.wrapping import wrap, wrapped
from megatron_pp.tools.parity.records import logs, states
from megatron_pp.tools.parity.records.parameters import (
    Indices,
    Place,
    global_name,
    indices_of,
    made_values,
    named_parameters,
    own_range,
    part_of,
)
from megatron_pp.tools.parity.workers.processes import RunError

FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
GRADIENT = "gradient"
NORM = "norm"
PARAMETER = "parameter"
ZEROS = "zeros in gradients"
RETURNED = "train_step"
RESTORED = "restored"
REPORT = "report"
SCHEDULE = "schedule"
BUFFER = "buffer"
LOGGED = "log"
_STATE = "optimizer's "  # followed by the name of the state in torch's optimizer, such as exp_avg
_BUFFERS = "buffer:"  # prefix of the names of buffers in the file of the whole model's values
TRAINING_LOOP = "megatron.training.training"


def is_state(kind: str) -> bool:
    """Whether a kind is a state of the optimizer."""
    return kind.startswith(_STATE)


@dataclass(frozen=True)
class Key:
    """The identity of a compared value: training step, kind, name, and microbatch of the global batch (-1 for values of
    the whole step)."""

    step: int
    kind: str
    name: str
    microbatch: int = -1


@dataclass
class Value:
    """The numbers of this rank: a part of a whole tensor. ``valid`` is the flat range of the part that is valid (None:
    all). ``resolution`` is one unit of the last digit of a printed number."""

    data: np.ndarray
    indices: Indices = field(default_factory=dict)
    valid: tuple[int, int] | None = None
    sum_over_context: bool = False
    resolution: float = 0.0


@dataclass
class Record:
    """The record of one rank. Values are in the order of time."""

    place: Place | None = None
    stage: dict[str, int] = field(default_factory=dict)
    values: dict[Key, Value] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unrepeated: set[str] = field(default_factory=set)  # modules whose recomputation does not repeat their forward
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    uncompared: dict[str, str] = field(default_factory=dict)  # name -> the reason why it cannot be compared
    dropout: bool = False  # the model had dropout; it was switched off


class Recorder:
    """Records one script in this process.

    steps    the number of training steps
    weights  file of the whole model's parameters; the run of one process writes it, the others read it
    alone    this is the run of one process
    first    the step before which a checkpoint was restored; 0 if none was
    saved    the step before which a checkpoint is saved
    logging  Megatron's training loop makes the steps. The last step then ends with its log. Otherwise it ends within
             the
             optimizer's step, before the script can save anything
    dropout  dropout stays on, for a recomputation that must repeat it
    """

    def __init__(
        self,
        steps: int,
        weights: str,
        alone: bool,
        first: int = 0,
        saved: int = 0,
        logging: bool = False,
        dropout: bool = False,
    ) -> None:
        self.steps = steps
        self.weights = weights
        self.alone = alone
        self.saved = saved
        self.logging = logging
        self.dropout = dropout
        self.totals: dict[str, Any] = {}  # sums of Megatron's loop between two lines of its log
        self.stepped = False  # the optimizer has made its step since the last call of a schedule
        self.record = Record()
        self.step = self.first = first
        self.current: int | None = None
        self.counts: dict[int, int] = {}
        self.chunks: list[Any] = []
        self.optimizers: list[Any] = []
        self.depth = 0
        self.forwards: dict[str, list[np.ndarray]] = {}  # module -> its outputs in this step
        self.microbatches = self.sequence = 1
        self.whole: dict[str, np.ndarray] = {}

    def install(self) -> None:
        """Wraps the schedules and optimizers of Megatron-core, which must be imported already."""
        from megatron.core.optimizer import optimizer as optimizers
        from megatron.core.pipeline_parallel import schedules

        from megatron_pp.integrations.megatron.named_objects import replace_names

        chosen = schedules.get_forward_backward_func
        replace_names([(chosen, wrapped(chosen, self._choice))])
        for kind in _subclasses(optimizers.MegatronOptimizer):
            if "step" in vars(kind):
                wrap(kind, "step", self._optimizer_step)
            if "__init__" in vars(kind):
                wrap(kind, "__init__", self._optimizer_init)
        register_optimizer_step_pre_hook(self._before_plain_step)
        register_optimizer_step_post_hook(self._after_plain_step)
        if self.logging:
            WhenImported((TRAINING_LOOP,), self._watch_log)

    def _watch_log(self) -> None:
        training: Any = sys.modules[TRAINING_LOOP]
        wrap(training, "print_rank_last", self._print)
        wrap(training, "training_log", self._log)

    def _print(self, original: Callable[..., Any], message: Any, *args: Any, **kwargs: Any) -> Any:
        """Records the numbers of a line that Megatron logs on the last rank, which has the losses. The second line of a
        process also averages over the first. With a checkpoint, processes begin at different steps, so averages are
        left out."""
        if dist.get_rank() == dist.get_world_size() - 1:
            for one in logs.numbers_of(str(message)):
                if self.saved and one.name in self.totals:
                    continue
                if why := logs.why_stale(one.name, self.chunks):
                    self.record.uncompared[one.name] = why
                    continue
                value = Value(np.asarray(one.value), resolution=one.resolution)
                self.record.values.setdefault(Key(self.step - 1, LOGGED, one.name), value)
        return original(message, *args, **kwargs)

    def _log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        losses = args[0] if args else kwargs.get("loss_dict")
        for _, name, value in states.report_values([losses]):
            self.record.values.setdefault(Key(self.step - 1, RETURNED, name), Value(value))
        totals = args[1] if len(args) > 1 else kwargs.get("total_loss_dict")
        self.totals = totals if isinstance(totals, dict) else {}
        result = original(*args, **kwargs)
        if self.step >= self.steps:
            raise SystemExit(0)  # before Megatron saves anything
        return result

    def _optimizer_init(self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)

    def _choice(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return wrapped(original(*args, **kwargs), self._schedule)

    def _schedule(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("forward_only") or args:
            return original(*args, **kwargs)
        if self.step >= self.steps:
            raise SystemExit(0)  # all steps are recorded
        model = kwargs["model"]
        self._begin(list(model) if isinstance(model, (list, tuple)) else [model])
        self.microbatches = kwargs["num_microbatches"]
        self.sequence = kwargs["seq_length"]
        kwargs["forward_step_func"] = wrapped(kwargs["forward_step_func"], self._forward_step)
        reports = original(**kwargs)
        self._reports(reports)
        return reports

    def _reports(self, reports: Any) -> None:
        """Records the schedule's reports, if each microbatch is whole on one rank. Otherwise the script decides which
        reports it sums."""
        if self.place.size["DP"] * self.place.size["CP"] == 1:
            for number, name, value in states.report_values(reports):
                self._put(REPORT, name, number, Value(value))

    def _begin(self, chunks: list[Any]) -> None:
        if not self.chunks:
            self.chunks = chunks
            self.place = self.record.place = Place.here()
            self.config = unwrapped(chunks[0]).config
            if not self.dropout:
                had_some = [states.without_dropout(chunk) for chunk in chunks]
                self.record.dropout = any(had_some)
            self._load()
            for chunk in chunks:
                self._hook(unwrapped(chunk))
        if self.saved and self.step == self.saved:
            self._parameters(RESTORED)
            self._buffers(RESTORED, self.step)
        self.stepped = False
        self.counts.clear()
        self.forwards.clear()

    def _load(self) -> None:
        """Sets the values of the parameters, and reloads them into the optimizers."""
        gated = bool(getattr(self.config, "gated_linear_unit", False))
        if not self.alone:
            with np.load(self.weights) as whole:
                self.whole = dict(whole)
        self.parts: dict[str, Indices] = {}
        self.names: dict[int, str] = {}
        with torch.no_grad():
            for index, chunk in enumerate(self.chunks):
                for name, parameter in named_parameters(chunk, self.place):
                    self.names[id(parameter)] = name
                    self.record.stage[name] = index
                    self.record.shapes[name] = tuple(parameter.shape)
                    if self.alone:
                        self.whole[name] = made_values(name, tuple(parameter.shape))
                    if name not in self.whole:
                        self.record.unknown.append(name)
                        continue
                    whole = self.whole[name]
                    sizes = getattr(parameter, "partition_sizes", None)
                    self.parts[name] = indices_of(name, tuple(parameter.shape), whole.shape, gated, self.place, sizes)
                    if not self.first:
                        parameter.copy_(torch.from_numpy(part_of(whole, self.parts[name])))
                self._load_buffers(chunk, index)
        for optimizer in [] if self.first else self.optimizers:
            optimizer.reload_model_params()

    def _load_buffers(self, chunk: Any, index: int) -> None:
        """Records which part of each buffer is on this rank. Buffers keep the script's values."""
        for name, buffer in states.named_buffers(chunk, self.place):
            self.record.stage[name] = index
            shape = tuple(buffer.shape)
            if self.alone:
                self.whole[f"{_BUFFERS}{name}"] = np.zeros(shape, bool)
            whole = self.whole.get(f"{_BUFFERS}{name}")
            if whole is None:
                continue  # no layer has it in one process: the layout made it for itself
            try:
                self.parts[name] = indices_of(name, shape, whole.shape, False, self.place)
            except ValueError as error:
                self.record.uncompared[name] = str(error)

    def finished(self) -> Record:
        """The record, after all ranks have finished theirs. The run of one process also writes the weights. Raises
        RunError if the script has made too few steps."""
        if self.step < self.steps:
            raise RunError(self.words("the script ended"))
        if dist.is_initialized():
            dist.barrier()
        if self.alone:
            np.savez(self.weights, **self.whole)  # type: ignore[arg-type]
        return self.record

    def words(self, ended: str) -> str:
        """A sentence about the end of the script, with the number of its steps."""
        return f"{ended} after {self.step - self.first} training steps of {self.steps - self.first}"

    def _forward_step(
        self, original: Callable[..., Any], data_iterator: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        chunk = next(index for index, own in enumerate(self.chunks) if unwrapped(own) is unwrapped(model))
        number = self.counts.get(chunk, 0)
        self.counts[chunk] = number + 1
        self.current = number * self.place.size["DP"] + self.place.rank["DP"]
        try:
            output, loss_func = original(data_iterator, model, *args, **kwargs)
        finally:
            microbatch, self.current = self.current, None
        return output, None if loss_func is None else functools.partial(self._loss, loss_func, microbatch)

    def _loss(self, original: Callable[..., Any], microbatch: int, output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(output, torch.Tensor) and output.dim() < 3:  # logits have three dimensions
            self._note(LOSS, "loss of each token", microbatch, output, 1)
            self._watch(output, "loss of each token", microbatch, 1)
        result = original(output, *args, **kwargs)
        if isinstance(result, tuple) and isinstance(result[0], torch.Tensor):
            self._put(LOSS, "loss", microbatch, Value(_array(result[0]), sum_over_context=len(result) == 3))
        if isinstance(result, tuple) and len(result) == 3:
            self._put(LOSS, "tokens", microbatch, Value(_array(result[1]), sum_over_context=True))
        return result

    def _hook(self, model: Any) -> None:
        modules = dict(model.named_modules())
        watched = ["self_attention", "mlp"]
        # On other stages the embedding is for multi-token prediction.
        watched += ["embedding"] if getattr(model, "pre_process", True) else []
        for path, module in modules.items():
            last = path.rpartition(".")[2]
            layer = last.isdigit() and hasattr(module, "layer_number")
            name = global_name(path, modules, self.place)
            if layer or last in watched:
                module.register_forward_hook(functools.partial(self._output, name))
            if layer or last in ("core_attention", "mlp"):
                module.register_forward_hook(functools.partial(self._repetition, name))

    def _output(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        output = _first(output)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        if self.current is None or Key(self.step, FORWARD, name, self.current) in self.record.values:
            return  # a second call of the module, as of the embedding for multi-token prediction
        self._note(FORWARD, name, self.current, output, 0)
        self._watch(output, name, self.current, 0)

    def _repetition(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        """Checks recomputations: a forward within a backward must repeat a forward of this step, including its random
        numbers."""
        output = _first(output)
        if not isinstance(output, torch.Tensor):
            return
        forwards = self.forwards.setdefault(name, [])
        if self.current is not None:
            forwards.append(_array(output))
        elif torch.is_grad_enabled() and forwards:
            again = _array(output)
            if not any(np.array_equal(again, before) for before in forwards):
                self.record.unrepeated.add(name)

    def _watch(self, output: torch.Tensor, name: str, microbatch: int, dim: int) -> None:
        """Records the gradient of ``output``, scaled as in one process: without the division of the loss for the mean
        over microbatches."""
        if not output.requires_grad:
            return
        factor = 1.0
        if not self.config.calculate_per_token_loss:
            factor = self.microbatches / self.place.size["CP"]
        output.register_hook(lambda grad: self._note(BACKWARD, name, microbatch, grad * factor, dim))

    def _note(self, kind: str, name: str, microbatch: int, tensor: torch.Tensor, dim: int) -> None:
        """Records a tensor. Its dimension ``dim`` is the sequence."""
        place = self.place
        length = tensor.shape[dim]
        positions = torch.arange(length)
        if not self.alone:
            positions = positions_of(self.sequence, place.rank["CP"], place.size["CP"])
            if length * place.size["TP"] == len(positions):
                positions = positions.chunk(place.size["TP"])[place.rank["TP"]]
            if length != len(positions):
                return
        self._put(kind, name, microbatch, Value(_array(tensor), {dim: positions.numpy()} if not self.alone else {}))

    def _put(self, kind: str, name: str, microbatch: int, value: Value) -> None:
        self.record.values.setdefault(Key(self.step, kind, name, microbatch), value)

    def _optimizer_step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.depth or not self.chunks:
            return original(optimizer, *args, **kwargs)
        self._before_step(getattr(optimizer, "param_groups", ()))
        self.depth += 1
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self.depth -= 1
        if isinstance(result, tuple) and len(result) > 1 and result[1] is not None:
            self._put(NORM, "gradient norm", -1, Value(np.asarray(float(result[1]))))
        if isinstance(result, tuple) and len(result) > 2 and isinstance(result[2], (int, float, torch.Tensor)):
            self._put(ZEROS, ZEROS, -1, Value(np.asarray(float(result[2]))))
        self._after_step(self.optimizers)
        return result

    def _before_plain_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Records a step of an optimizer of torch. Within a step of Megatron's optimizers, which call those of torch,
        it records nothing."""
        if not self.depth and self.chunks and not self.stepped:
            self._before_step(optimizer.param_groups)

    def _after_plain_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.depth and self.chunks and not self.stepped:
            self._after_step([optimizer])

    def _before_step(self, groups: Any) -> None:
        self._gradients()
        for name, value in states.schedule_values(groups).items():
            self._put(SCHEDULE, name, -1, Value(np.asarray(value)))

    def _after_step(self, optimizers: list[Any]) -> None:
        for name, key, state, parameter, begin in states.optimizer_states(optimizers, self.names):
            self._put(f"{_STATE}{key}", name, -1, self._state_value(name, state, parameter, begin))
        self.stepped = True
        self.step += 1
        self._parameters(PARAMETER)
        self._buffers(BUFFER, self.step - 1)
        if self.step == self.steps and not self.logging:
            raise SystemExit(0)  # all steps are recorded

    def _state_value(self, name: str, state: torch.Tensor, parameter: torch.nn.Parameter, begin: int) -> Value:
        """The value of a state. If the optimizer has only a part of the flat parameter, the rest is zeros."""
        if state.numel() == 1 and parameter.numel() != 1:
            return Value(_array(state.reshape(())))
        if state.numel() == parameter.numel():
            return Value(_array(state).reshape(tuple(parameter.shape)), self.parts.get(name, {}))
        part = _array(state).reshape(-1)
        flat = np.zeros(parameter.numel(), part.dtype)
        flat[begin : begin + len(part)] = part
        return Value(flat.reshape(tuple(parameter.shape)), self.parts.get(name, {}), (begin, begin + len(part)))

    def _buffers(self, kind: str, step: int) -> None:
        for chunk in self.chunks:
            for name, buffer in states.named_buffers(chunk, self.place):
                if name in self.parts:
                    numbers = _array(buffer.to_dense() if buffer.layout != torch.strided else buffer)
                    value = Value(numbers.astype(np.int64) if numbers.dtype == bool else numbers, self.parts[name])
                    self.record.values.setdefault(Key(step, kind, name), value)

    def _gradients(self) -> None:
        for chunk in self.chunks:
            for name, parameter in named_parameters(chunk, self.place):
                grad = getattr(parameter, "main_grad", parameter.grad)
                if grad is not None and name in self.parts:
                    self._put(GRADIENT, name, -1, Value(_array(grad), self.parts[name], own_range(chunk, parameter)))

    def _parameters(self, kind: str) -> None:
        """Records the parameters after a step, or, for RESTORED, before the next step."""
        step = self.step - (kind == PARAMETER)
        for chunk in self.chunks:
            if kind == PARAMETER and getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
                if self.step < self.steps:
                    return  # parameters are gathered in the next step's forward
                chunk.start_param_sync(force_sync=True)
            for name, parameter in named_parameters(chunk, self.place):
                if name in self.parts:
                    value = Value(_array(parameter.data), self.parts[name])
                    self.record.values.setdefault(Key(step, kind, name), value)


def _first(output: Any) -> Any:
    """The first output of a module."""
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return np.array((tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy())


def _subclasses(kind: type) -> list[Any]:
    below: list[type] = kind.__subclasses__()
    return [kind, *(one for child in below for one in _subclasses(child))]
