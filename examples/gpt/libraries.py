"""Which library each part of training comes from: torch, NVIDIA apex, or Transformer Engine.

Chosen before any communication, from what can be imported here and from the device. Asked for and absent is an error;
``auto`` takes the fused form where it is there, and says what it took. apex and Transformer Engine are written against
as documented; neither has been run here on a GPU so far.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from examples.gpt.arguments import RunArguments
from examples.gpt.blocks import NormFactory, layer_norm
from examples.gpt.errors import ArgumentError
from examples.gpt.optimizer import Adam, ApexAdamW, TorchAdamW
from examples.gpt.parts import LayerParts, LocalParts
from examples.gpt.transformer_engine_layers import Fp8, TransformerEngineParts
from megatron_pp.config.model_config import TransformerConfig

AUTO, APEX, TRANSFORMER_ENGINE = "auto", "apex", "transformer_engine"

_FP8_MULTIPLE = 16  # Transformer Engine: both dimensions of every matrix product in FP8
_RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
_SUPPORT = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
_INSTALL = {
    APEX: "build it from NVIDIA's source with its CUDA extensions (the package apex on PyPI is something else)",
    TRANSFORMER_ENGINE: "install transformer_engine[pytorch]",
}


@dataclass(frozen=True)
class Libraries:
    """What was chosen.

    Attributes:
        make_parts: (process group of the replicas, or None) -> what GPT stages are built from.
        adam: the optimizer.
        told: lines for the start of the run.
    """

    make_parts: Callable[[Any], LayerParts]
    adam: Adam
    told: tuple[str, ...]


def choose_libraries(
    run: RunArguments, config: TransformerConfig, device: torch.device, splits_backward: bool
) -> Libraries:
    """Choose as the command line says. ``splits_backward``: the schedule has weight-gradient operations.

    Raises:
        ArgumentError: a library that was asked for is not there, needs a GPU, or can not do what is asked of it.
    """
    adam, optimizer_line = _choose_adam(run.optimizer_impl, device)
    if run.transformer_impl == TRANSFORMER_ENGINE:
        make_parts, layer_line = _transformer_engine_parts(run, config, device, splits_backward)
        if run.norm_impl not in (AUTO, TRANSFORMER_ENGINE):
            raise ArgumentError(
                f"--norm-impl is {run.norm_impl}, but the norms of --transformer-impl transformer_engine are inside of "
                "its layers; leave --norm-impl out"
            )
        return Libraries(make_parts, adam, (layer_line, optimizer_line))
    if run.fp8 is not None:
        raise ArgumentError(f"--fp8 is {run.fp8}, which --transformer-impl transformer_engine alone can compute in")
    norm, norm_line = _choose_norm(run.norm_impl, device)
    return Libraries(lambda _: LocalParts(norm), adam, (f"layers: torch; {norm_line}", optimizer_line))


# -- optimizer ---------------------------------------------------------------------------------------------------------


def _choose_adam(wanted: str, device: torch.device) -> tuple[Adam, str]:
    found = _attribute(wanted, "--optimizer-impl", APEX, "apex.optimizers", "FusedAdam", device)
    if found is not None:
        return ApexAdamW(found), "optimizer: apex FusedAdam"
    fused = device.type == "cuda"
    return TorchAdamW(fused), f"optimizer: torch AdamW (fused={fused})"


# -- norms -------------------------------------------------------------------------------------------------------------


def _choose_norm(wanted: str, device: torch.device) -> tuple[NormFactory, str]:
    for library, module, name in (
        (APEX, "apex.normalization", "FusedLayerNorm"),
        (TRANSFORMER_ENGINE, "transformer_engine.pytorch", "LayerNorm"),
    ):
        found = _attribute(wanted, "--norm-impl", library, module, name, device)
        if found is not None:
            return _Norm(found), f"norms: {library} {name}"
    return layer_norm, "norms: torch LayerNorm"


@dataclass(frozen=True)
class _Norm:
    """A library's norm, whose second argument has a name of its own in each."""

    kind: Any

    def __call__(self, hidden_size: int, epsilon: float) -> torch.nn.Module:
        norm: torch.nn.Module = self.kind(hidden_size, eps=epsilon)
        return norm


