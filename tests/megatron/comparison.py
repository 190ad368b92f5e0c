"""What a run left on this rank, compared with the files that another run has written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.megatron.cases import Case, Job


def write_reference(snapshot: dict[str, Any], path: str) -> None:
    """As arrays: torch's own files take twenty times as long."""
    arrays = {
        kind: [tensor.numpy() for tensor in of_kind]
        if isinstance(of_kind, list)
        else {name: tensor.numpy() for name, tensor in of_kind.items()}
        for kind, of_kind in snapshot.items()
    }
    Path(path).write_bytes(pickle.dumps(arrays))


def read_reference(job: Job, rank: int) -> dict[str, Any]:
    """What this rank is compared with: its own file, or those of all ranks of its pipeline together."""
    assert job.reference is not None
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    paths = [job.reference.format(rank=other) for other in (ranks if job.other_cut else [rank])]
    parts = [pickle.loads(Path(path).read_bytes()) for path in paths]
    return {
        "losses": list(map(torch.from_numpy, next((part["losses"] for part in parts if part["losses"]), []))),
        "notes": list(map(torch.from_numpy, parts[0]["notes"])),
        **{
            kind: {name: torch.from_numpy(array) for part in parts for name, array in part[kind].items()}
            for kind in ("grads", "params")
        },
    }


def compare(snapshot: dict[str, Any], reference: dict[str, Any], case: Case) -> dict[str, Any]:
    """Largest differences of losses, gradients and parameters; a non-finite number counts as inf."""
    result: dict[str, Any] = {"compared": len(snapshot["grads"])}
    if snapshot["losses"]:
        if len(snapshot["losses"]) != len(reference["losses"]):
            raise AssertionError(f"{len(snapshot['losses'])} losses reported, {len(reference['losses'])} expected")
        result["loss_difference"] = difference(torch.stack(snapshot["losses"]), torch.stack(reference["losses"]))
    expected = (
        {n: torch.full_like(g, 0.5) for n, g in snapshot["grads"].items()} if case.forward_only else reference["grads"]
    )
    result["grad_difference"] = max(difference(grad, expected[name]) for name, grad in snapshot["grads"].items())
    pairs = zip(snapshot["notes"], reference["notes"], strict=True)
    differences = [difference(ours.float(), theirs.float()) for ours, theirs in pairs]
    result["note_difference"] = max(differences, default=None)
    if snapshot["params"] and reference["params"]:
        result["param_difference"] = max(
            difference(value, reference["params"][name]) for name, value in snapshot["params"].items()
        )
    return result


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if not bool(torch.isfinite(ours).all()):
        return float("inf")
    return float((ours - theirs).abs().max())
