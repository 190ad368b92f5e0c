"""Reads the file of ``megatron-pp advise --costs FILE``: costs of layers, or measured costs of a model's stages."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.errors import FileFormatError, PlanError
from megatron_pp.plan.costs.files import read_text
from megatron_pp.plan.costs.measured import GB, LARGEST, MS, MeasuredFile, MeasuredStep, Units
from megatron_pp.plan.costs.stage_costs import Link
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.tools.advise.model import DECODER, LETTERS, PART, RECOMPUTED_SHARE, Layer, Model, layer
from megatron_pp.tools.advise.question import Question

_NUMBERS = ("forward_ms", "backward_ms", "weight_ms", "activation_gb", "static_gb")
_KEYS = ("kind", "count", *_NUMBERS)
_OF_ALL = ("layers", "message_mb", "attention_share")
_MOST_LAYERS = 100_000  # a larger number is a typing error


@dataclass(frozen=True)
class FileCosts:
    """The costs in a file. Times are in milliseconds, memory in GB. Values that are not in the file are None.

    ranks           ranks of the measured pipeline
    link            latency and bandwidth of every link
    links           latency and bandwidth of single links, in a pipeline of ``ranks``
    host_bandwidth  bandwidth of copies between a device and host memory; None also if measured on a CPU
    micro_batch     sequences in a microbatch
    seq_length      tokens in a sequence
    """

    model: Model
    ranks: int | None = None
    link: Link | None = None
    links: tuple[tuple[tuple[int, int], Link], ...] = ()
    host_bandwidth: float | None = None
    micro_batch: int | None = None
    seq_length: int | None = None

    def with_static(self, static: Sequence[float], ranks: int) -> Model:
        """The model with GB of parameters, gradients and optimizer states: one number for a rank, or one for each
        stage. Raises PlanError if the file has these GB, or another number of stages.
        """
        layers = self.model.layers
        if not self.model.is_fluid or any(one.static for one in layers):
            raise PlanError("--static-gb cannot be given with --costs FILE: the file has static_gb of its layers")
        if len(static) not in (1, len(layers)):
            raise PlanError(f"--static-gb has {len(static)} numbers; --costs FILE has {len(layers)} stages")
        each = static if len(static) > 1 else (static[0] * ranks / len(layers),) * len(layers)
        return replace(self.model, layers=tuple(replace(one, static=gb) for one, gb in zip(layers, each, strict=True)))

    def on_its_links(self, question: Question) -> Question:
        """``question`` with the file's links and copies, unless the options give them."""
        if question.host_bandwidth is None:
            question = replace(question, host_bandwidth=self.host_bandwidth)
        if self.link is None or question.latency or math.isfinite(question.bandwidth) or question.links:
            return question
        size = question.pipeline_size
        links = tuple((pair, one) for pair, one in self.links if self.ranks in (None, size) and max(pair) < size)
        return replace(question, latency=self.link.latency, bandwidth=self.link.bandwidth, links=links)


def read_costs(path: str) -> FileCosts:
    """The costs in the file. Raises FileFormatError, with the file's name."""
    try:
        content = json.loads(read_text(path, plain=True))
        if not isinstance(content, dict):
            raise PlanError("it is not a JSON object")
        return FileCosts(_from_layers(content)) if "layers" in content else _from_measured(content)
    except FileFormatError:
        raise
    except (ValueError, RecursionError, TypeError, OverflowError) as error:  # PlanError is a ValueError
        raise FileFormatError(f"{path}: {error}") from error


