"""What the Megatron-core plug-in hands back, and how it ends a step under each release; without Megatron."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp.integrations import megatron_versions
from megatron_pp.integrations.megatron_release import Megatron, reason_not_served


class CudaGraphScope(Enum):
    """As in Megatron-core since 0.16."""

    full_iteration = 1
    attn = 2


def megatron(version: str, **functions: Any) -> Megatron:
    nothing: Any = SimpleNamespace()
    schedules: Any = SimpleNamespace(**functions)
    return Megatron(version, megatron_versions.row_of(version), schedules, nothing)


def reason(version: str, config: dict[str, Any], **arguments: Any) -> str | None:
    model = SimpleNamespace(module=SimpleNamespace(config=SimpleNamespace(**config)))  # wrapped, as by DDP
    return reason_not_served(megatron(version), {"model": [model], **arguments})


@pytest.mark.parametrize(
    ("version", "config", "named"),
    [
        ("0.16.1", {}, None),
        ("0.16.1", {"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm"),
        ("0.16.1", {"hybrid_context_parallel": True}, "hybrid_context_parallel"),
        ("0.14.0", {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}, "whole iteration"),
        ("0.14.0", {"enable_cuda_graph": True, "cuda_graph_scope": "full"}, None),
        ("0.14.0", {"enable_cuda_graph": False, "cuda_graph_scope": "full_iteration"}, None),
        ("0.15.3", {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "whole iteration"),
        (
            "0.16.1",
            {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.full_iteration]},
            "whole iteration",
        ),
        ("0.16.1", {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.attn]}, None),
        ("0.16.1", {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": []}, None),
        ("0.18.0", {"cuda_graph_impl": "full_iteration"}, "whole iteration"),
        ("0.18.0", {"cuda_graph_impl": "none", "cuda_graph_scope": None}, None),
    ],
)
def test_what_a_config_asks_for_and_the_engine_lacks(version: str, config: dict[str, Any], named: str | None) -> None:
    why = reason(version, config)
    assert (why is None) == (named is None), why
    assert named is None or named in why


def test_the_combined_schedule_is_for_training_only() -> None:
    assert reason("0.16.1", {"overlap_moe_expert_parallel_comm": True}, forward_only=True) is None


@pytest.mark.parametrize(
    ("version", "keyword"),
    [("0.14.0", "grad_finalize_pgs"), ("0.19.0", "pg_collection"), ("0.19.0", "p2p_communicator")],
)
def test_pipelines_of_several_modules(version: str, keyword: str) -> None:
    name = "MultiModulePipelineCommunicator" if keyword == "p2p_communicator" else "MultiModuleProcessGroupCollection"
    why = reason(version, {}, **{keyword: type(name, (), {})()})
    assert why is not None
    assert "several modules" in why
    assert reason(version, {}, **{keyword: SimpleNamespace()}) is None


class Recorder:
    """Functions of Megatron's schedules that write down their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def named(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, *sorted(kwargs.items())))


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(
    ("version", "when"),
    [("0.14.0", ()), ("0.15.3", ()), ("0.16.1", (False,)), ("0.17.1", (False, True)), ("0.19.0", (False, True))],
)
def test_activation_offload_is_reset_when_that_release_does(
    version: str, when: tuple[bool, ...], forward_only: bool
) -> None:
    """Megatron-LM#3739: since 0.17 after evaluation too."""
    recorder = Recorder()
    installed = megatron(version, off_interface=SimpleNamespace(reset=recorder.named("reset")))
    installed.reset_offload(SimpleNamespace(fine_grained_activation_offloading=False), forward_only, None)
    assert recorder.calls == []
    installed.reset_offload(SimpleNamespace(fine_grained_activation_offloading=True), forward_only, None)
    assert recorder.calls == ([("reset",)] if forward_only in when else [])


def test_newer_releases_reset_the_offload_with_the_groups() -> None:
    recorder = Recorder()
    installed = megatron("0.20.0", _reset_activation_offload=recorder.named("reset"))
    installed.reset_offload(SimpleNamespace(fine_grained_activation_offloading=True), True, "groups")
    assert recorder.calls == [("reset", "groups")]


@pytest.mark.parametrize(
    ("version", "config", "created"),
    [
        ("0.14.0", {"enable_cuda_graph": True}, True),
        ("0.14.0", {"enable_cuda_graph": False, "cuda_graph_impl": "local"}, False),
        ("0.15.3", {"cuda_graph_impl": "local"}, True),
        ("0.16.1", {"cuda_graph_impl": "none"}, False),
        ("0.16.1", {"cuda_graph_impl": "transformer_engine"}, False),
        ("0.19.0", {"cuda_graph_impl": "local"}, True),
        ("0.19.0", {}, False),
    ],
)
def test_graphs_of_layers_are_captured_at_the_end(version: str, config: dict[str, Any], created: bool) -> None:
    recorder = Recorder()
    megatron(version, create_cudagraphs=recorder.named("create")).create_graphs(SimpleNamespace(**config))
    assert recorder.calls == ([("create",)] if created else [])


@pytest.mark.parametrize("stash", [False, True])
def test_the_paged_stash_is_reset_where_there_is_one(stash: bool) -> None:
    recorder, config = Recorder(), SimpleNamespace(moe_paged_stash=stash)
    megatron("0.16.1").reset_paged_stash(config, True)
    megatron("0.18.0", paged_stash_reset=recorder.named("stash")).reset_paged_stash(config, True)
    assert recorder.calls == ([("stash", ("config", config), ("enabled", False))] if stash else [])


@pytest.mark.parametrize(("version", "does"), [("0.17.1", False), ("0.18.0", True), ("0.20.0", True)])
def test_fsdp_gathers_again_after_evaluation(version: str, does: bool) -> None:
    recorder = Recorder()

    def chunk(fsdp: bool, overlap: bool) -> Any:
        ddp = SimpleNamespace(use_megatron_fsdp=fsdp, overlap_param_gather=overlap)
        return SimpleNamespace(ddp_config=ddp, synchronize_param_gather=recorder.named("gather"))

    chunks = [chunk(True, True), chunk(True, False), chunk(False, True), SimpleNamespace()]
    megatron(version).resynchronise_fsdp(chunks)
    assert recorder.calls == ([("gather",)] if does else [])
