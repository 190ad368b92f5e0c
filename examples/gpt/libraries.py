"""Which library each part of training comes from: torch, NVIDIA apex, or Transformer Engine.

Chosen before any communication. Asked for and absent is an error; ``auto`` takes the fused form where it is there, on a
GPU. apex and Transformer Engine are called as documented; neither has been run here on a GPU so far.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from examples.gpt.errors import ArgumentError
from examples.gpt.layers import LayerParts
from examples.gpt.settings import Settings
from examples.gpt.transformer_engine_layers import TransformerEngineParts

_NORMS = {
    "apex": ("apex.normalization", "FusedLayerNorm"),
    "transformer_engine": ("transformer_engine.pytorch", "LayerNorm"),
}
_RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
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


def choose_libraries(settings: Settings, device: torch.device, split: bool) -> Libraries:
    """Choose as the settings say; ``split``: the schedule has weight-gradient operations.

    Raises ArgumentError: a library that was asked for is not there, or needs a GPU.
    """
    on_gpu = device.type == "cuda"
    fused_adam = _find("--optimizer-impl", settings.optimizer_impl, "apex", "apex.optimizers", "FusedAdam", on_gpu)
    optimizer = "apex FusedAdam" if fused_adam else f"torch AdamW (fused={on_gpu})"
    if settings.transformer_impl == "transformer_engine":
        make_parts, layers = _transformer_engine(settings, device, split)
    elif settings.fp8 is not None:
        raise ArgumentError(f"--fp8 is {settings.fp8}, which needs --transformer-impl transformer_engine")
    else:
        norms = [("torch LayerNorm", torch.nn.LayerNorm)]
        for library, (module, name) in _NORMS.items():
            norms.append((f"{library} {name}", _find("--norm-impl", settings.norm_impl, library, module, name, on_gpu)))
        said, norm = next(((said, norm) for said, norm in norms[1:] if norm is not None), norms[0])
        make_parts, layers = (lambda _: LayerParts(norm)), f"layers: torch; norms: {said}"
    return Libraries(make_parts, fused_adam, (layers, f"optimizer: {optimizer}"))


def _transformer_engine(
    settings: Settings, device: torch.device, split: bool
) -> tuple[Callable[[Any], LayerParts], str]:
    name, flag, on_gpu = "transformer_engine", "--transformer-impl", device.type == "cuda"
    if settings.norm_impl not in ("auto", name):
        inside = f"the norms of --transformer-impl {name} are inside of its layers; leave --norm-impl out"
        raise ArgumentError(f"--norm-impl is {settings.norm_impl}, but {inside}")
    te, recipe = _required(flag, name, f"{name}.pytorch", on_gpu), None
    if settings.fp8 is not None:
        recipes = _required(flag, name, f"{name}.common.recipe", on_gpu)
        known = [recipe for recipe, kind in _RECIPES.items() if hasattr(recipes, kind)]
        if settings.fp8_recipe not in known:
            lacks = f"which this release of Transformer Engine does not have; it has {', '.join(known)}"
            raise ArgumentError(f"--fp8-recipe is {settings.fp8_recipe}, {lacks}")
        kind = getattr(recipes, _RECIPES[settings.fp8_recipe])
        recipe = kind(fp8_format=getattr(recipes.Format, settings.fp8.upper()))
    version = getattr(importlib.import_module(name), "__version__", "of unknown version")
    precision = "no FP8" if recipe is None else f"FP8 {settings.fp8}, {settings.fp8_recipe} scaling"
    said = f"layers: Transformer Engine {version} ({precision})"
    return lambda replicas: TransformerEngineParts(te, device, split, recipe, replicas), said


def _find(flag: str, wanted: str, library: str, module: str, name: str, on_gpu: bool) -> Any | None:
    """``module.name`` where it is wanted, or ``auto`` and there; else None."""
    if wanted == library:
        return getattr(_required(flag, library, module, on_gpu), name)
    if wanted != "auto" or not on_gpu:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # a half-built extension raises what it likes
        return None


def _required(flag: str, library: str, module: str, on_gpu: bool) -> Any:
    if not on_gpu:
        raise ArgumentError(f"{flag} is {library}, which computes on GPUs alone; leave {flag} out")
    try:
        return importlib.import_module(module)
    except Exception as error:  # a half-built extension raises what it likes
        advice = f"{_INSTALL[library]}, or leave {flag} out"
        raise ArgumentError(f"{flag} is {library}, but {module} cannot be imported ({error}); {advice}") from error