# -- Transformer Engine ------------------------------------------------------------------------------------------------


def _transformer_engine_parts(
    run: RunArguments, config: TransformerConfig, device: torch.device, splits_backward: bool
) -> tuple[Callable[[Any], LayerParts], str]:
    flag = "--transformer-impl"
    te = _required(flag, TRANSFORMER_ENGINE, "transformer_engine.pytorch")
    _check_gpu(flag, TRANSFORMER_ENGINE, device)
    if splits_backward and "delay_wgrad_compute" not in inspect.signature(te.Linear.__init__).parameters:
        raise ArgumentError(
            f"--pipeline-schedule {config.schedule_name} splits backwards, which this release of Transformer Engine "
            "can not (its layers take no delay_wgrad_compute); install 2.3 or later, or choose another schedule"
        )
    recipe = None if run.fp8 is None else _fp8_recipe(te, run, config)

    def make_parts(replicas: Any) -> LayerParts:
        fp8 = None if recipe is None else Fp8(recipe, replicas)
        return TransformerEngineParts(te, device, splits_backward, fp8)

    version = getattr(importlib.import_module("transformer_engine"), "__version__", "of unknown version")
    precision = "no FP8" if run.fp8 is None else f"FP8 {run.fp8}, {run.fp8_recipe} scaling"
    return make_parts, f"layers: Transformer Engine {version} ({precision})"


def _fp8_recipe(te: Any, run: RunArguments, config: TransformerConfig) -> Any:
    """The recipe object, once it is known that it can be used."""
    sizes = {
        "--hidden-size": config.hidden_size,
        "--ffn-hidden-size": config.ffn_hidden_size or 0,
        "--seq-length times --micro-batch-size": run.seq_length * run.micro_batch_size,
    }
    for name, size in sizes.items():
        if size % _FP8_MULTIPLE:
            raise ArgumentError(f"{name} is {size}; matrix products in FP8 need a multiple of {_FP8_MULTIPLE}")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    kind = getattr(recipes, _RECIPES[run.fp8_recipe], None)
    if kind is None:
        known = ", ".join(name for name, cls in _RECIPES.items() if hasattr(recipes, cls))
        raise ArgumentError(
            f"--fp8-recipe is {run.fp8_recipe}, which this release of Transformer Engine does not have; it has {known}"
        )
    supported, why = _fp8_support(te, run.fp8_recipe)
    if not supported:
        raise ArgumentError(f"--fp8 is {run.fp8} with --fp8-recipe {run.fp8_recipe}, which this GPU can not: {why}")
    return kind(fp8_format=getattr(recipes.Format, str(run.fp8).upper()))


def _fp8_support(te: Any, recipe: str) -> tuple[bool, str]:
    """Whether the GPU can, and why not."""
    asked = getattr(te, _SUPPORT[recipe], None)
    if asked is None:  # before 2.9
        manager = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
        found = getattr(manager, _SUPPORT[recipe])()
    else:
        found = asked(return_reason=True)
    return bool(found[0]), str(found[1])


# -- what is there -----------------------------------------------------------------------------------------------------


def _attribute(wanted: str, flag: str, library: str, module: str, name: str, device: torch.device) -> Any | None:
    """``module.name`` where it is wanted, or to be taken where it is there; else None."""
    if wanted == library:
        found = getattr(_required(flag, library, module), name, None)
        if found is None:
            raise ArgumentError(f"{flag} is {library}, but {module} has no {name}; {_INSTALL[library]}")
        _check_gpu(flag, library, device)
        return found
    if wanted != AUTO or device.type != "cuda":
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # a half-built extension raises what it likes
        return None


def _required(flag: str, library: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a half-built extension raises what it likes
        raise ArgumentError(
            f"{flag} is {library}, but {module} can not be imported ({error}); {_INSTALL[library]}, or leave {flag} out"
        ) from error


def _check_gpu(flag: str, library: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise ArgumentError(
            f"{flag} is {library}, which computes on GPUs alone, and this run is on {device.type}; leave {flag} out, "
            "or start with a GPU for each process"
        )
