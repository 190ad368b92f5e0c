"""A model chunk that was built for another stage than the plan runs it as is an error before anything is sent. Without
the check such a model trains, and wrongly: its chunks take each other's inputs. On real processes, also on the peers of
the wrong rank: ``functional_tests/test_errors_of_all.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp.common import log_once
from megatron_pp.errors import PipelineMismatchError, PipelinePeerError, ScheduleInputError
from megatron_pp.faults.consistency import LAYERS
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.runtime import kept_calls
from megatron_pp.runtime.model_checks import chunk_places
from megatron_pp.runtime.model_checks.chunk_places import check_places
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, toy_config
from testkit.thread_runs.guarded_ranks import published_entries
from testkit.thread_runs.p2p_ranks import NothingMayPass
from testkit.thread_runs.step_runs import Rank, pipeline

SIZE, CHUNKS = 2, 2
Chunk = Callable[[int, int, Any], Any]


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number


class MegatronChunk(torch.nn.Module):
    """What a GPTModel says of its place."""

    def __init__(self, stage: int, chunk: int, stages: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.vp_stage = chunk
        self.pre_process, self.post_process = stage == 0, stage == stages - 1
        numbers = range(layers * stage + 1, layers * (stage + 1) + 1)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(map(Layer, numbers))


class Wrapper(torch.nn.Module):
    """A wrapper like DistributedDataParallel."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def steps(schedule: str, numbers_of: Callable[[int], list[int]]) -> list[BaseException | None]:
    """What a step raises on each rank, whose chunks are built as the stages ``numbers_of(rank)``."""
    network = MemoryNetwork(SIZE)

    def rank_main(rank: int) -> BaseException | None:
        config = toy_config(
            pipeline_schedule=schedule, virtual_pipeline_model_parallel_size=CHUNKS, p2p_timeout=20.0, hidden_size=4
        )
        communicator = P2PCommunicator(ThreadGroup(rank, SIZE), config, network.transport(rank))
        stages = placement_of(config, SIZE, CHUNKS).stages[rank]
        assert sorted(numbers_of(rank)) == sorted(stages)
        chunks = [PipelineStage(ToyBlock(number), config, stage=number) for number in numbers_of(rank)]
        try:
            toy_step(chunks, ToyData(4), communicator)
        except Exception as error:
            network.abort("a rank failed")  # there is no guard to end the peer's waits
            return error
        return None

    return run_ranks(SIZE, rank_main, network.abort)


def test_swapped_chunks_are_an_error() -> None:
    _, own = steps("zb_v", lambda rank: [0, 3] if rank == 0 else [2, 1])
    assert isinstance(own, ScheduleInputError), own
    said = "chunk 0 on rank 1 is stage 1 under zb_v: build it with stage_numbers; this one was built with PipelineSta"
    assert str(own).startswith(said)
    assert "stage_numbers('zb_v', 2, 2)[1] is (1, 2)" in str(own)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_chunks_in_their_order_run(schedule: str) -> None:
    stages = Placement(V_SHAPE if schedule == "zb_v" else LOOP, SIZE, CHUNKS).stages
    assert steps(schedule, lambda rank: list(stages[rank])) == [None, None]


def test_a_stage_number_is_a_whole_number() -> None:
    with pytest.raises(ScheduleInputError, match="stage is -1; the smallest legal value is 0"):
        PipelineStage(ToyBlock(0), toy_config(), stage=-1)
    with pytest.raises(ScheduleInputError, match="stage is 'first'; it must be a whole number"):
        PipelineStage(ToyBlock(0), toy_config(), stage="first")  # type: ignore[arg-type]


def wrong_vp_stage(chunks: list[Any]) -> None:
    chunks[0].vp_stage, chunks[1].vp_stage = 1, 0


def wrong_first(chunks: list[Any]) -> None:
    chunks[1].pre_process = True


def wrong_last(chunks: list[Any]) -> None:
    chunks[1].post_process = not chunks[1].post_process


def wrong_layers(chunks: list[Any]) -> None:
    chunks[0].decoder, chunks[1].decoder = chunks[1].decoder, chunks[0].decoder


