"""Records the calls of a schedule, in order: Megatron's step functions, the config's hooks, timers and finalisation.

Two engines that call the hooks at the same places leave the same list of lines on every rank.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel import schedules


class Timers:
    """Replaces Megatron's timers: `timers(name, log_level=...).start(barrier=...)` and `.stop()` become lines."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.name = ""

    def __call__(self, name: str, log_level: int | None = None) -> Timers:
        self.name = f"{name}/{log_level}" if log_level is not None else name
        return self

    def start(self, barrier: bool = False) -> None:
        self.lines.append(f"timer {self.name} start barrier={barrier}")

    def stop(self, barrier: bool = False) -> None:
        self.lines.append(f"timer {self.name} stop")


def _forward(lines: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        logged = ("vp_stage", "current_microbatch", "is_first_microbatch", "checkpoint_activations_microbatch")
        logged += ("is_last_stage", "cp_group_size", "collect_non_loss_data", "num_microbatches")
        input_tensor = _one(values["input_tensor"])
        lines.append("forward " + " ".join(f"{n}={values[n]}" for n in logged) + f" input={input_tensor is not None}")
        return original(*args, **kwargs)

    return forward_step


def _backward(lines: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, *args: Any, **kwargs: Any) -> Any:
        given = [_one(x) is not None for x in (input_tensor, output_tensor, output_tensor_grad)]
        lines.append(f"backward input={given[0]} output={given[1]} grad={given[2]}")
        return original(input_tensor, output_tensor, output_tensor_grad, *args, **kwargs)

    return backward_step


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


def _noted(lines: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        lines.append(name)
        return original(*args, **kwargs)

    return function


def _finalize(lines: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    def finalize_model_grads(model: Any, num_tokens: Any = None, **kwargs: Any) -> Any:
        tokens = None if num_tokens is None else int(num_tokens)
        groups = sorted(vars(next(v for k, v in kwargs.items() if k != "force_all_reduce")))
        lines.append(f"finalize chunks={len(model)} tokens={tokens} keywords={sorted(kwargs)} groups={groups}")
        return original(model, num_tokens, **kwargs)

    return finalize_model_grads


def _no_sync(lines: list[str], chunk: int, original: Callable[[], Any]) -> Callable[[], Any]:
    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        lines.append(f"no_sync {chunk} enter")
        with original():
            yield
        lines.append(f"no_sync {chunk} exit")

    return no_sync


def hook_config(config: Any, chunks: list[torch.nn.Module], lines: list[str]) -> None:
    """Wrap the hooks of the config so that their calls become lines."""
    config.timers = Timers(lines)
    config.finalize_model_grads_func = _finalize(lines, config.finalize_model_grads_func)
    for field in ("no_sync_func", "grad_sync_func", "param_sync_func"):
        hooks = getattr(config, field)
        if hooks is None:
            continue
        several = hooks if isinstance(hooks, list) else [hooks]
        wrap = _no_sync if field == "no_sync_func" else lambda lines, i, f: _noted(lines, f"{field} {i}", f)  # noqa: B023
        wrapped = [wrap(lines, index, hook) for index, hook in enumerate(several)]
        setattr(config, field, wrapped if isinstance(hooks, list) else wrapped[0])


@contextlib.contextmanager
def recording(lines: list[str]) -> Iterator[None]:
    """A context in which calls of Megatron's step functions, and of a schedule's functions around them, become
    lines."""
    with contextlib.ExitStack() as stack:
        for name, wrap in (("forward_step", _forward), ("backward_step", _backward)):
            stack.enter_context(mock.patch.object(schedules, name, wrap(lines, getattr(schedules, name))))
        for name in ("clear_embedding_activation_buffer", "finish_embedding_wgrad_compute"):
            original = getattr(schedules, name)
            stack.enter_context(mock.patch.object(schedules, name, _noted(lines, name, original)))
        stack.enter_context(
            mock.patch.object(
                schedules, "create_cudagraphs", mock.Mock(side_effect=lambda: lines.append("create_cudagraphs"))
            )
        )
        if hasattr(schedules, "off_interface"):
            reset = mock.Mock(side_effect=lambda *args, **kwargs: lines.append("offload reset"))
            stack.enter_context(mock.patch.object(schedules.off_interface, "reset", reset))
        yield
