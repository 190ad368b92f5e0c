"""Bad input to a schedule: a named exception and one helpful sentence, on every rank, before any communication."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp import parallel_state, schedules
from megatron_pp.comm import own_groups
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import P2PError, ScheduleInputError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.runtime import make_step, run_step
from megatron_pp.runtime.arguments import StepInputs, group_sizes
from megatron_pp.runtime.message_shapes import tensor_shapes
from megatron_pp.runtime.own_host import OwnHost
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import ToyBlock, ToyData, toy_config, toy_forward_step
from testkit.thread_runs.p2p_ranks import NothingMayPass
from testkit.thread_runs.step_runs import Rank, pipeline

DATA = ToyData(4)


def call(chunks: int, rank: int = 0, size: int = 2, config: dict[str, Any] | None = None, **changes: Any) -> Any:
    """One call on ``rank`` of ``size`` with a model that would do, but for ``config`` fields and ``changes``."""
    fields = {"virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None, **(config or {})}
    settings = toy_config(**fields)
    communicator = P2PCommunicator(ThreadGroup(rank, size), settings, NothingMayPass(size).transport(rank))
    model = [PipelineStage(ToyBlock(c), settings, c, stage=size * c + rank) for c in range(chunks)]
    arguments = {
        "forward_step_func": toy_forward_step,
        "data_iterator": [DATA.iterator() for _ in model] if chunks > 1 else DATA.iterator(),
        "model": model if chunks > 1 else model[0],
        "num_microbatches": DATA.num_microbatches,
        "seq_length": DATA.seq_length,
        "micro_batch_size": DATA.micro_batch_size,
        "p2p_communicator": communicator,
        **changes,
    }
    return get_forward_backward_func(2, chunks if chunks > 1 else None)(**arguments)


def stage(**fields: Any) -> PipelineStage:
    return PipelineStage(ToyBlock(0), toy_config(**fields))


def two_chunks() -> PipelineStage:
    return stage(virtual_pipeline_model_parallel_size=2)


def iterators(count: int) -> list[Any]:
    return [DATA.iterator() for _ in range(count)]


def bare() -> torch.nn.Module:
    module = torch.nn.Linear(4, 4)
    module.config = toy_config()
    return module


GROUP, VIRTUAL = "microbatch_group_size_per_vp_stage", "virtual_pipeline_model_parallel_size"
THREE = {"model": [two_chunks()] * 3, "data_iterator": iterators(3)}
A_LIST = "the interleaved schedule takes a list of "
CHUNKED: list[tuple[dict[str, Any], str]] = [
    ({"model": stage()}, A_LIST + "model chunks, one per virtual stage; it was given a PipelineStage"),
    ({"data_iterator": DATA.iterator()}, A_LIST + "data iterators, one per model chunk; it was given a generator"),
    ({"model": [], "data_iterator": []}, "model is an empty list; it must hold this rank's model chunks"),
    (THREE, f"3 model chunks were given, but config.{VIRTUAL} is 2; they must be equal"),
    ({"data_iterator": iterators(1)}, "1 data iterators were given for 2 model chunks; give one per chunk (None where"),
    ({"config": {GROUP: 1}}, f"config.{GROUP} is 1; with 2 pipeline ranks and 2 chunks each the nearest legal"),
    ({"config": {GROUP: 0}}, f"config.{GROUP} is 0; the smallest legal value is 1 (default 2)"),
    ({"config": {GROUP: 2.5}}, f"config.{GROUP} is 2.5; it must be a whole number of at least 1"),
    ({"config": {"pipeline_schedule": "gpipe"}}, "config.pipeline_schedule 'gpipe' needs 1 model chunk(s) a rank; 2 w"),
    ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn is for pipelines with one model chunk a rank"),
]
BOTH = {"overlap_p2p_comm": True, "batch_p2p_comm": True}
EITHER: list[tuple[dict[str, Any], str]] = [
    ({"num_microbatches": 0}, "num_microbatches is 0; the smallest legal value is 1"),
    ({"num_microbatches": -3}, "num_microbatches is -3; the smallest legal value is 1"),
    ({"num_microbatches": 2.5}, "num_microbatches is 2.5; it must be a whole number of at least 1"),
    ({"num_microbatches": "4"}, "num_microbatches is '4'; it must be a whole number of at le"),
    ({"num_microbatches": True}, "num_microbatches is True; it must be a whole number of at least"),
    ({"config": BOTH}, "config.overlap_p2p_comm and batch_p2p_comm are both True; a grouped call cannot overlap"),
    ({"config": {"pipeline_dtype": None}}, "config.pipeline_dtype is None; set it to the dtype of the activations bet"),
    ({"config": {"pipeline_dtype": "float32"}}, "config.pipeline_dtype is 'float32'; set it to the dtype of the activ"),
    ({"config": {"pipeline_dtype": torch.bool}}, "config.pipeline_dtype is torch.bool; set it to the dtype of the act"),
    ({"config": {"pipeline_schedule": "2f2b"}}, "config.pipeline_schedule is '2f2b'; it must be one of gpipe, 1f1b, "),
    ({"config": {"pipeline_schedule": "auto", "pipeline_measured": {"weight": -1}}}, "config.pipeline_measured: m"),
    ({"seq_length": None}, "seq_length is None; it must be a whole number of at least 1 (tensors between stages are ["),
    ({"decoder_seq_length": 0}, "decoder_seq_length is 0; the smallest legal value is 1 (tensors"),
    ({"micro_batch_size": None}, "micro_batch_size is None; it must be a whole number of at least"),
    ({"config": {"hidden_size": None}}, "config.hidden_size is 0; the smallest legal value is 1"),
    ({"forward_step_func": None}, "forward_step_func is a NoneType; it must be callable"),
]
SINGLE: list[tuple[dict[str, Any], str]] = [
    ({"model": [stage(), stage()]}, "a schedule without model chunks takes one model; it was given a list of 2"),
    ({"data_iterator": iterators(2)}, "2 data iterators were given for 1 model chunks; give one per chunk"),
    ({"model": two_chunks()}, f"one model was given, but config.{VIRTUAL} is 2; give a list of 2 model chunks to forw"),
    ({"config": {"pipeline_schedule": "zb_v"}}, "config.pipeline_schedule 'zb_v' needs 2 model chunk(s) a rank; 1 wer"),
    ({"model": torch.nn.Linear(4, 4)}, "model chunk Linear has no attribute config; set it to a TransformerConfig"),
    ({"model": bare()}, "model chunk Linear has no set_input_tensor(tensors), by which a stage"),
    ({"config": {"p2p_channels": "both"}}, "config.p2p_channels is 'both'; it must be one of 'one_way', 'shared'"),
    ({"config": {"p2p_channels": ["a"]}}, "config.p2p_channels is ['a']; it must be one of 'one_way', 'shared'"),
    ({"config": {"max_pending_sends": "2"}}, "config.max_pending_sends is '2'; it must be a whole number of at least"),
    ({"config": {"max_pending_sends": -1}}, "config.max_pending_sends is -1; the smallest legal value is 0"),
]


def refused(chunks: int, rank: int, changes: dict[str, Any]) -> str:
    with pytest.raises(ScheduleInputError) as caught:
        call(chunks, rank, **changes)
    assert isinstance(caught.value, ValueError)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


BAD = [(2, *case) for case in (*CHUNKED, *EITHER)] + [(1, *case) for case in (*SINGLE, *EITHER)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("chunks", "changes", "words"), BAD, ids=[words[:50] for *_, words in BAD])
def test_wrong_arguments_are_refused_with_a_reason(chunks: int, changes: dict[str, Any], words: str, rank: int) -> None:
    assert refused(chunks, rank, changes).startswith(words)


@pytest.mark.parametrize("changes", [changes for changes, _ in (*CHUNKED, *EITHER)])
def test_no_communicator_is_made_for_bad_input(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On NCCL that would be communication, and a hang where only one rank is wrong."""

    def make(group: Any, config: Any) -> None:
        raise AssertionError("a communicator was made")

    monkeypatch.setattr(make_step, "communicator_for", make)
    groups = SimpleNamespace(pp=ThreadGroup(0, 2))
    refused(2, 0, {**changes, "p2p_communicator": None, "pg_collection": groups})
    with pytest.raises(AssertionError, match="a communicator was made"):
        call(2, p2p_communicator=None, pg_collection=groups)


