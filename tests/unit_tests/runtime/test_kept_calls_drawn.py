"""Drawn sequences of calls with changes between them: with what is kept of earlier calls, a call does what it does
without, and its numbers are those of one process.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_pp import schedules
from megatron_pp.runtime import kept_calls
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.toy import ToyBlock, ToyData, gradients_of, toy_chunks, toy_loss
from testkit import autograd_draw
from testkit.mutants.blind_kept_calls import others_without, settings_without
from testkit.sweeps import EXHAUSTIVE
from testkit.thread_runs.step_runs import Rank, pipeline

SIZE = 2
State = dict[str, Any]
Change = tuple[str, Any]
"""The name of what changes, and the place of its new value among its choices."""


class Wrapper(torch.nn.Module):
    """A wrapper like that of mixed precision: attributes of the model are behind ``module``."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any) -> Any:
        return self.module(*given)


@dataclass
class Hooks:
    """Functions of a config, which count their calls."""

    calls: Counter[str] = field(default_factory=Counter)

    def no_sync(self) -> Any:
        self.calls["no_sync"] += 1
        return nullcontext()

    def sync(self, parameters: Any) -> None:
        self.calls["sync"] += 1

    def other_sync(self, parameters: Any) -> None:
        self.calls["other_sync"] += 1

    def finalize(self, chunks: Any, tokens: Any) -> None:
        self.calls["finalize"] += 1

    def double(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls["double"] += 1
        return 2 * loss


CONFIG: dict[str, list[Any]] = {
    "pipeline_schedule": [None, "gpipe"],
    "overlap_p2p_comm": [False, True],
    "microbatch_group_size_per_vp_stage": [None, 3],
    "deallocate_pipeline_outputs": [True, False],
    "max_pending_sends": [2, 0],
    "num_microbatches_with_partial_activation_checkpoints": [None, 1],
    "grad_scale_func": [None, "double"],
    "no_sync_func": [None, "no_sync"],
    "grad_sync_func": [None, "sync", "other_sync"],
    "param_sync_func": [None, "sync"],
    "finalize_model_grads_func": [None, "finalize"],
}
"""Values of fields; those of functions are names of Hooks."""
ARGUMENTS: dict[str, list[Any]] = {
    "num_microbatches": [4, 2],
    "seq_length": [3, 5],
    "micro_batch_size": [2, 1],
    "decoder_seq_length": [None, 4],
    "forward_only": [False, True],
    "forward_step_func": ["as it is", "twice"],
}
MODELS: dict[str, list[Any]] = {
    "model": [0, 1],
    "last chunk of the other model": [False, True],
    "wrapped": [False, True],
    "config": ["one", "a copy"],
    "frozen": ["", "scale", "linear.bias"],
}
CHOICES = CONFIG | ARGUMENTS | MODELS


def drawn_changes(rng: random.Random, num_chunks: int, names: Iterable[str] = CHOICES) -> list[Change]:
    """Each of ``names`` changes in its turn. Then follows another call, or it changes back, or there and back again."""
    left_out = "microbatch_group_size_per_vp_stage" if num_chunks == 1 else "pipeline_schedule"
    turns = [name for name in names if name != left_out]
    rng.shuffle(turns)
    changes: list[Change] = []
    for name in turns:
        new = rng.randrange(1, len(CHOICES[name]))
        pattern = rng.choice([(new, new), (new, 0), (new, 0, new)])
        changes += [(name, place) for place in pattern]
    return changes


def forward_step(kind: str, calls: Counter[str]) -> Any:
    def step(data: Any, model: Any, *flags: Any) -> Any:
        calls[f"forward {flags}"] += 1
        x, target = next(data)
        return model(2 * x if kind == "twice" else x), lambda output: toy_loss(target, output)

    return step


def data_of(state: State, call: int) -> ToyData:
    length = state["decoder_seq_length"] or state["seq_length"]
    return ToyData(state["num_microbatches"], length, state["micro_batch_size"], first=100 * call)


def block_of(model: int, stage: int) -> ToyBlock:
    return ToyBlock(stage + 10 * model)


class Program:
    """What a rank calls its schedule with."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.hooks = rank, Hooks()
        self.functions = {name: getattr(self.hooks, name) for name in vars(Hooks) if not name.startswith("_")}
        self.configs = [rank.config, copy.copy(rank.config)]
        self.models = [
            toy_chunks(rank.placement, rank.rank, rank.config, lambda stage, of=model: block_of(of, stage))  # type: ignore[misc]
            for model in MODELS["model"]
        ]
        self.wrapped = [[Wrapper(chunk) for chunk in model] for model in self.models]

    def chunks(self, state: State) -> tuple[list[Any], list[Any]]:
        """This rank's, without and in their wrappers."""
        mine, other = state["model"], 1 - state["model"]
        found = [[*model[mine]] for model in (self.models, self.wrapped)]
        if state["last chunk of the other model"]:
            for chunks, model in zip(found, (self.models, self.wrapped), strict=True):
                chunks[-1] = model[other][-1]
        return found[0], found[1]

    def call(self, state: State, number: int) -> dict[str, Any]:
        """What the call does, by name."""
        config = self.configs[MODELS["config"].index(state["config"])]
        for name in CONFIG:
            setattr(config, name, self.functions.get(state[name], state[name]))
        chunks, wrapped = self.chunks(state)
        for chunk in chunks:
            chunk.config = config
            chunk.zero_grad()
            for name, parameter in chunk.inner.named_parameters():
                parameter.requires_grad_(name != state["frozen"])
        self.hooks.calls.clear()
        communicator, data = self.rank.communicator, data_of(state, number)
        chunked, model = len(chunks) > 1, wrapped if state["wrapped"] else chunks
        iterators = [data.iterator() for _ in chunks]
        arguments = {name: state[name] for name in ARGUMENTS if name != "forward_step_func"}
        reports = get_forward_backward_func(SIZE, len(chunks) if chunked else None)(
            forward_step_func=forward_step(state["forward_step_func"], self.hooks.calls),
            data_iterator=iterators if chunked else iterators[0],
            model=model if chunked else model[0],
            p2p_communicator=communicator,
            **arguments,
        )
        stages = dict(zip(self.rank.placement.stages[self.rank.rank], chunks, strict=True))
        grads = {name: grad.tolist() for name, grad in gradients_of(stages).items()}
        return {"losses": [float(one["loss"]) for one in reports], "grads": grads, "calls": dict(self.hooks.calls)}


def runs(
    changes: list[Change], num_chunks: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[dict[str, Any]]], int]:
    """What each call does on each rank; and how many calls have taken over something. ``keeps``: else each call is
    like a first one."""
    made: dict[int, Any] = {}
    taken: list[bool] = []
    theirs = schedules.prepared

    def noted(host: Any) -> Any:
        made[threading.get_ident()] = step = theirs(host)
        taken.append(step.is_known)
        return step

    def train(rank: Rank) -> list[dict[str, Any]]:
        program = Program(rank)
        state: State = {name: values[0] for name, values in CHOICES.items()}
        found = []
        for number, (name, place) in enumerate([("model", 0), *changes]):
            state[name] = CHOICES[name][place]
            if not keeps:
                for chunk in [chunk for model in (*program.models, *program.wrapped) for chunk in model]:
                    kept_calls._CALLS.discard(chunk)
            done = program.call(state, number)
            step = made[threading.get_ident()]
            of_rank = {name: getattr(step.of_rank, name) for name in ("plan", "checkpoint_flags", "agreed", "largest")}
            found.append(done | of_rank | {"spec": step.spec, "shapes": step.shapes})
        return found

    with monkeypatch.context() as patched:
        patched.setattr(schedules, "prepared", noted)
        patched.setattr(kept_calls, "MODULES_OF_MODELS", ())  # tests before this one may have made such layers
        return pipeline(SIZE, num_chunks, 0, train, data=ToyData(4)), sum(taken)


