"""Compares the results of a run on this rank with the files of another run, by `megatron_pp.tools.parity`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp.tools.parity.answers.comparison import compare_records
from megatron_pp.tools.parity.records.parameters import Place
from megatron_pp.tools.parity.records.recorder import GRADIENT, LOSS, PARAMETER, Key, Record, Value
from testkit.megatron.cases import Case, Job

NOTE = "note"  # notes of the training loop
DIFFERENCES = {
    "loss_difference": LOSS,
    "grad_difference": GRADIENT,
    "param_difference": PARAMETER,
    "note_difference": NOTE,
}


def record_of(losses: list[torch.Tensor], notes: list[torch.Tensor], grads: Any, params: Any) -> Record:
    """A record with copies of the values, in the order in which a step makes them."""
    kinds = {LOSS: _numbered(losses), NOTE: _numbered(notes), GRADIENT: grads, PARAMETER: params}
    values = {
        Key(0, kind, name): Value(np.array(tensor.detach().float().numpy()))
        for kind, tensors in kinds.items()
        for name, tensor in tensors.items()
    }
    return Record(Place.here(), values=values)


def _numbered(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def write_reference(record: Record, path: str) -> None:
    Path(path).write_bytes(pickle.dumps(record))


def read_reference(job: Job, rank: int) -> Record:
    """The record with which this rank is compared: that of its own file, or of the files of all ranks of its
    pipeline."""
    assert job.reference is not None
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    paths = [job.reference.format(rank=other) for other in (ranks if job.other_cut else [rank])]
    parts: list[Record] = [pickle.loads(Path(path).read_bytes()) for path in paths]
    return Record(parts[0].place, values={key: value for part in reversed(parts) for key, value in part.values.items()})


def compare(record: Record, reference: Record, case: Case) -> dict[str, Any]:
    """The largest differences of losses, gradients and parameters. A number that is not finite counts as inf. The
    reference may have more values, of stages on other ranks."""
    kinds = [LOSS, NOTE, GRADIENT, PARAMETER]
    counts = {kind: [sum(key.kind == kind for key in one.values) for one in (record, reference)] for kind in kinds}
    for kind in (LOSS, NOTE):
        if counts[kind][0] != counts[kind][1] and (kind == NOTE or counts[kind][0]):
            raise AssertionError(f"{counts[kind][0]} values of kind {kind}, {counts[kind][1]} expected")
    expected = dict(reference.values)
    if case.forward_only:
        grads = {key: own for key, own in record.values.items() if key.kind == GRADIENT}
        expected |= {key: Value(np.full_like(own.data, 0.5)) for key, own in grads.items()}
    keys = [key for key in record.values if key.kind != PARAMETER or counts[PARAMETER][1]]
    known = Record(reference.place, values={key: expected[key] for key in keys})
    found = compare_records([record], known, known).differences
    result: dict[str, Any] = {"compared": counts[GRADIENT][0]}
    for name, kind in DIFFERENCES.items():
        result[name] = max((one.error for one in found if one.key.kind == kind), default=None)
    return result
