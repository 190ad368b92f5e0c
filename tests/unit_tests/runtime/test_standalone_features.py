"""What users of Megatron's schedules count on, with our own engine and plain modules; ranks as threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.gpt.gpt import EMBEDDING, OUTPUT, GPTStage, build_gpt_chunks
from examples.gpt.optimizer import sum_tied_gradients
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.errors import ScheduleInputError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.testing.pipeline import toy_step
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import HIDDEN, ToyBlock, ToyData, ToyResult, gradients_of
from megatron_pp.tracing.observers import ranges_if_profiling
from tests.harness.step_runs import on_ranks

MICROBATCHES = 4
DATA = ToyData(MICROBATCHES)


def step(communicator: P2PCommunicator, model: Any, seq_length: int = DATA.seq_length, **changed: Any) -> list[Any]:
    """One call of the schedule for `model`: a stage, or a list of chunks."""
    chunks = model if isinstance(model, list) else [model]
    changed = {"iterators": [DATA.iterator() for _ in chunks], **changed}
    return toy_step(chunks, replace(DATA, seq_length=seq_length), communicator, **changed)


# -- dict outputs ---------------------------------------------------------------------------


class TwoStreams(torch.nn.Module):
    """A stage of two streams: `hidden` [s, b, h] and `gate` [s, b, 1], each computed from both."""

    def __init__(self, stage: int, last: bool) -> None:
        super().__init__()
        self.block = ToyBlock(stage)
        self.gate = torch.nn.Linear(HIDDEN, 1)
        with torch.no_grad():
            self.gate.weight.fill_(0.1 * (stage + 1))
            self.gate.bias.zero_()
        self.last = last

    def forward(self, given: Any) -> Any:
        if not isinstance(given, dict):
            given = {"hidden": given, "gate": torch.ones(*given.shape[:2], 1)}
        hidden = self.block(given["hidden"]) * given["gate"]
        gate = torch.sigmoid(self.gate(hidden)) + given["gate"]
        return hidden * gate if self.last else {"gate": gate, "hidden": hidden}


def two_stream_shapes(receive: list[Any], send: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What adjust_tensor_shapes_fn returns for stages that give each other dicts; with varying shapes all are None."""

    def named(shape: Any) -> dict[str, Any]:
        return {"hidden": shape, "gate": None if shape is None else (*shape[:2], 1)}

    return named(receive[0]), named(send[0])


def two_streams_in_one_process(size: int) -> ToyResult:
    stages = [TwoStreams(stage, stage == size - 1) for stage in range(size)]
    result = ToyResult()
    for x, target in DATA.iterator():
        for stage in stages:
            x = stage(x)
        loss = (x - target).pow(2).mean()
        result.losses.append(float(loss.detach()))
        (loss / MICROBATCHES).backward()
    result.grads = gradients_of(dict(enumerate(stages)))
    return result


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_stages_may_give_each_other_dicts(size: int, overlap: bool, variable: bool) -> None:
    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> ToyResult:
        stage = PipelineStage(TwoStreams(rank, rank == size - 1), config)
        reports = step(communicator, stage, adjust_tensor_shapes_fn=two_stream_shapes)
        return ToyResult([float(r["loss"]) for r in reports], gradients_of({rank: stage}))

    results = on_ranks(size, rank_main, overlap_p2p_comm=overlap, variable_seq_lengths=variable)
    expected = two_streams_in_one_process(size)
    assert results[-1].losses == expected.losses
    for result in results:
        for name, grad in result.grads.items():
            assert torch.equal(grad, expected.grads[name]), name
    assert sum(len(result.grads) for result in results) == len(expected.grads)


def test_a_dict_with_other_names_is_refused() -> None:
    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> None:
        stage = PipelineStage(TwoStreams(rank, rank == 1), config)
        step(communicator, stage, adjust_tensor_shapes_fn=lambda receive, send: ({"a": receive[0]}, {"a": send[0]}))

    with pytest.raises(ScheduleInputError, match=r"gave gate, hidden; adjust_tensor_shapes_fn says .* a dict of a"):
        on_ranks(2, rank_main)


# -- shapes between stages ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "length"),
    [(1, 1, False, 24), (2, 1, True, 12), (2, 1, False, 24), (1, 3, False, 8), (2, 3, True, 4)],
)
@pytest.mark.parametrize("from_config", [False, True])
def test_shapes_between_stages(tp: int, cp: int, sequence_parallel: bool, length: int, from_config: bool) -> None:
    """A receive has the share of the sequence that this rank holds, by the process groups given or by the config."""
    seen: dict[int, Any] = {}

    class Looks(ToyBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen[threading_rank()] = tuple(x.shape)
            return super().forward(x)

    def forward_step(iterator: Any, model: Any) -> Any:
        x = torch.ones(length, DATA.micro_batch_size, HIDDEN)
        return model(x), lambda out: (out.mean(), {"loss": out.detach().mean()})

    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> None:
        groups = SimpleNamespace(pp=communicator.pp_group)
        if from_config:
            config.tensor_model_parallel_size, config.context_parallel_size = tp, cp
        else:
            groups.tp, groups.cp = ThreadGroup(0, tp), ThreadGroup(0, cp)
        stage = PipelineStage(Looks(rank), config)
        step(communicator, stage, forward_step_func=forward_step, seq_length=24, pg_collection=groups)

    on_ranks(2, rank_main, sequence_parallel=sequence_parallel)
    assert seen == {0: (length, DATA.micro_batch_size, HIDDEN), 1: (length, DATA.micro_batch_size, HIDDEN)}


def threading_rank() -> int:
    """The rank whose thread this is."""
    return int(threading.current_thread().name.removeprefix("rank "))


def test_context_parallel_size_scales_a_mean_loss_and_not_a_sum() -> None:
    def losses(three: bool) -> list[torch.Tensor]:
        def forward_step(iterator: Any, model: Any) -> Any:
            x, _ = next(iterator)

            def loss_func(out: torch.Tensor) -> Any:
                report = {"loss": out.detach().sum()}
                return (out.sum(), torch.tensor(5), report) if three else (out.sum(), report)

            return model(x), loss_func

        def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> torch.Tensor:
            stage = PipelineStage(ToyBlock(rank), config)
            groups = SimpleNamespace(pp=communicator.pp_group, cp=ThreadGroup(0, 2), tp=ThreadGroup(0, 1))
            step(
                communicator,
                stage,
                forward_step_func=forward_step,
                seq_length=2 * DATA.seq_length,
                pg_collection=groups,
            )
            return stage.inner.linear.weight.grad

        return on_ranks(2, rank_main)

    means, sums = losses(three=False), losses(three=True)
    torch.testing.assert_close(means[0], sums[0] * 2 * 5)  # 2: context-parallel size; 5: tokens


# -- uneven layouts and tied embeddings ---------------------------------------------------------------------------


VOCAB = 29


def gpt_config() -> TransformerConfig:
    """5 layers over 2 ranks of 2 chunks each: one, two, one and one."""
    return TransformerConfig(
        num_layers=5,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|tt|t|tL",
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        p2p_timeout=30.0,
    )


def gpt_batches() -> list[torch.Tensor]:
    """Token numbers, int64 [b, s + 1], of every microbatch."""
    return [torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(mb)) for mb in range(MICROBATCHES)]