def numbered(chunks: list[PipelineStage], numbers: list[list[int]]) -> list[PipelineStage]:
    """Chunks whose layers have these numbers, as those of a GPTModel."""
    for chunk, of_chunk in zip(chunks, numbers, strict=True):
        chunk.decoder = torch.nn.Module()
        chunk.decoder.layers = torch.nn.ModuleList(map(Layer, of_chunk))
    return chunks


def layers_of(rank: Rank, swapped: tuple[int, int] | None = None) -> list[list[int]]:
    """Two layers a stage, in the order of the stages; ``swapped``: each of two ranks has the other's."""
    holder = rank.rank
    if swapped is not None and holder in swapped:
        holder = sum(swapped) - holder
    return [[2 * stage + 1, 2 * stage + 2] for stage in rank.placement.stages[holder]]


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        (1, "rank 1 has layers 5 to 6 in chunk 0 (stage 1), rank 2 has layers 3 to 4 in chunk 0 (stage 2), where "),
        (2, "rank 1 has layers 5 to 6 in chunk 0 (stage 1), rank 2 has layers 3 to 4 in chunk 0 (stage 2), where "),
    ],
)
def test_layers_of_another_rank_are_an_error_of_all_before_anything_is_sent(chunks: int, said: str) -> None:
    def body(rank: Rank) -> Exception | None:
        try:
            rank.step(numbered(rank.model(), layers_of(rank, swapped=(1, 2))))
        except Exception as error:
            return error
        return None

    network = NothingMayPass(3, store=dist.HashStore())
    errors = pipeline(3, chunks, 4, body, network=network, guarded=True, hidden_size=4)
    for error in errors:
        assert isinstance(error, PipelineMismatchError), errors
        assert said in str(error)
        assert "where numbers above 6 belong: build each chunk for its stage" in str(error)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_layers_in_the_order_of_the_stages_run_and_are_compared_once(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    entries = published_entries(monkeypatch)

    def body(rank: Rank) -> None:
        chunks = numbered(rank.model(), layers_of(rank))
        for _ in range(3):
            rank.step(chunks)

    pipeline(3, 2, 4, body, guarded=True, hidden_size=4, pipeline_schedule=schedule)
    assert len(entries) == 3
    assert {entry.description[LAYERS] for entry in entries} >= {
        "layers 1 to 2 in chunk 0 (stage 0); "
        + {
            "interleaved_1f1b": "layers 7 to 8 in chunk 1 (stage 3)",
            "zb_v": "layers 11 to 12 in chunk 1 (stage 5)",
        }[schedule]
    }


def test_a_rank_whose_own_chunks_do_not_fit_says_so_itself() -> None:
    """The rank's own error says more than the comparison of all ranks."""

    def body(rank: Rank) -> Exception | None:
        numbers = layers_of(rank)
        try:
            rank.step(numbered(rank.model(), numbers[::-1] if rank.rank == 1 else numbers))
        except Exception as error:
            return error
        return None

    errors = pipeline(3, 2, 4, body, guarded=True, hidden_size=4)
    assert [type(error) for error in errors] == [PipelinePeerError, ScheduleInputError, PipelinePeerError]
    assert "chunk 1 on rank 1 is stage 4 under interleaved_1f1b" in str(errors[1])


@pytest.mark.parametrize("kind", [LOOP, V_SHAPE])
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (wrong_vp_stage, "chunk 0 on rank .* is stage . under zb_x: build it .* built with vp_stage=1"),
        (wrong_first, "chunk 1 on rank .* is stage . under zb_x: .*pre_process of this one is True"),
        (wrong_last, "chunk 1 on rank .* is stage . under zb_x: .*post_process of this one is"),
        (wrong_layers, r"chunk 1 on rank .* is stage . under zb_x: .*its layers are \[., .\], and an earlier stage"),
    ],
)
def test_megatron_models_built_for_another_stage_are_refused(kind: str, rank: int, change: Any, said: str) -> None:
    placement = Placement(kind, SIZE, CHUNKS)
    chunks = [MegatronChunk(stage, chunk) for chunk, stage in enumerate(placement.stages[rank])]
    check_places([Wrapper(Wrapper(chunk)) for chunk in chunks], placement, rank, "zb_x")
    change(chunks)
    with pytest.raises(ScheduleInputError, match=said):
        check_places([Wrapper(chunk) for chunk in chunks], placement, rank, "zb_x")