def _from_layers(content: dict[str, Any]) -> Model:
    unknown = sorted(set(content) - set(_OF_ALL))
    if unknown:
        raise PlanError(f"key {unknown[0]!r} is not known; a file with layers may have {', '.join(_OF_ALL)}")
    rows = content["layers"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PlanError("layers must be a list of objects, each with forward_ms and backward_ms")
    layers: list[Layer] = []
    for row in rows:
        count = _checked_count(row)
        if len(layers) + count > _MOST_LAYERS:
            raise PlanError(f"it has more than {_MOST_LAYERS} layers")
        layers += [layer_of(row.get("kind", DECODER), row)] * count
    message, attention = (_checked_number(content, name) for name in _OF_ALL[1:])
    return Model(tuple(layers), message / 1e3, attention)


def _checked_count(row: dict[str, Any]) -> int:
    """The number of layers that a row describes. Raises PlanError for an impossible row."""
    unknown = sorted(set(row) - set(_KEYS))
    if unknown or "forward_ms" not in row or "backward_ms" not in row:
        problem = f"{unknown[0]!r} is not known" if unknown else "forward_ms and backward_ms are needed"
        raise PlanError(f"a layer: {problem}; a layer may have {', '.join(_KEYS)}")
    kind = row.get("kind", DECODER)
    count = row.get("count", 1)
    if kind not in (*LETTERS, PART):
        raise PlanError(f"the kind of a layer is {kind!r}; it must be one of {', '.join((*LETTERS, PART))}")
    if type(count) is not int or count < 1:
        raise PlanError(f"the count of a layer is {count!r}; it must be a whole number of at least 1")
    for name in _NUMBERS:
        _checked_number(row, name)
    return count


def _checked_number(values: dict[str, Any], name: str) -> float:
    """A number of the file; 0 if it is missing. Raises PlanError for an impossible value."""
    value = values.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
        raise PlanError(f"{name} is {value!r:.40}; it must be a number from 0 to {LARGEST:g}")
    return float(value)


def layer_of(kind: str, row: dict[str, float]) -> Layer:
    """The layer of a row. If the row has no time for weight gradients, they are half of the backward."""
    backward = row["backward_ms"]
    halves = (backward, row["weight_ms"]) if "weight_ms" in row else (backward / 2, backward / 2)
    return layer(kind, row["forward_ms"], *halves, row.get("activation_gb", 0.0), row.get("static_gb", 0.0))


def _from_measured(content: dict[str, Any]) -> FileCosts:
    """The costs of a file as ``auto`` reads it. Its lists have a number for each stage, in model order."""
    file = MeasuredFile.from_dict(content)
    measured = file.values
    units = file.units or Units()
    network = file.network
    time = MS[units.time]
    memory = GB[units.memory]
    if file.units is not None and "activation" not in content:
        raise PlanError(
            f"memory was not measured; add activation, the {units.memory} that each stage keeps for a microbatch"
        )
    values = (measured.forward, measured.backward_input, measured.weight, measured.activation)
    lengths = {len(value) for value in values if isinstance(value, tuple)}
    if len(lengths) > 1:
        raise PlanError("its lists have different lengths")
    count = max(lengths, default=1)
    if not lengths:
        raise PlanError("it has no list with a number for each stage, so the number of stages is not known")
    columns = [value if isinstance(value, tuple) else (value,) * count for value in values]
    waiting = replace(measured, memory_limit=None).memory(Placement(LOOP, 1, count)).weight
    layers = [
        Layer(PART, time * f, time * i, time * w, memory * kept, memory * late, RECOMPUTED_SHARE * memory * kept)
        for f, i, w, kept, late in zip(*columns, waiting, strict=True)
    ]
    run = file.run or MeasuredStep()
    ranks = run.pipeline_size or None
    sizes = (run.micro_batch_size or None, run.seq_length or None)
    host = None
    copies = file.copies
    if copies is not None and run.device not in ("", "cpu"):
        host = min(copies.to_host, copies.to_device) * memory / time or None
    if network is None:
        links = {pair: Link(time * latency) for pair, latency in measured.each_link.items()}
        link = Link(time * measured.transfer) if measured.transfer or links else None
        return FileCosts(Model(tuple(layers)), ranks, link, tuple(links.items()), host, *sizes)

    def scaled(link: Link) -> Link:
        return Link(time * link.latency, link.bandwidth * memory / time)

    links = {pair: scaled(link) for pair, link in network.each_link.items()}
    model = Model(tuple(layers), memory * network.message)
    return FileCosts(model, ranks, scaled(network.link), tuple(links.items()), host, *sizes)
