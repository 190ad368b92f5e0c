"""Training loops that do more than steps. `Case.loop` names one of the classes.

`lab.Run` makes a loop before its model. `notes` has further values of this rank, which are compared like losses and
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import rerun_state_machine as rerun
from megatron.core import tensor_parallel

Forward = Callable[[Any, torch.nn.Module], tuple[Any, Any]]


class Loop:
    """The plain loop. `config`: that of the model, which is made later. `forward`: the forward step of `lab`."""

    def __init__(self, config: Any, forward: Forward) -> None:
        self.config = config
        self.forward = forward
        self.notes: list[torch.Tensor] = []

    def wrapped(self, chunk: torch.nn.Module, build: Callable[..., torch.nn.Module]) -> torch.nn.Module:
        """The model chunk that is trained. `build(hidden=...)` makes another chunk of the first chunk's stage."""
        return chunk

    def iterators(self, data: list[torch.Tensor], chunks: int) -> list[Any]:
        return [iter(data) for _ in range(chunks)]

    def runs(self, iterators: list[Any]) -> Iterator[None]:
        """Yields once for each run of a step."""
        yield

    def evaluation(self) -> Any:
        """The context of an evaluation."""
        return torch.no_grad()

    def forward_step(self, data_iterator: Any, model: torch.nn.Module, *more: Any) -> tuple[Any, Any]:
        """The `forward_step_func` that the schedule gets."""
        assert not more
        return self.forward(data_iterator, model)

    def arguments(self) -> dict[str, Any]:
        """Further arguments of the schedule."""
        return {}


class PartialCheckpoints(Loop):
    """Partial recomputation. The third argument of the forward step says whether a microbatch recomputes all layers,
    and Megatron's layers follow it."""

    def __init__(self, config: Any, forward: Forward) -> None:
        super().__init__(config, forward)
        config.num_microbatches_with_partial_activation_checkpoints = 1
        config.recompute_method, config.recompute_num_layers = "uniform", 1

    def forward_step(self, data_iterator: Any, model: torch.nn.Module, *more: Any) -> tuple[Any, Any]:
        (every_layer,) = more
        self.notes.append(torch.tensor(bool(every_layer)))
        self.config.recompute_granularity = "full" if every_layer else None
        try:
            return self.forward(data_iterator, model)
        finally:
            self.config.recompute_granularity = None


class Forces(Loop):
    """An evaluation with gradients enabled, whose forward takes gradients itself, as a force field does."""

    def __init__(self, config: Any, forward: Forward) -> None:
        super().__init__(config, forward)
        self.evaluates = False

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        self.evaluates = True
        yield
        self.evaluates = False

    def forward_step(self, data_iterator: Any, model: torch.nn.Module, *more: Any) -> tuple[Any, Any]:
        output, loss_func = super().forward_step(data_iterator, model, *more)
        if self.evaluates:
            received = model.module.decoder.input_tensor
            of = [next(model.parameters()), *([] if received is None else [received])]
            self.notes += [g.clone() for g in torch.autograd.grad(output.sum(), of)]
        return output, loss_func


class Rerun(Loop):
    """Megatron's rerun state machine rejects a loss in every step except the first, and runs the step again."""

    def __init__(self, config: Any, forward: Forward) -> None:
        super().__init__(config, forward)
        rerun.destroy_rerun_state_machine()
        tracker = tensor_parallel.get_cuda_rng_tracker()
        rerun.initialize_rerun_state_machine(
            mode=rerun.RerunMode.VALIDATE_RESULTS,
            state_save_func=tracker.get_states,
            state_restore_func=tracker.set_states,
        )
        self.machine = rerun.get_rerun_state_machine()

    def iterators(self, data: list[torch.Tensor], chunks: int) -> list[Any]:
        return [rerun.RerunDataIterator(iterator) for iterator in super().iterators(data, chunks)]

    def runs(self, iterators: list[Any]) -> Iterator[None]:
        count = 0
        while self.machine.should_run_forward_backward(iterators):
            count += 1
            yield
        self.notes.append(torch.tensor(count))
        assert self.machine.should_checkpoint_and_exit() == (False, False, 0)

    def forward_step(self, data_iterator: Any, model: torch.nn.Module, *more: Any) -> tuple[Any, Any]:
        output, loss_func = super().forward_step(data_iterator, model, *more)

        def validated(output: torch.Tensor) -> tuple[Any, ...]:
            reported = loss_func(output)
            loss = reported[0].detach().clone()
            self.machine.validate_result(loss, lambda loss: True, "loss", self._compared, fatal=False)
            return reported

        return output, validated

    def _compared(self, first: torch.Tensor, second: torch.Tensor) -> float:
        self.notes += [first, second]
        assert torch.equal(first, second), "a step that runs again sees the same data and random numbers"
        return 0.0


class TwoModels(torch.nn.Module):
    """A student, in `module`, and a frozen teacher of another width, which runs through the same pipeline."""

    def __init__(self, student: torch.nn.Module, teacher: torch.nn.Module) -> None:
        super().__init__()
        self.module = student
        self.teacher = teacher.requires_grad_(False)
        self.config = student.config
        self.widths = [model.config.hidden_size for model in (student, teacher)]

    def set_input_tensor(self, given: Any) -> None:
        (given,) = given if isinstance(given, list) else (given,)
        parts = (None, None) if given is None else given.split(self.widths, dim=-1)
        for model, part in zip((self.module, self.teacher), parts, strict=True):
            model.set_input_tensor(None if part is None else part.contiguous())

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        ours = self.module(*args, **kwargs)
        with torch.no_grad():
            theirs = self.teacher(*args, **kwargs)
        if self.module.post_process:  # losses per token
            return ours + 0.5 * (ours - theirs) ** 2
        return torch.cat([ours, theirs], dim=-1)


TEACHER = 24  # its hidden size


class Distillation(Loop):
    """Distillation: a message between stages has the widths of student and teacher together, as
    `adjust_tensor_shapes_fn` says."""

    def wrapped(self, chunk: torch.nn.Module, build: Callable[..., torch.nn.Module]) -> torch.nn.Module:
        return TwoModels(chunk, build(hidden=TEACHER))

    def arguments(self) -> dict[str, Any]:
        def adjust(receive: list[Any], send: list[Any]) -> tuple[list[Any], list[Any]]:
            return tuple([(*shape[:-1], shape[-1] + TEACHER) for shape in shapes] for shapes in (receive, send))

        return {"adjust_tensor_shapes_fn": adjust}


LOOPS: dict[str, type[Loop]] = {
    "plain": Loop,
    "partial checkpoints": PartialCheckpoints,
    "forces": Forces,
    "rerun": Rerun,
    "distillation": Distillation,
}
