"""Named tensors that skip stages: losses and gradients of a run without a pipeline, whatever the schedule and route."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.errors import ConfigError, P2PShapeError, ScheduleInputError
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.features.skip_tensors.routes import SkipTensor, skip_tensors
from megatron_pp.plan.ir.spec import CACHES, PlanSpec
from megatron_pp.testing.adversarial_transports import HOSTILE_NETWORKS
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, ToyResult, reference_run
from megatron_pp.weight_grad import split_weight_grad
from tests.harness.skip_block import SkipBlock
from tests.harness.stream_runs import plan_on_streams

U_NET = "a=0>3; b=1>2,3; sign=0>1,3 no_grad"


class DoubleData(ToyData):
    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().microbatch(mb)
        return x.double(), target.double()


def run(size: int, chunks: int, declared: str = "blocks", variable: bool = False, **fields: object) -> ToyResult:
    tensors = skip_tensors(declared, size * chunks)
    return run_in_threads(
        *(size, chunks, DoubleData(4, variable=variable)),
        block=partial(SkipBlock, tensors=tensors, dtype=torch.float64),
        prepare=split_weight_grad if "z" in str(fields.get("pipeline_schedule")) else None,
        skip_tensors=tensors,
        **{"pipeline_dtype": torch.float64, "overlap_p2p_comm": True, **fields},
    )


def expected(num_stages: int, declared: str = "blocks", variable: bool = False, **options: bool) -> ToyResult:
    block = partial(SkipBlock, tensors=skip_tensors(declared, num_stages), dtype=torch.float64)
    return reference_run(num_stages, DoubleData(4, variable=variable), block=block, **options)


def assert_close(found: ToyResult, wanted: ToyResult) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in found.grads.items():
        assert (grad - wanted.grads[name]).norm() <= 1e-12 * wanted.grads[name].norm(), name


CASES = [
    (2, 1, {}),
    (3, 1, {"overlap_p2p_comm": False}),
    (4, 1, {"overlap_p2p_comm": False, "batch_p2p_comm": False}),
    (4, 1, {"pipeline_schedule": "zb_h1"}),
    (2, 2, {}),
    (2, 2, {"pipeline_schedule": "zb_v"}),
    (3, 2, {"overlap_p2p_comm": False}),
    (4, 2, {}),
    (2, 2, {"pipeline_schedule": "interleaved_zb", "p2p_channels": "shared"}),
    (2, 2, {"pipeline_schedule": "pipe_offload"}),
    (1, 2, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "chunks", "fields"), CASES)
def test_numbers_are_those_of_one_process(size, chunks, fields):
    for cache in CACHES:
        assert_close(run(size, chunks, skip_cache=cache, **fields), expected(size * chunks))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"p2p_debug": True}, {"overlapped_forward_backward": in_turn}])
def test_tensors_of_any_shape_of_use(fields):
    """A U-Net's, one that two stages use, and one without a gradient."""
    for cache in CACHES:
        assert_close(run(4, 1, U_NET, skip_cache=cache, **fields), expected(4, U_NET))
        assert_close(run(2, 2, U_NET, skip_cache=cache, pipeline_schedule="zb_v", **fields), expected(4, U_NET))


def test_shapes_may_vary():
    for fields in ({}, {"overlap_p2p_comm": False}, {"p2p_debug": True}):
        assert_close(run(3, 1, variable=True, **fields), expected(3, variable=True))


@pytest.mark.parametrize("forward_only", [False, True])
def test_hostile_networks(forward_only):
    """Where what is sent is read as late as it can be, or overwritten once it may be; to the bit, and again."""
    tensors = skip_tensors("blocks", 4)
    block = partial(SkipBlock, tensors=tensors, dtype=torch.float64)
    options = {"block": block, "skip_tensors": tensors, "pipeline_dtype": torch.float64, "forward_only": forward_only}
    plain = run_in_threads(2, 2, DoubleData(4), overlap_p2p_comm=True, **options)
    assert_close(plain, expected(4, forward_only=forward_only))
    for turn, kind in enumerate(HOSTILE_NETWORKS):
        network = kind(2, True, seed=turn, pollable=turn % 2 == 0)
        more = {} if turn % 3 else {"overlap_p2p_comm": True}
        assert run_in_threads(2, 2, DoubleData(4), network=network, **more, **options).difference(plain) == 0.0
        assert network.violations == []


def test_sums_of_gradients_do_not_depend_on_the_schedule():
    wanted = run(2, 2)
    for fields in ({"overlap_p2p_comm": False}, {"pipeline_schedule": "interleaved_zb"}, {"max_pending_sends": 5}):
        assert run(2, 2, **fields).difference(wanted) == 0.0