def test_chunks_that_say_nothing_are_not_checked() -> None:
    placement = Placement(V_SHAPE, SIZE, CHUNKS)
    for chunks in (
        [SimpleNamespace(vp_stage=1), SimpleNamespace(vp_stage=0)],  # not modules
        [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)],
        [PipelineStage(ToyBlock(0), toy_config()) for _ in range(2)],
    ):
        check_places(chunks, placement, 0, "zb_v")
    check_places([MegatronChunk(1, 1)], Placement(LOOP, 1, 1), 0, "1f1b")  # a part of a model, without a pipeline
    check_places([MegatronChunk(1, 1, 2)], Placement(LOOP, 2, 1), 1, "1f1b")  # one chunk: vp_stage is not read


def announced(chunks: list[Any]) -> list[str]:
    found: list[str] = []
    placement = Placement(V_SHAPE if len(chunks) > 1 else LOOP, SIZE, len(chunks))
    check_places(chunks, placement, 0, "zb_v", found.append)
    return found


def test_stages_that_do_not_say_their_number_are_announced() -> None:
    config = toy_config()
    silent = [PipelineStage(ToyBlock(0), config) for _ in range(2)]
    (warning,) = announced([Wrapper(chunk) for chunk in silent])
    assert warning.startswith("the order of the model chunks is not checked")
    assert "PipelineStage(module, config, stage=number), from megatron_pp.stage_numbers('zb_v', 2, 2)[rank]" in warning
    half = [PipelineStage(ToyBlock(0), config, stage=0), PipelineStage(ToyBlock(0), config)]
    assert len(announced(half)) == 1


def test_nothing_is_announced_of_other_chunks() -> None:
    config = toy_config()
    for chunks in (
        [PipelineStage(ToyBlock(number), config, stage=number) for number in (0, 3)],
        [PipelineStage(ToyBlock(0), config)],  # one a rank has no order
        [MegatronChunk(0, 0), MegatronChunk(3, 1)],
        [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)],
    ):
        assert announced(chunks) == []


def test_the_warning_of_a_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork(SIZE)

    def rank_main(rank: int) -> None:
        config = toy_config(virtual_pipeline_model_parallel_size=CHUNKS, p2p_timeout=20.0, hidden_size=4)
        communicator = P2PCommunicator(ThreadGroup(rank, SIZE), config, network.transport(rank))
        for _ in range(2):
            toy_step([PipelineStage(ToyBlock(rank), config) for _ in range(CHUNKS)], ToyData(4), communicator)

    log_once._log.cache_clear()
    with caplog.at_level(logging.WARNING, "megatron_pp"):
        run_ranks(SIZE, rank_main, network.abort)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "the order of the model chunks is not checked"
    ]


def test_chunk_places_are_checked_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    original = chunk_places._wrong_chunks

    def noted(chunks: Any, placement: Placement, rank: int) -> Any:
        looked.append((rank, chunks[1]))
        return original(chunks, placement, rank)

    monkeypatch.setattr(chunk_places, "_wrong_chunks", noted)
    monkeypatch.setattr(kept_calls, "MODULES_OF_MODELS", ())  # those that other tests of this process have loaded
    network = MemoryNetwork(SIZE)

    def rank_main(rank: int) -> list[Any]:
        config = toy_config(virtual_pipeline_model_parallel_size=CHUNKS, p2p_timeout=20.0, hidden_size=4)
        communicator = P2PCommunicator(ThreadGroup(rank, SIZE), config, network.transport(rank))
        first, second, another = [PipelineStage(ToyBlock(rank), config) for _ in range(3)]
        for last in (second, second, second, another, second):
            toy_step([first, last], ToyData(4), communicator)
        return [(rank, second), (rank, another)]

    wanted = run_ranks(SIZE, rank_main, network.abort)
    for rank, of_rank in enumerate(wanted):
        assert [one for one in looked if one[0] == rank] == of_rank