def in_one_process(changes: list[Change], num_chunks: int) -> list[dict[str, Any]]:
    """Losses and gradients of each call."""
    stages = SIZE * num_chunks
    models = [[block_of(model, stage) for stage in range(stages)] for model in MODELS["model"]]
    state: State = {name: values[0] for name, values in CHOICES.items()}
    found = []
    for number, (name, place) in enumerate([("model", 0), *changes]):
        state[name] = CHOICES[name][place]
        blocks = [*models[state["model"]]]
        if state["last chunk of the other model"]:
            blocks[-SIZE:] = models[1 - state["model"]][-SIZE:]
        for block in blocks:
            block.zero_grad()
            for called, parameter in block.named_parameters():
                parameter.requires_grad_(called != state["frozen"])
        losses = []
        for x, target in data_of(state, number).iterator():
            output = 2 * x if state["forward_step_func"] == "twice" else x
            for block in blocks:
                output = block(output)
            loss, report = toy_loss(target, output)
            losses.append(float(report["loss"]))
            if not state["forward_only"]:
                (loss / state["num_microbatches"] * (2 if state["grad_scale_func"] else 1)).backward()
        grads = {name: grad.tolist() for name, grad in gradients_of(dict(enumerate(blocks))).items()}
        found.append({"losses": losses, "grads": grads})
    return found