@pytest.mark.parametrize("policy", ["batched", "plain"])
def test_streams(policy):
    spec = PlanSpec("interleaved_1f1b", 2, 2, 4, policy=policy, forward_only=policy == "plain", skip_tensors="blocks")
    report = plan_on_streams(spec)
    assert not report.races, str(report)


class Wide(torch.nn.Module):
    """Gives, besides its output, one of its own shape and dtype; the last stage uses both."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.scale = torch.nn.Parameter(torch.full((4,), 1.0 + stage, dtype=torch.float64))

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> object:
        x = x * self.scale
        if self.stage == 0:
            return x, {"wide": torch.cat([x, -x], -1).float(), "rows": torch.arange(3)}
        if self.stage == 2:
            x = (x + named["wide"][..., 4:].double()).index_select(0, named["rows"].flip(0))
        return x


def test_shapes_and_dtypes_by_name():
    tensors = [
        SkipTensor("wide", 0, (2,), shape=(3, 2, 8), dtype="float32"),
        SkipTensor("rows", 0, (2,), False, (3,), "int64"),
    ]
    runs = [
        run_in_threads(3, 1, DoubleData(4), block=Wide, skip_tensors=tensors, pipeline_dtype=torch.float64, **more)
        for more in ({}, {"overlap_p2p_comm": True}, {"p2p_debug": True})
    ]
    x, target = DoubleData(4).microbatch(0)
    loss = ((x * 6 - x.float().double()).flip(0) - target).pow(2).mean()
    assert runs[0].losses[0] == pytest.approx(float(loss))
    assert all(set(one.grads) == {f"{stage}.scale" for stage in range(3)} for one in runs)
    assert all(one.difference(runs[0]) == 0.0 for one in runs)


class Broken(SkipBlock):
    fault = ""

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> object:
        output = super().forward(x, **named)
        if not isinstance(output, tuple):
            return output
        value, made = output
        if self.fault == "none":
            return value
        if self.fault == "name":
            return value, {"other": made["a"]}
        return value, {"a": {"shape": made["a"][:1], "dtype": made["a"].float(), "list": [1]}[self.fault]}


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("none", ScheduleInputError, r"stage 0 gave a Tensor; config.skip_tensors says .* dict of a\)"),
        ("name", ScheduleInputError, r"gave \(output, dict of other\)"),
        ("shape", P2PShapeError, r"tensor a of stage 0 for microbatch 0 has shape \[1, 2, 4\] .* expect \[3, 2, 4\]"),
        ("dtype", P2PShapeError, "of torch.float32, but later stages expect .* of torch.float64"),
        ("list", ScheduleInputError, "gave a list as a, not a tensor"),
    ],
)
def test_a_stage_that_gives_something_else_is_named(fault, error, words, monkeypatch):
    monkeypatch.setattr(Broken, "fault", fault)
    tensors = skip_tensors("a=0>1", 2)
    block = partial(Broken, tensors=tensors, dtype=torch.float64)
    with pytest.raises(error, match=words):
        run_in_threads(2, 1, DoubleData(2), block=block, skip_tensors=tensors, pipeline_dtype=torch.float64)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"skip_tensors": "a=0>2"},
            "config.skip_tensors: tensor a of stage 0: stage 2 uses it; only stages behind it may, up to 1",
        ),
        ({"skip_tensors": "a=0>1", "skip_cache": "some"}, "cache of skip tensors"),
        ({"skip_tensors": "a=0>1", "cuda_graph_impl": "transformer_engine"}, "does not go with cuda_graph_impl"),
        ({"skip_tensors": [SkipTensor("a", 0, (1,), dtype="int64")]}, "'int64'; it must be .* floating point"),
    ],
)
def test_what_does_not_go_is_refused_before_any_communication(fields, words):
    network = MemoryNetwork(2)
    with pytest.raises(ScheduleInputError, match=words):
        run_in_threads(2, 1, ToyData(2), network=network, **fields)


def test_the_config_checks_them_when_it_is_made():
    with pytest.raises(ConfigError, match="skip_tensors: tensor a"):
        TransformerConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, skip_tensors="a=0>2")


class Unused(SkipBlock):
    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> object:
        return super().forward(x, **{name: tensor.detach() for name, tensor in named.items()})


def test_a_tensor_that_gets_no_gradient():
    """A rank that waits for the sum gets zeros."""
    tensors = skip_tensors("a=0>2", 3)
    for forward_only in (False, True):
        block = partial(Unused, tensors=tensors)
        found = run_in_threads(3, 1, ToyData(2), block=block, skip_tensors=tensors, forward_only=forward_only)
        assert found.difference(reference_run(3, ToyData(2), forward_only, block)) == 0.0