def gpt_forward_step(iterator: Any, model: Any) -> Any:
    tokens = next(iterator)
    return model(tokens[:, :-1], tokens[:, 1:]), lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def gpt_stages(config: TransformerConfig, layers: list[list[int]], stages: list[int]) -> list[GPTStage]:
    return build_gpt_chunks(
        config, stages=stages, layers_of_stage=layers, vocab_size=VOCAB, max_sequence_length=8, seed=3
    )


def test_uneven_layouts_and_tied_embeddings_equal_one_process() -> None:
    """The tied copies lie on both ranks; each schedule leaves them their own gradients, which are added once a step."""
    config = gpt_config()
    cut = config.layers_of_stages()
    assert [len(layers) for layers in cut] == [1, 2, 1, 1]
    whole = gpt_stages(config, [list(range(5))], [0])
    losses = []
    for tokens in gpt_batches():
        whole[0].set_input_tensor([None])
        loss = whole[0](tokens[:, :-1], tokens[:, 1:]).mean()
        losses.append(float(loss.detach()))
        (loss / MICROBATCHES).backward()
    sum_tied_gradients(whole, None)

    def rank_main(rank: int, _: Any, communicator: P2PCommunicator) -> tuple[list[float], list[GPTStage]]:
        chunks = gpt_stages(gpt_config(), cut, [rank, 2 + rank])
        data = [iter(gpt_batches()) for _ in chunks]
        reports = step(
            communicator,
            chunks,
            forward_step_func=gpt_forward_step,
            iterators=data,
            seq_length=8,
        )
        return [float(r["loss"]) for r in reports], chunks

    (none, first), (reported, last) = on_ranks(2, rank_main, virtual_pipeline_model_parallel_size=2)
    assert (none, reported) == ([], losses)
    chunks = [*first, *last]
    sum_tied_gradients(chunks, None)
    expected = dict(whole[0].named_parameters())
    seen = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
    assert seen.keys() == expected.keys()
    for name, parameter in seen.items():
        assert torch.equal(parameter.grad, expected[name].grad), name
    assert torch.equal(seen[EMBEDDING].grad, seen[OUTPUT].grad)


# -- timers and profiler ranges ---------------------------------------------------------------------------


class Timers:
    """Megatron's timers as the schedules use them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.name = ""

    def __call__(self, name: str, log_level: int | None = None) -> Timers:
        self.name = name if log_level is None else f"{name}/{log_level}"
        return self

    def start(self, barrier: bool = False) -> None:
        self.lines.append(f"{self.name} start{' barrier' if barrier else ''}")

    def stop(self) -> None:
        self.lines.append(f"{self.name} stop")


def test_megatrons_timers_run() -> None:
    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> list[str]:
        config.timers = Timers()
        config.barrier_with_L1_time = False
        step(communicator, PipelineStage(ToyBlock(rank), config))
        return config.timers.lines

    for lines in on_ranks(2, rank_main):
        assert lines[0] == "forward-backward/1 start"
        assert lines[-1] == "forward-backward stop"
        assert lines.count("forward-compute/2 start") == lines.count("forward-compute stop") == MICROBATCHES
        assert lines.count("backward-compute/2 start") == lines.count("backward-compute stop") == MICROBATCHES


def test_a_profile_names_every_instruction() -> None:
    def rank_main(rank: int, config: Any, communicator: P2PCommunicator) -> list[str]:
        stage = PipelineStage(ToyBlock(rank), config)
        if rank == 0:  # a profiler watches the thread that started it
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                step(communicator, stage)
            return [event.name for event in sorted(profile.events(), key=lambda e: e.time_range.start)]
        step(communicator, stage)
        return []

    names = on_ranks(2, rank_main, batch_p2p_comm=True)[0]
    program = [
        str(at) for at in build_plan(PlanSpec("1f1b", 2, 1, MICROBATCHES, group_size=2, policy="batched")).programs[0]
    ]
    assert [name for name in names if name in set(program)] == program


def test_without_a_profiler_nothing_is_recorded() -> None:
    assert ranges_if_profiling() is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert ranges_if_profiling() is not None
