"""What ``megatron-pp advise --costs FILE`` reads: layers, or what was measured of a model's stages."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.errors import ExchangeError, PlanError
from megatron_pp.plan.advise.model import DECODER, LETTERS, PART, RECOMPUTED_SHARE, Layer, Model, layer
from megatron_pp.plan.advise.question import Question
from megatron_pp.plan.costs import Link
from megatron_pp.plan.files import read_text
from megatron_pp.plan.measured import GB, MS, MeasuredFile, Units
from megatron_pp.plan.placement import LOOP, Placement

_KEYS = ("kind", "count", "forward_ms", "backward_ms", "weight_ms", "activation_gb", "static_gb")


@dataclass(frozen=True)
class FileCosts:
    """Times in milliseconds, memory in GB.

    ranks  of the pipeline on which it was measured; None where the file does not say
    link   what every link is like, and ``links`` what each is like on that many ranks; None: not in the file
    host_bandwidth  of copies between a device and host memory; None: not in the file, or measured on a CPU
    """

    model: Model
    ranks: int | None = None
    link: Link | None = None
    links: tuple[tuple[tuple[int, int], Link], ...] = ()
    host_bandwidth: float | None = None

    def on_its_links(self, question: Question) -> Question:
        """What the options say of links and copies goes before the file."""
        if question.host_bandwidth is None:
            question = replace(question, host_bandwidth=self.host_bandwidth)
        if self.link is None or question.latency or math.isfinite(question.bandwidth) or question.links:
            return question
        links = self.links if question.pipeline_size == self.ranks else ()
        return replace(question, latency=self.link.latency, bandwidth=self.link.bandwidth, links=links)


def read_costs(path: str) -> FileCosts:
    """Raises ExchangeError naming the file."""
    try:
        content = json.loads(read_text(path))
        if not isinstance(content, dict):
            raise PlanError("it holds no object")
        return FileCosts(_from_layers(content)) if "layers" in content else _from_measured(content)
    except (ValueError, RecursionError, TypeError) as error:  # PlanError is a ValueError
        if isinstance(error, ExchangeError):
            raise
        raise ExchangeError(f"{path}: {error}") from error


def _from_layers(content: dict[str, Any]) -> Model:
    layers: list[Layer] = []
    for row in content["layers"]:
        unknown = sorted(set(row) - set(_KEYS))
        if unknown or "forward_ms" not in row or "backward_ms" not in row:
            problem = f"{unknown[0]!r} is not known" if unknown else "forward_ms and backward_ms are needed"
            raise PlanError(f"a layer: {problem}; its keys are {', '.join(_KEYS)}")
        kind = row.get("kind", DECODER)
        if kind not in (*LETTERS, PART):
            raise PlanError(f"a layer is of kind {kind!r}; it may be {', '.join((*LETTERS, PART))}")
        layers += [layer_of(kind, row)] * int(row.get("count", 1))
    message = float(content.get("message_mb", 0.0)) / 1e3
    return Model(tuple(layers), message, float(content.get("attention_share", 0.0)))


def layer_of(kind: str, row: dict[str, float]) -> Layer:
    """Without a time for weight gradients, the backward is both, in equal halves."""
    backward = row["backward_ms"]
    halves = (backward, row["weight_ms"]) if "weight_ms" in row else (backward / 2, backward / 2)
    return layer(kind, row["forward_ms"], *halves, row.get("activation_gb", 0.0), row.get("static_gb", 0.0))


def _from_measured(content: dict[str, Any]) -> FileCosts:
    """What ``auto`` reads; lists are of stages in model order."""
    file = MeasuredFile.from_dict(content)
    measured, units, network = file.values, file.units or Units(), file.network
    time, memory = MS[units.time], GB[units.memory]
    if file.units is not None and "activation" not in content:
        raise PlanError(
            f"memory was not measured; add activation, {units.memory} that each stage keeps of a microbatch"
        )
    values = (measured.forward, measured.backward_input, measured.weight, measured.activation)
    lengths = {len(value) for value in values if isinstance(value, tuple)}
    if len(lengths) > 1:
        raise PlanError("its lists are of different lengths")
    count = max(lengths, default=1)
    if not lengths:
        raise PlanError("it has no list with a number for each stage, so the number of stages is not known")
    columns = [value if isinstance(value, tuple) else (value,) * count for value in values]
    waiting = replace(measured, memory_limit=None).memory(Placement(LOOP, 1, count)).weight
    layers = [
        Layer(PART, time * f, time * i, time * w, memory * kept, memory * late, RECOMPUTED_SHARE * memory * kept)
        for f, i, w, kept, late in zip(*columns, waiting, strict=True)
    ]
    ranks = file.run.pipeline_size or None if file.run else None
    host, copies = None, file.copies
    if copies is not None and file.run is not None and file.run.device != "cpu":
        host = min(copies.to_host, copies.to_device) * memory / time or None
    if network is None:
        return FileCosts(Model(tuple(layers)), ranks, host_bandwidth=host)

    def scaled(link: Link) -> Link:
        return Link(time * link.latency, link.bandwidth * memory / time)

    links = tuple((pair, scaled(link)) for pair, link in network.each_link.items())
    return FileCosts(Model(tuple(layers), memory * network.message), ranks, scaled(network.link), links, host)
