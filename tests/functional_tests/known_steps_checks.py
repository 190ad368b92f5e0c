"""Microbatches run by Megatron's own `forward_step` and `backward_step`, and by `KnownSteps`, which replaces them.

Runs inside the processes of testkit/megatron/runner.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_pp.integrations.megatron.releases.release import load_megatron
from megatron_pp.integrations.megatron.steps.forward_backward import MegatronSteps
from megatron_pp.integrations.megatron.steps.known_steps import KnownSteps
from testkit.megatron.cases import Case

SHAPE = (1, 2, 2)
LAST: dict[str, Any] = {"is_last": True}
SCENARIOS: dict[str, dict[str, Any]] = {
    "first stage": {"inputs": 0},
    "middle stage": {},
    "outputs that are not freed": {"deallocate_pipeline_outputs": False},
    "two inputs": {"inputs": 2},
    "two outputs, of which the first has a gradient": {"outputs": 2},
    "an output without a gradient": {"needs_grad": False},
    "mean loss": LAST,
    "loss per token": {**LAST, "loss": "tokens"},
    "loss per token, divided later": {**LAST, "loss": "tokens", "calculate_per_token_loss": True},
    "loss of two context ranks, scaled": {**LAST, "cp_size": 2, "grad_scale_func": lambda loss: loss * 8},
    "whatever the loss function gives": {**LAST, "loss": "data", "collect_non_loss_data": True, "forward_only": True},
    "autocast": {"enable_autocast": True, "autocast_dtype": torch.bfloat16},
    "experts": {"num_moe_experts": 2, "cp_size": 2, "grad_scale_func": lambda loss: loss * 8},
    "experts on the last stage": {**LAST, "num_moe_experts": 2},
    "tokens beyond the next": {"mtp_num_layers": 1, "calculate_per_token_loss": True},
    "a scaled attention loss": {"experimental_attention_variant_loss_scale_func": True},
    "timers": {"timers": True},
    "timers on the last stage": {**LAST, "timers": True},
    "checkpointed microbatches": {"checkpoint_flags": {(0, 0): False, (0, 1): True}},
    "first validation": {"forward_only": True, "first_val_step": True},
    "second validation": {"forward_only": True, "first_val_step": False},
    "a decoder in two wrappers": {"wrappers": 2, "decoder": True},
    "a decoder with further tokens": {"decoder": True, "mtp": True},
    "a model of pictures": {"vision": True},
    "another chunk's model": {"vp_stage": 1},
}


class Layer(torch.nn.Module):
    current_microbatch: int | None = None


class Stage(torch.nn.Module):
    """Multiplies the sum of its inputs by a weight, and writes down what a schedule does to it."""

    def __init__(self, lines: list[str], scenario: dict[str, Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.3, 1.7, 4).view(SHAPE))
        self.lines = lines
        self.outputs = scenario.get("outputs", 1)
        self.needs_grad = scenario.get("needs_grad", True)
        self.numbered = torch.nn.ModuleList(Layer() for _ in range(2))
        if scenario.get("decoder"):
            self.decoder = SimpleNamespace(layers=self.numbered[:1])
        if scenario.get("mtp"):
            both = {"transformer_layer": self.numbered[1], "mtp_model_layer": self.numbered[1]}
            self.mtp = SimpleNamespace(layers=[SimpleNamespace(**both)])
        if scenario.get("vision"):
            self.vision_model = SimpleNamespace(decoder=SimpleNamespace(layers=self.numbered))

    def set_input_tensor(self, tensors: Any) -> None:
        self.lines.append(f"{len(tensors)} given in a {type(tensors).__name__}")
        self.given = tensors

    def drop_received(self) -> None:
        self.lines.append("dropped")

    def forward(self, x: torch.Tensor) -> Any:
        self.lines.append(f"numbers {[layer.current_microbatch for layer in self.numbered]}")
        h = sum((t for t in self.given if t is not None), x) * self.weight
        h = (h @ self.weight.transpose(1, 2)).float() * h
        h = h if self.needs_grad else h.detach()
        return h if self.outputs == 1 else [h + k for k in range(self.outputs)]


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, lines: list[str]) -> None:
        super().__init__()
        self.module = module
        self.lines = lines

    def set_is_first_microbatch(self) -> None:
        self.lines.append("first microbatch")

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


class Timers:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __call__(self, name: str, **arguments: Any) -> Any:
        self.lines.append(f"timer {name} {arguments}")
        return SimpleNamespace(start=lambda: self.lines.append("start"), stop=lambda: self.lines.append("stop"))


def _loss_of(kind: str) -> Any:
    def loss_func(output: torch.Tensor, **arguments: Any) -> Any:
        loss = output.sum()
        report = {"loss": loss.detach().clone()}
        if kind == "data":
            return {"data": output, **arguments}
        return (loss, report) if kind == "mean" else (loss, torch.tensor(5, dtype=torch.int), report)

    return loss_func


def _config(lines: list[str], scenario: dict[str, Any]) -> Any:
    fields: dict[str, Any] = {
        "timers": None, "enable_autocast": False, "autocast_dtype": None, "grad_scale_func": None,
        "deallocate_pipeline_outputs": True, "calculate_per_token_loss": False, "num_moe_experts": None,
        "mtp_num_layers": None,
    }  # fmt: skip
    fields |= {name: value for name, value in scenario.items() if name in fields}
    if scenario.get("timers"):
        fields["timers"] = Timers(lines)
    if "experimental_attention_variant_loss_scale_func" in scenario:
        fields["experimental_attention_variant_loss_scale_func"] = lambda scale: lines.append(f"attention {scale}")
    return SimpleNamespace(**fields)


def _call(lines: list[str], scenario: dict[str, Any]) -> Any:
    """Return a Step with the attributes that both of them read."""
    chunk: Any = Stage(lines, scenario)
    for _ in range(scenario.get("wrappers", 1)):
        chunk = Wrapper(chunk, lines)
    chunk.vp_stage = scenario.get("vp_stage", 0)

    def forward_step(iterator: Any, model: Any, *more: Any) -> tuple[Any, Any]:
        lines.append(f"forward {more}")
        return model(next(iterator)), _loss_of(scenario.get("loss", "mean"))

    inputs = SimpleNamespace(
        forward_step_func=forward_step, chunks=[chunk], chunked=True, num_microbatches=3,
        data_iterators=[iter([torch.full(SHAPE, 0.1 * k) for k in range(1, 3)])],
        forward_only=scenario.get("forward_only", False), first_val_step=scenario.get("first_val_step"),
        collect_non_loss_data=scenario.get("collect_non_loss_data", False),
    )  # fmt: skip
    inputs.config = config = _config(lines, scenario)
    communicator = SimpleNamespace(device=torch.device("cpu"), size=2)
    of_rank = SimpleNamespace(
        is_last_stage=[scenario.get("is_last", False)], checkpoint_flags=scenario.get("checkpoint_flags")
    )
    return SimpleNamespace(
        inputs=inputs, config=config, settings=config, communicator=communicator, of_rank=of_rank,
        cp_size=scenario.get("cp_size", 1),
    )  # fmt: skip


def _bits(value: Any) -> Any:
    """Return a value that is equal for two tensors of equal bits, type and shape."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().double().tolist(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_bits, value)]
    return {name: _bits(item) for name, item in value.items()} if isinstance(value, dict) else value