def test_good_input_reaches_the_network() -> None:
    """What the tests above rely on: with nothing wrong, the step starts to communicate, and that is noticed."""
    for chunks in (1, 2):
        with pytest.raises(AssertionError, match="was posted"):
            call(chunks)


def test_arguments_for_communication_are_optional_on_a_single_rank() -> None:
    """One rank: no dtype, no shape."""
    config = SimpleNamespace()
    reports = forward_backward_no_pipelining(
        forward_step_func=toy_forward_step,
        data_iterator=DATA.iterator(),
        model=PipelineStage(ToyBlock(0), config),
        num_microbatches=4,
    )
    assert len(reports) == 4


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused(mode: Any, chunks: int) -> None:
    with mode():
        sentence = refused(chunks, 0, {})
        with pytest.raises(AssertionError, match="was posted"):
            call(chunks, forward_only=True)
    assert sentence.startswith(f"a training step was called under torch.{mode.__name__}(), where no gradient is comp")


def test_training_on_inference_tensors_is_refused() -> None:
    with torch.inference_mode(), torch.enable_grad():
        assert refused(1, 0, {}).startswith("a training step was called under torch.inference_mode()")


def test_numpy_whole_numbers_are_whole_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(AssertionError, match="was posted"):
        call(1, num_microbatches=numpy.int64(4), seq_length=numpy.int32(3))


