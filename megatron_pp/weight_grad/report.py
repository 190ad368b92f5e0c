"""How each layer of a model was converted, and which share of the weight gradients' compute cannot wait for W."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WholeLayer:
    """A layer that computes its weight gradients in the backward."""

    name: str  # the layer's name in its chunk
    kind: str  # the layer's class
    reason: str
    share: float  # its part of the FLOPs of this rank's weight gradients, 0 to 1 (``weight_work``)


@dataclass(frozen=True)
class SplitReport:
    """Numbers of layers with parameters, by how they were converted."""

    split: int = 0  # layers that defer their weight gradients until W (linear layers and embeddings)
    delayed: int = 0  # layers that defer them by themselves (Transformer Engine's delay_wgrad_compute)
    whole: int = 0  # layers that compute all gradients in the backward
    switched: int = 0  # ``delayed`` layers that were built without delay_wgrad_compute; the conversion switched it on
    whole_layers: tuple[WholeLayer, ...] = ()  # whole layers with a trained weight matrix

    @property
    def deferred_share(self) -> float:
        """The share of the weight gradients' FLOPs that waits for W, 0 to 1."""
        return 1.0 - sum(layer.share for layer in self.whole_layers)

    def __str__(self) -> str:
        return (
            f"{self.split} layers defer their weight gradients, {self.delayed} do so themselves, "
            f"{self.whole} compute all gradients at once"
        )


@dataclass(frozen=True)
class Fate:
    """How one layer is converted: "split", "delayed", "switched" or "whole". Whole layers have a reason."""

    name: str
    kind: str
    work: float  # ``weight_work`` of the layer
    what: str
    reason: str = ""


def report_of(fates: Sequence[Fate]) -> tuple[SplitReport, dict[str, tuple[str, float]]]:
    """The report, and a dict: layer's name -> (its class, its share of the FLOPs). If two chunks have a layer of the
    same name, the dict has one of them."""
    total = sum(fate.work for fate in fates) or 1.0
    count = Counter(fate.what for fate in fates)
    whole = [fate for fate in fates if fate.what == "whole" and fate.work > 0]
    layers = tuple(WholeLayer(fate.name, fate.kind, fate.reason, fate.work / total) for fate in whole)
    delayed = count["delayed"] + count["switched"]
    report = SplitReport(count["split"], delayed, count["whole"], count["switched"], layers)
    return report, {fate.name: (fate.kind, fate.work / total) for fate in fates}


def warn_of_whole_layers(report: SplitReport) -> None:
    """Log one warning for each class and reason. Names that differ only in numbers are written as one: ``layers.*``."""
    groups: dict[tuple[str, str, str], list[WholeLayer]] = {}
    for layer in report.whole_layers:
        groups.setdefault((re.sub(r"\d+", "*", layer.name), layer.kind, layer.reason), []).append(layer)
    for (pattern, kind, reason), layers in groups.items():
        name = layers[0].name if len(layers) == 1 else f"{pattern} ({len(layers)} layers)"
        warn_of(name, reason, kind, sum(layer.share for layer in layers))


def warn_of(name: str, reason: str, kind: str, share: float) -> None:
    percent = f"{100 * share:.1f}% of the weight gradients' FLOPs"
    logger.warning("layer %s computes its weight gradient in B, not in W: %s (%s, %s)", name, reason, kind, percent)


def weight_work(layer: nn.Module, name: str) -> float:
    """Half of the FLOPs of a layer's weight gradients for one token of the model's input: the number of elements of its
    trained matrices. ``name`` is the layer's name in its chunk. Megatron's ``experts`` are counted with an even share
    of the tokens. An embedding's look-up counts as 0."""
    if hasattr(layer, "num_embeddings"):
        return 0.0
    matrices = (p for p in layer._parameters.values() if p is not None and p.requires_grad and p.dim() > 1)
    return sum(matrix.numel() for matrix in matrices) * (_routed_share(layer) if "experts" in name.split(".") else 1.0)


def _routed_share(layer: nn.Module) -> float:
    """Tokens that one expert computes per token of this rank's input. They come from all expert-parallel ranks."""
    config: Any = getattr(layer, "config", None)
    experts = getattr(config, "num_moe_experts", None)
    if not experts:
        return 1.0
    return (getattr(config, "moe_router_topk", None) or 1) * config.expert_model_parallel_size / experts