def differences(changes: list[Change], num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """What a call does otherwise with what is kept, and how many took over something."""
    kept, taken = runs(changes, num_chunks, True, monkeypatch)
    first, none = runs(changes, num_chunks, False, monkeypatch)
    assert none == 0
    found = []
    for rank, (calls, wanted) in enumerate(zip(kept, first, strict=True)):
        for change, one, other in zip([None, *changes], calls, wanted, strict=True):
            found += [f"{change} on rank {rank}: {name}" for name in one if one[name] != other[name]]
    return found, taken


@pytest.mark.parametrize("draw", range(40 if EXHAUSTIVE else 1))
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_calls_of_a_drawn_sequence_are_as_first_calls_are(
    num_chunks: int, draw: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = drawn_changes(random.Random(f"{autograd_draw.said()} {draw}"), num_chunks)
    found, taken = differences(changes, num_chunks, monkeypatch)
    assert found == []
    assert taken > len(changes) // 2  # of two ranks


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_numbers_of_a_drawn_sequence_are_those_of_one_process(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = drawn_changes(random.Random(autograd_draw.said()), num_chunks)
    ranks, _ = runs(changes, num_chunks, True, monkeypatch)
    for calls in zip([None, *changes], in_one_process(changes, num_chunks), *ranks, strict=True):
        change, one_process, *by_rank = calls
        assert [loss for done in by_rank for loss in done["losses"]] == one_process["losses"], change
        assert {name: grad for done in by_rank for name, grad in done["grads"].items()} == one_process["grads"], change


LEFT_OUT = [
    *("pipeline_schedule", "overlap_p2p_comm", "num_microbatches_with_partial_activation_checkpoints"),
    *("grad_sync_func", "param_sync_func"),
    *("num_microbatches", "seq_length", "micro_batch_size", "decoder_seq_length", "forward_only"),
]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_thing_that_is_not_compared_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a stale step may also fail."""
    if name in ARGUMENTS:
        monkeypatch.setattr(kept_calls, "_others", others_without(name))
    else:
        monkeypatch.setattr(kept_calls, "_compared", settings_without(name))
    changes = drawn_changes(random.Random(name), 1, [name, "frozen"])
    try:
        found, _ = differences(changes, 1, monkeypatch)
    except Exception as error:
        found = [repr(error)]
    assert found