@pytest.mark.parametrize("varies", [True, False])
def test_a_communicator_made_for_other_shapes_is_refused(varies: bool) -> None:
    """The communicator would send shapes ahead of tensors where the plan expects none, or the other way round."""
    other = toy_config(variable_seq_lengths=not varies)
    communicator = P2PCommunicator(ThreadGroup(0, 2), other, NothingMayPass(2).transport(0))
    with pytest.raises(ScheduleInputError, match=rf"made with variable_seq_lengths={not varies}, .* has .*={varies};"):
        call(1, config={"variable_seq_lengths": varies}, p2p_communicator=communicator)


@pytest.mark.parametrize("channels", ["shared", "one_way"])
def test_a_communicator_with_other_channels_is_refused(channels: str) -> None:
    """The communicator's messages would not arrive in the order that the plan was verified for."""
    other = "one_way" if channels == "shared" else "shared"
    communicator = P2PCommunicator(ThreadGroup(0, 2), toy_config(p2p_channels=other), NothingMayPass(2).transport(0))
    with pytest.raises(ScheduleInputError, match=f"made with p2p_channels={other}, .* has p2p_channels={channels};"):
        call(1, config={"p2p_channels": channels}, p2p_communicator=communicator)


# -- keywords ---------------------------------------------------------------------------------------------------------

ENTRY_POINTS = [
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
    forward_backward_pipelining_with_interleaving,
]


GOOD = {"forward_step_func": toy_forward_step, "data_iterator": None, "model": stage(), "num_microbatches": 1}
KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"num_microbatch": 4}, "got an unexpected keyword argument 'num_microbatch' (did you mean num_microbatches?)"),
    ({"zzz": 4}, "got an unexpected keyword argument 'zzz'; it takes forward_st"),
    ({"model": None, "num_microbatches": None}, "is missing the keyword argument(s) model, num_microbatches"),
]


@pytest.mark.parametrize("step", ENTRY_POINTS)
@pytest.mark.parametrize(("changes", "words"), KEYWORDS, ids=[words[:30] for _, words in KEYWORDS])
def test_keywords_are_checked_in_the_name_of_the_function(changes: dict[str, Any], words: str, step: Any) -> None:
    """None: left out."""
    with pytest.raises(TypeError, match=f"^{re.escape(f'{step.__name__}() {words}')}"):
        step(**{name: value for name, value in {**GOOD, **changes}.items() if changes.get(name, 0) is not None})
    with pytest.raises(TypeError, match=rf"{step.__name__}\(\) takes 0 positional arguments"):
        step(toy_forward_step)


# -- which pipeline ---------------------------------------------------------------------------------------------------


def test_without_a_group_the_error_says_how_to_make_one() -> None:
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(ScheduleInputError, match=r"parallel_state is not initialised; call parallel_state\.initial"):
        call(1, p2p_communicator=None)


def test_no_pipelining_in_a_pipeline_is_refused() -> None:
    config = toy_config()
    with pytest.raises(ScheduleInputError, match="was called in a pipeline of 2 ranks; call what get_forward_backward"):
        forward_backward_no_pipelining(
            forward_step_func=toy_forward_step,
            data_iterator=DATA.iterator(),
            model=PipelineStage(ToyBlock(0), config),
            num_microbatches=4,
            p2p_communicator=P2PCommunicator(ThreadGroup(0, 2), config, NothingMayPass(2).transport(0)),
        )


