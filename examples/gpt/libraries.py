"""Which library each part of training comes from: torch, NVIDIA apex, or Transformer Engine.

Chosen before any communication. Asked for and absent is an error; ``auto`` takes the fused form where it is there, on a
GPU. apex and Transformer Engine are called as documented; neither has been run here on a GPU so far.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from examples.gpt.errors import ArgumentError
from examples.gpt.layers import LayerParts
from examples.gpt.settings import Settings
from examples.gpt.transformer_engine_layers import TransformerEngineParts
from megatron_pp.config.model_config import TransformerConfig

_FP8_MULTIPLE = 16  # Transformer Engine: both dimensions of every matrix product in FP8
# --fp8-recipe: its class, and the function that says whether the GPU supports it.
_RECIPES = {
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "tensorwise": ("Float8CurrentScaling", "is_fp8_available"),
    "blockwise": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
}
_INSTALL = {
    "apex": "build it from NVIDIA's source with its CUDA extensions (the package apex on PyPI is something else)",
    "transformer_engine": "install transformer_engine[pytorch]",
}


class Libraries(NamedTuple):
    """The choice: ``make_parts`` takes the process group of the replicas, or None; ``said`` is for the log."""

    make_parts: Callable[[Any], LayerParts]
    fused_adam: Any | None
    said: tuple[str, ...]


def choose_libraries(settings: Settings, config: TransformerConfig, device: torch.device, split: bool) -> Libraries:
    """Choose as the settings say; ``split``: the schedule has weight-gradient operations.

    Raises ArgumentError: a library that was asked for is not there, needs a GPU, or cannot do what is asked of it.
    """
    fused_adam = _find(settings.optimizer_impl, "--optimizer-impl", "apex", "apex.optimizers", "FusedAdam", device)
    optimizer = "apex FusedAdam" if fused_adam else f"torch AdamW (fused={device.type == 'cuda'})"
    if settings.transformer_impl == "transformer_engine":
        make_parts, layers = _transformer_engine(settings, config, device, split)
    elif settings.fp8 is not None:
        raise ArgumentError(f"--fp8 is {settings.fp8}, which --transformer-impl transformer_engine alone can compute in")
    else:
        norm, layers = torch.nn.LayerNorm, "layers: torch; norms: torch LayerNorm"
        choices = ("apex", "apex.normalization", "FusedLayerNorm"), ("transformer_engine",) * 1
        for library, module, name in (
            ("apex", "apex.normalization", "FusedLayerNorm"),
            ("transformer_engine", "transformer_engine.pytorch", "LayerNorm"),
        ):
            found = _find(settings.norm_impl, "--norm-impl", library, module, name, device)
            if found is not None:
                norm, layers = found, f"layers: torch; norms: {library} {name}"
                break
        make_parts = lambda _: LayerParts(norm)  # noqa: E731
    return Libraries(make_parts, fused_adam, (layers, f"optimizer: {optimizer}"))


def _transformer_engine(
    settings: Settings, config: TransformerConfig, device: torch.device, split: bool
) -> tuple[Callable[[Any], LayerParts], str]:
    te = _required("--transformer-impl", "transformer_engine", "transformer_engine.pytorch", device)
    if settings.norm_impl not in ("auto", "transformer_engine"):
        raise ArgumentError(
            f"--norm-impl is {settings.norm_impl}, but the norms of --transformer-impl transformer_engine are inside of "
            "its layers; leave --norm-impl out"
        )
    if split and "delay_wgrad_compute" not in inspect.signature(te.Linear.__init__).parameters:
        raise ArgumentError(
            f"--pipeline-schedule {config.schedule_name} splits backwards, for which this release of Transformer Engine "
            "is too old (its layers take no delay_wgrad_compute); install 2.3 or later, or choose another schedule"
        )
    recipe = None if settings.fp8 is None else _fp8_recipe(te, settings, config)
    version = getattr(importlib.import_module("transformer_engine"), "__version__", "of unknown version")
    precision = "no FP8" if recipe is None else f"FP8 {settings.fp8}, {settings.fp8_recipe} scaling"
    said = f"layers: Transformer Engine {version} ({precision})"
    return lambda replicas: TransformerEngineParts(te, device, split, recipe, replicas), said


def _fp8_recipe(te: Any, settings: Settings, config: TransformerConfig) -> Any:
    """The recipe object. Raises ArgumentError where sizes, release or GPU do not allow it."""
    sizes = {
        "--hidden-size": config.hidden_size,
        "--ffn-hidden-size": config.ffn_hidden_size or 0,
        "--seq-length times --micro-batch-size": settings.seq_length * settings.micro_batch_size,
    }
    for name, size in sizes.items():
        if size % _FP8_MULTIPLE:
            raise ArgumentError(f"{name} is {size}; matrix products in FP8 need a multiple of {_FP8_MULTIPLE}")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    kind, support = _RECIPES[settings.fp8_recipe]
    if not hasattr(recipes, kind):
        known = ", ".join(name for name, (cls, _) in _RECIPES.items() if hasattr(recipes, cls))
        raise ArgumentError(
            f"--fp8-recipe is {settings.fp8_recipe}, which this release of Transformer Engine does not have; it has {known}"
        )
    if hasattr(te, support):
        supported, why = getattr(te, support)(return_reason=True)
    else:  # before 2.9
        manager = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
        supported, why = getattr(manager, support)()
    if not supported:
        raise ArgumentError(f"--fp8-recipe {settings.fp8_recipe} is not supported by this GPU: {why}")
    return getattr(recipes, kind)(fp8_format=getattr(recipes.Format, str(settings.fp8).upper()))


def _find(wanted: str, flag: str, library: str, module: str, name: str, device: torch.device) -> Any | None:
    """``module.name`` where it is wanted, or to be taken where it is there; else None."""
    if wanted == library:
        found = getattr(_required(flag, library, module, device), name, None)
        if found is None:
            raise ArgumentError(f"{flag} is {library}, but {module} has no {name}; {_INSTALL[library]}")
        return found
    if wanted != "auto" or device.type != "cuda":
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # a half-built extension raises what it likes
        return None


def _required(flag: str, library: str, module: str, device: torch.device) -> Any:
    if device.type != "cuda":
        raise ArgumentError(f"{flag} is {library}, which computes on GPUs alone; leave {flag} out, or use one per process")
    try:
        return importlib.import_module(module)
    except Exception as error:  # a half-built extension raises what it likes
        raise ArgumentError(f"{flag} is {library}, but {module} cannot be imported ({error}); {_INSTALL[library]}") from error
