"""The layers on each stage of a job's pipeline, by the rules of Megatron-core.

Stages are in the order of the model. Stage ``s`` is chunk ``s // P`` of rank ``s % P``, as in Megatron's interleaved
schedule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pp.config.hybrid_pattern import HybridPattern
from megatron_pp.config.layout import place_layers
from megatron_pp.errors import LayoutError
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.parity.layout import stages_of as letters_of

_LETTERS = re.compile(r"[EtmL]*\Z")
_OF_NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@dataclass(frozen=True)
class Stage:
    """One stage. ``layers`` are layer numbers from 0; ``mtp`` is the number of layers for multi-token prediction."""

    rank: int
    chunk: int
    layers: range
    embedding: bool = False
    mtp: int = 0
    loss: bool = False

    def text(self) -> str:
        """The stage in the letters of Megatron's layouts: ``Et*3``, ``t*2``, ``mL``; "-" for an empty stage."""
        parts = ["E" if self.embedding else "", _repeated("t", len(self.layers)), _repeated("m", self.mtp)]
        return "".join([*parts, "L" if self.loss else ""]) or "-"


class NotGivenError(LayoutError):
    """The job does not give a size that is needed."""


def _repeated(letter: str, count: int) -> str:
    return letter * count if count < 3 else f"{letter}*{count}"


def pipeline_size(job: Job) -> int:
    return max(1, int(job.get("pipeline_model_parallel_size", 1)))


def chunks_of(job: Job) -> int:
    """The number of model chunks of a rank."""
    return max(1, int(job.get("virtual_pipeline_model_parallel_size", 1)))


def microbatches_of(job: Job) -> int:
    """The number of microbatches of a step on each data-parallel rank. It is rounded down if the job sets
    decrease_batch_size_if_needed. Raises LayoutError if the batch cannot be divided."""
    batch = batch_of(job)
    micro = max(1, job.get("micro_batch_size", 1))
    if batch is None:
        raise NotGivenError(f"{job.spell('global_batch_size')} is not given")
    replicas = max(1, int(job.get("data_parallel_size", 1)))
    rounded = bool(job.get("decrease_batch_size_if_needed")) and isinstance(batch, int) and batch >= micro * replicas
    if not isinstance(batch, int) or batch < 1 or (batch % (micro * replicas) and not rounded):
        raise LayoutError(
            f"{job.spell('global_batch_size')} is {batch}; it must be a multiple of {job.spell('micro_batch_size')} "
            f"times the data-parallel ranks, {micro} x {replicas}"
        )
    return batch // (micro * replicas)


def batch_of(job: Job) -> Any:
    """The batch of all replicas in the first step. A schedule such as "0:384 200B:768" begins with 384."""
    schedule = re.match(r"\s*0\w*:(\d+)", str(job.get("step_batch_size_schedule", "")))
    return int(schedule[1]) if schedule else job.get("global_batch_size")


def stages_of(job: Job) -> tuple[Stage, ...]:
    """All stages, in the order of the model. Raises LayoutError if the layers cannot be placed on them."""
    size = pipeline_size(job)
    chunks = chunks_of(job)
    given = _letters(job)
    if given is not None:
        if len(given) != size * chunks:
            raise LayoutError(
                f"the layout has {len(given)} stages; {size} pipeline ranks with {chunks} chunk(s) each have "
                f"{size * chunks}"
            )
        return tuple(_numbered(given, size))
    if not _count(job, "num_layers"):
        raise NotGivenError(f"{job.spell('num_layers')} is not given")
    first, last = _ends(job)
    counts = place_layers(
        _count(job, "num_layers"),
        size,
        chunks,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding=bool(job.get("account_for_embedding_in_pipeline_split", False)),
        account_for_loss=bool(job.get("account_for_loss_in_pipeline_split", False)),
    )
    texts = ["t" * len(layers) for layers in counts]
    texts[0] = "E" + texts[0]
    texts[-1] += "m" * _count(job, "mtp_num_layers") + "L"
    return tuple(_numbered(texts, size))


def _ends(job: Job) -> list[int | None]:
    """The given numbers of layers of the first and the last stage. Without a pipeline, Megatron accepts one of them if
    it is the number of all layers; both are then None."""
    ends = [job.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    if pipeline_size(job) == 1 and sorted(map(str, ends)) == sorted([str(_count(job, "num_layers")), "None"]):
        return [None, None]
    return ends


def _count(job: Job, name: str) -> int:
    value = job.get(name, 0)
    return value if isinstance(value, int) else 0


def _letters(job: Job) -> list[str] | None:
    """The letters of each stage, if the job has a layout or a hybrid model's pattern with stages; otherwise None."""
    layout: Any = job.get("pipeline_model_parallel_layout")
    if isinstance(layout, str):
        found = letters_of(layout)
        wrong = next((one for one in found if not _LETTERS.match(one)), None)
        if wrong is not None:
            raise LayoutError(
                f"{job.spell('pipeline_model_parallel_layout')} has a stage {wrong!r}; a stage has the letters E "
                "(embedding), t (layer), m (multi-token prediction) and L (loss)"
            )
        return found
    if isinstance(layout, Sequence) and layout:
        return [_of_names(job, stage) for stage in layout]
    pattern = HybridPattern.read(job.get("hybrid_layer_pattern"))
    if pattern.names_stages:
        texts = ["t" * len(stage) for stage in pattern.stages]
        texts[0] = "E" + texts[0]
        texts[-1] += "m" * len(pattern.predictions) + "L"
        return texts
    return None


def _of_names(job: Job, stage: Any) -> str:
    """The letters of a stage that is a list of Megatron's names for layers."""
    known = ", ".join(_OF_NAMES)
    names = stage if isinstance(stage, (list, tuple)) else [stage]
    found = [str(name).rpartition(".")[2] for name in names]  # also LayerType.decoder
    wrong = next((name for name in found if name not in _OF_NAMES), None)
    if wrong is not None or names is not stage:
        raise LayoutError(
            f"{job.spell('pipeline_model_parallel_layout')} has a stage {stage!r}; a stage is a list of {known}"
        )
    return "".join(_OF_NAMES[name] for name in found)


def _numbered(letters: Sequence[str], size: int) -> list[Stage]:
    stages = []
    first = 0
    for number, text in enumerate(letters):
        layers = range(first, first + text.count("t"))
        first = layers.stop
        own = "E" in text, text.count("m"), "L" in text
        stages.append(Stage(number % size, number // size, layers, *own))
    return stages