def test_a_plug_in_may_let_a_rank_run_without_its_pipeline(tmp_path: Path) -> None:
    """Then what is for the pipeline does not count: its schedule, communicator and trace."""

    class Local(OwnHost):
        local = True

    config = toy_config(pipeline_schedule="zb_v", trace_dir=str(tmp_path), trace_steps="1")
    inputs = StepInputs(
        False,
        forward_step_func=toy_forward_step,
        data_iterator=DATA.iterator(),
        model=PipelineStage(ToyBlock(0), config),
        num_microbatches=4,
        p2p_communicator=P2PCommunicator(ThreadGroup(1, 2), config, NothingMayPass(2).transport(1)),
    )
    host = Local(inputs, alone=True)
    assert len(run_step.run_step(run_step.prepared(host), host)) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("pp_size", "vp_size", "expected"),
    [
        *((size, vp_size, "no_pipelining") for size, vp_size in ((1, None), (1, 1))),
        (2, None, "pipelining_without_interleaving"),
        *((size, vp_size, "pipelining_with_interleaving") for size, vp_size in ((2, 2), (4, 1), (1, 2), (None, 2))),
    ],
)
def test_get_forward_backward_func_returns_the_function_for_the_sizes(
    pp_size: int | None, vp_size: int | None, expected: str
) -> None:
    assert get_forward_backward_func(pp_size, vp_size) is getattr(schedules, f"forward_backward_{expected}")


def test_group_sizes_come_from_the_groups_then_from_the_config() -> None:
    config = SimpleNamespace(tensor_model_parallel_size=2, context_parallel_size=3)
    assert group_sizes(None, StepSettings.from_config(config)) == (2, 3)
    assert group_sizes(None, StepSettings.from_config(None)) == (1, 1)
    assert group_sizes(SimpleNamespace(tp=ThreadGroup(0, 4), cp=None), StepSettings.from_config(config)) == (4, 3)


def test_group_sizes_of_parallel_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron, too, takes all sizes from parallel_state if no groups are given."""
    monkeypatch.setattr(own_groups, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(own_groups, "size_of", {"tp": 4, "cp": 2}.get)
    assert group_sizes(None, StepSettings.from_config(None)) == (4, 2)
    assert group_sizes(SimpleNamespace(cp=ThreadGroup(0, 1)), StepSettings.from_config(None)) == (4, 1)


@pytest.mark.parametrize(
    ("decoder", "sequence_parallel", "cp", "expected"), [(None, False, 1, 64), (None, True, 2, 8), (32, False, 2, 16)]
)
def test_message_shapes_follow_sequence_length_and_parallel_sizes(
    decoder: int | None, sequence_parallel: bool, cp: int, expected: int
) -> None:
    shapes = tensor_shapes(
        seq_length=64,
        micro_batch_size=3,
        decoder_seq_length=decoder,
        config=SimpleNamespace(hidden_size=5, sequence_parallel=sequence_parallel),
        tp_size=4,
        cp_size=cp,
    )
    assert shapes == [(expected, 3, 5)]


# -- while running ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("short_rank", [0, 1])
def test_a_data_iterator_that_ends_early_is_named_and_stops_all_ranks(short_rank: int, chunks: int) -> None:
    def raised_by(rank: Rank) -> BaseException:
        data, model = ToyData(2 if rank.rank == short_rank else 4), rank.model()
        with pytest.raises((ScheduleInputError, P2PError)) as caught:
            rank.step(model, iterators=[data.iterator() for _ in model])
        network.abort("a rank has failed")
        return caught.value

    network = MemoryNetwork(2)
    raised = pipeline(2, chunks, 4, raised_by, network=network, timeout=20.0)
    assert isinstance(raised[short_rank], ScheduleInputError)
    assert str(raised[short_rank]).startswith(
        "the data iterator of chunk 0 ended at microbatch 2; a step of 4 microbatches needs that many items. "
        "(StopIteration was raised in toy_forward_step, "
    )
    assert isinstance(raised[1 - short_rank], P2PError)


def test_microbatch_counts_that_leave_a_bubble_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="megatron_pp"):
        for _ in range(3):
            with pytest.raises(AssertionError, match="was posted"):
                call(2, size=7, num_microbatches=9)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "9 microbatches over 7 ranks work, slower: the last group has 2 of 7 microbatches, fewer than the ranks, which "
        "then wait; nearest at full speed: 7 and 14"
    ]