def microbatches(kind: type[KnownSteps] | type[MegatronSteps], scenario: dict[str, Any]) -> list[Any]:
    """Return the results of two microbatches, and the calls that were made for them, in order."""
    lines: list[Any] = []
    call, last, inputs = _call(lines, scenario), scenario.get("is_last", False), scenario.get("inputs", 1)
    MoEAuxLossAutoScaler.main_loss_backward_scale = MTPLossAutoScaler.main_loss_backward_scale = None
    try:
        known = kind is KnownSteps
        steps: Any = kind(load_megatron(), call, *(() if known else (call.config,)))
        for mb in range(2):
            tensors = [torch.full(SHAPE, 0.7 + k + mb, requires_grad=True) for k in range(inputs)]
            given: Any = tensors if inputs > 1 else tensors[0] if inputs else None
            output = steps.forward(0, mb, given)
            lines.append(_bits(output))
            if not call.inputs.forward_only:
                outputs = output if isinstance(output, list) else [output]
                grads = [torch.linspace(-1, 1, item.numel()).view(item.shape) for item in outputs]
                grad = None if last else grads if isinstance(output, list) else grads[0]
                if not last and call.config.deallocate_pipeline_outputs and mb == 0:  # the other is still being sent
                    output = steps.backward_root(output)
                lines.append(_bits(steps.backward(0, mb, given, output, grad)))
    except AssertionError as error:
        return [*lines, str(error)]
    lines += [_bits(parameter.grad) for parameter in call.inputs.chunks[0].parameters()]
    scales = MoEAuxLossAutoScaler.main_loss_backward_scale, MTPLossAutoScaler.main_loss_backward_scale
    return [*lines, *map(_bits, (steps.record.data, steps.record.num_tokens, scales))]


def run_as_megatrons(case: Case) -> None:
    """Assert that numbers, reports and calls are Megatron's in each scenario, and replaced functions are called."""
    assert load_megatron().has_known_steps()
    for name, scenario in SCENARIOS.items():
        theirs = microbatches(MegatronSteps, scenario)
        assert microbatches(KnownSteps, scenario) == theirs, f"{name}: {theirs}"
        assert theirs.count("dropped") == (0 if name == "another chunk's model" else 2), f"{name}: {theirs}"
    schedules = load_megatron().schedules
    functions = "forward_step", "backward_step", "forward_step_calc_loss", "set_current_microbatch"
    for function in functions:
        with mock.patch.object(schedules, function):
            assert not load_megatron().has_known_steps()
    assert load_megatron().has_known_steps()
    with mock.patch.multiple(schedules, **dict.fromkeys(functions, mock.DEFAULT)) as called:
        microbatches(KnownSteps, {})
    assert not any(one.called for one in called.values()), "a stage without a loss needs none of them"
