"""What the Megatron-core plug-in hands back, and how it ends a step under each release; without Megatron."""

from __future__ import annotations

import dataclasses
import functools
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.modules.graph import Module, module_graphs
from megatron_pp.integrations.megatron.releases import versions as megatron_versions
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.releases.versions import ENTRIES
from megatron_pp.integrations.megatron.steps import combined, resets
from megatron_pp.integrations.megatron.steps import modules as megatron_modules
from megatron_pp.integrations.megatron.steps.call import MegatronHost
from megatron_pp.integrations.megatron.steps.served.scope import reason_not_served, without_defaults
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.memory_transport import MemoryNetwork


class CudaGraphScope(Enum):
    """The enumeration of Megatron-core since 0.16."""

    full_iteration = 1
    attn = 2


THEIRS = """
class P2PCommunicator:
    def __init__(self, config=None): self.config = config
    def _communicate(self): ...
    def recv_forward(self): ...
    def send_forward(self): ...
"""


def communicator_of_a_release() -> Any:
    """A class in place of Megatron's P2PCommunicator, as its module would have it."""
    module: Any = ModuleType("megatron.core.pipeline_parallel.p2p_communication")
    exec(THEIRS, vars(module))
    return module.P2PCommunicator


TheirCommunicator = communicator_of_a_release()


class ManyModules: ...


def megatron(version: str, **functions: Any) -> Megatron:
    nothing: Any = SimpleNamespace()
    schedules: Any = SimpleNamespace(P2PCommunicator=TheirCommunicator, **functions)
    return Megatron(version, megatron_versions.row_of(version), schedules, nothing, (ManyModules,))


def reason(version: str, config: dict[str, Any], **arguments: Any) -> str | None:
    model = SimpleNamespace(module=SimpleNamespace(config=SimpleNamespace(**config)))  # wrapped, as by DDP
    return reason_not_served(megatron(version), "the schedule", {**arguments, "model": [model]}, {})


@pytest.mark.parametrize(
    ("version", "config", "named"),
    [
        ("0.16.1", {}, None),
        (
            "0.20.0",
            {"tp_comm_overlap": True, "fine_grained_activation_offloading": True, "moe_paged_stash": True},
            None,
        ),
        ("0.16.1", {"hybrid_context_parallel": True}, "hybrid_context_parallel"),
        ("0.16.1", {"use_ring_exchange_p2p": True}, "use_ring_exchange_p2p"),
        ("0.14.0", {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}, "whole iteration"),
        ("0.14.0", {"enable_cuda_graph": True, "cuda_graph_scope": "full"}, None),
        ("0.14.0", {"enable_cuda_graph": False, "cuda_graph_scope": "full_iteration"}, None),
        ("0.15.3", {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "whole iteration"),
        ("0.16.1", {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.full_iteration]}, "iteration"),
        ("0.16.1", {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.attn]}, None),
        ("0.16.1", {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": []}, None),
        ("0.18.0", {"cuda_graph_impl": "full_iteration"}, "whole iteration"),
        ("0.18.0", {"cuda_graph_impl": "none", "cuda_graph_scope": None}, None),
    ],
)
def test_config_settings_that_the_engine_lacks_leave_steps_to_megatron(
    version: str, config: dict[str, Any], named: str | None
) -> None:
    why = reason(version, config)
    assert (why is None) == (named is None), why
    assert named is None or named in why


def test_hybrid_context_parallelism_in_a_pipeline_is_refused_as_no_schedule_forms_its_microbatches() -> None:
    config = {"hybrid_context_parallel": True, "pipeline_model_parallel_size": 2}
    with pytest.raises(ScheduleInputError, match=r"pipeline_model_parallel_size 2: .*PackedSteps as microbatch_costs"):
        reason("0.16.1", config)
    named = reason("0.16.1", {**config, "pipeline_model_parallel_size": 1})
    assert named is not None
    assert "hybrid_context_parallel" in named


@pytest.mark.parametrize("knows_width", [True, False])
def test_block_sums_between_chunks_are_left_to_a_release_that_says_no_width(
    knows_width: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without virtual stages its `get_tensor_shapes` says how wide they are."""
    module: Any = ModuleType("megatron.core.transformer.attention_residual")
    if knows_width:
        module.attn_res_uniform_payload_slices = print
    monkeypatch.setitem(sys.modules, module.__name__, module)
    chunk, release = SimpleNamespace(config=SimpleNamespace(enable_attention_residuals=True)), megatron("0.20.0")
    communicator = {"p2p_communicator": None, "model": [chunk]}
    assert reason_not_served(release, ENTRIES[1], communicator, {}) is None
    why = reason_not_served(release, ENTRIES[2], communicator, {})
    assert (why is None) == knows_width, why
    assert why is None or "Attention Residuals with virtual stages" in why


def test_combined_1f1b_is_left_to_a_release_that_is_not_known_and_to_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training; evaluation is not combined."""
    config = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    known = combined.Combined(print, print, takes_priority=False)
    fsdp, release = SimpleNamespace(use_megatron_fsdp=True), megatron("0.16.1")
    for has, chunk, named in (
        (known, SimpleNamespace(config=config), None),
        (None, SimpleNamespace(config=config), "as this release has it"),
        (known, SimpleNamespace(config=config, ddp_config=fsdp), "Megatron-FSDP"),
    ):
        monkeypatch.setattr(combined, "of_release", lambda has=has: has)
        why = reason_not_served(release, "the schedule", {"model": chunk}, {})
        assert (why is None) == (named is None), why
        assert named is None or named in why
        assert reason_not_served(release, "the schedule", {"model": chunk, "forward_only": True}, {}) is None


def test_a_step_of_combined_1f1b_with_another_signature_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more parameter without default is one that the engine would not pass."""
    for more, is_known in (("", True), (", news", False), (", news=None", True)):
        module: Any = ModuleType("megatron.core.pipeline_parallel.combined_1f1b")
        exec(f"def combined_forward_backward_step({', '.join(combined.STEP)}{more}): ...", vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        utils: Any = ModuleType("megatron.core.pipeline_parallel.utils")
        utils.set_streams = lambda: None
        monkeypatch.setitem(sys.modules, utils.__name__, utils)
        assert (combined.of_release() is not None) == is_known


@pytest.mark.parametrize(
    ("version", "keyword"),
    [("0.14.0", "grad_finalize_pgs"), ("0.19.0", "pg_collection"), ("0.19.0", "p2p_communicator")],
)
def test_pipelines_of_several_modules(version: str, keyword: str) -> None:
    """Subclasses of Megatron's communicator count, whatever their name. A class that only has its name does not."""
    for kind in (ManyModules, type("Ours", (ManyModules,), {})):
        why = reason(version, {}, **{keyword: kind()})
        assert why is not None
        assert "several modules" in why
    assert reason(version, {}, **{keyword: type("ManyModules", (TheirCommunicator,), {})()}) is None


@pytest.mark.parametrize(
    ("version", "functions", "words"),
    [
        ("0.16.1", (), "as this release has them"),
        ("0.17.1", ("backward_step_multimodule",), "of megatron-core 0.17.1, whose own backward of them fails"),
        ("0.18.2", ("backward_step_multimodule",), "several modules in the schedule"),
    ],
)
def test_releases_that_cannot_run_several_modules(version: str, functions: tuple[str, ...], words: str) -> None:
    given = megatron(version, **dict.fromkeys(functions, print))
    model = SimpleNamespace(config=SimpleNamespace())
    why = reason_not_served(given, "the schedule", {"model": model, "p2p_communicator": ManyModules()}, {})
    assert words in str(why)


def test_up_to_0_19_only_first_stages_of_source_modules_skip_the_gradient_function() -> None:
    """On all ranks but those of the first stage of a module that takes nothing; since 0.20 of any module."""
    modules = [Module("vision", (((0,), (1,)),)), Module("llm", (((2,), (3,)),)), Module("audio", (((4,),),))]
    (graph,) = module_graphs(modules, {"vision": ["llm"], "audio": ["llm"]})
    assert graph.leading == (True, False, True, False, True)
    assert megatron_modules.with_leading_sources(graph).leading == (True, False, False, False, True)


def test_a_communicator_with_transfers_of_its_own_is_left_to_megatron() -> None:
    changed = TheirCommunicator()
    changed.send_forward = print
    overrides = type("Compressing", (TheirCommunicator,), {"recv_forward": lambda self: None})()
    inner = type("Rounding", (TheirCommunicator,), {"_communicate": lambda self: None})()
    for communicator, name in (
        *((overrides, "Compressing.recv_forward"), (changed, "P2PCommunicator.send_forward")),
        (inner, "Rounding._communicate"),
    ):
        why = reason("0.19.0", {}, p2p_communicator=communicator)
        assert why is not None
        assert name in why
    assert reason("0.19.0", {}, p2p_communicator=SimpleNamespace()) is not None
    named = type("Named", (TheirCommunicator,), {"name": "a", "close": lambda self: None})()
    ours = P2PCommunicator(None, SimpleNamespace(), MemoryNetwork(1).transport(0))
    for communicator in (TheirCommunicator(), named, ours):
        assert reason("0.19.0", {}, p2p_communicator=communicator) is None


@pytest.mark.parametrize("name", ["_communicate", "recv_forward"])
@pytest.mark.parametrize("replaced", [False, True])
def test_transfers_that_the_program_has_put_into_megatrons_class(
    name: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the class, or into one of the program's in its place; known with no communicator given too."""
    kind = communicator_of_a_release()
    schedules: Any = SimpleNamespace(P2PCommunicator=type("Own", (kind,), {}) if replaced else kind)
    release = dataclasses.replace(megatron("0.16.1"), schedules=schedules)
    ours = P2PCommunicator(None, SimpleNamespace(), MemoryNetwork(1).transport(0))
    model = SimpleNamespace(config=SimpleNamespace())

    def why(schedule: str, communicator: Any) -> str | None:
        return reason_not_served(release, schedule, {"model": model, "p2p_communicator": communicator}, {})

    given = schedules.P2PCommunicator()
    assert why(ENTRIES[1], given) is None
    setattr(schedules.P2PCommunicator, name, functools.wraps(kind.send_forward)(lambda self: None))
    for communicator in (None, given):
        assert f".{name})" in str(why(ENTRIES[1], communicator))
    assert why(ENTRIES[0], None) is None  # which sends nothing
    assert why(ENTRIES[1], ours) is None
    monkeypatch.setattr(megatron_modules, "reason_not_served", lambda *_: None)
    assert f".{name})" in str(why(ENTRIES[1], ManyModules())), "which use one for each module"


def test_a_communicator_of_another_config_is_left_to_megatron() -> None:
    """The communicator's config decides what is sent. Only fields that tensors depend on count."""
    config = {"variable_seq_lengths": None, "pipeline_dtype": "bf16"}
    for more, named in (
        ({"variable_seq_lengths": True}, "another variable_seq_lengths"),
        ({"mtp_standalone": True}, "another mtp_standalone"),
        ({"pipeline_dtype": "fp32"}, "another pipeline_dtype"),
        ({"variable_seq_lengths": False, "batch_p2p_comm": True}, None),
    ):
        why = reason("0.16.1", config, p2p_communicator=TheirCommunicator(SimpleNamespace(**{**config, **more})))
        assert (why is None) == (named is None), why
        assert named is None or named in str(why)
        given = {"model": SimpleNamespace(config=None), "p2p_communicator": TheirCommunicator(SimpleNamespace(**more))}
        assert reason_not_served(megatron("0.16.1"), ENTRIES[0], given, {}) is None, "which does not use it"


def theirs(*, forward_step_func: Any, model: Any, slots: int | None = None, offset: int = 0) -> None:
    """A schedule function of a release that takes two more keywords."""


def test_a_keyword_of_a_newer_release_is_left_to_megatron() -> None:
    row, known = megatron_versions.row_of("0.21.0"), {"forward_step_func": print, "model": None}
    assert without_defaults(theirs, row, known) is known
    assert without_defaults(theirs, row, {**known, "slots": None, "offset": 0}) == known
    given = without_defaults(theirs, row, {**known, "slots": 2, "offset": 0})
    assert given == {**known, "slots": 2}
    assert reason("0.21.0", {}, **known, slots=None, p2p_communicator=None) == (
        "the keyword argument 'slots' of this release's schedules, which it does not know"
    )
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'sloth'"):
        without_defaults(theirs, row, {**known, "sloth": 2})


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
    resets.reset_offload(installed, SimpleNamespace(fine_grained_activation_offloading=False), forward_only, None)
    assert recorder.calls == []
    resets.reset_offload(installed, SimpleNamespace(fine_grained_activation_offloading=True), forward_only, None)
    assert recorder.calls == ([("reset",)] if forward_only in when else [])


def test_newer_releases_reset_the_offload_with_the_groups() -> None:
    recorder = Recorder()
    installed = megatron("0.20.0", _reset_activation_offload=recorder.named("reset"))
    resets.reset_offload(installed, SimpleNamespace(fine_grained_activation_offloading=True), True, "groups")
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
    installed = megatron(version, create_cudagraphs=recorder.named("create"))
    installed.create_graphs(SimpleNamespace(**config))
    assert recorder.calls == ([("create",)] if created else [])
    assert installed.captures_layers(SimpleNamespace(**config)) == created


@pytest.mark.parametrize("stash", [False, True])
def test_the_paged_stash_is_reset_where_there_is_one(stash: bool) -> None:
    recorder, config = Recorder(), SimpleNamespace(moe_paged_stash=stash)
    resets.reset_paged_stash(megatron("0.16.1"), config, True)
    with_stash = megatron("0.18.0", paged_stash_reset=recorder.named("stash"))
    resets.reset_paged_stash(with_stash, config, True)
    assert recorder.calls == ([("stash", ("config", config), ("enabled", False))] if stash else [])


@pytest.mark.parametrize(("version", "does"), [("0.17.1", False), ("0.18.0", True), ("0.20.0", True)])
def test_fsdp_gathers_again_after_evaluation(version: str, does: bool) -> None:
    recorder = Recorder()

    def chunk(fsdp: bool, overlap: bool) -> Any:
        ddp = SimpleNamespace(use_megatron_fsdp=fsdp, overlap_param_gather=overlap)
        return SimpleNamespace(ddp_config=ddp, synchronize_param_gather=recorder.named("gather"))

    chunks = [chunk(True, True), chunk(True, False), chunk(False, True), SimpleNamespace()]
    resets.resynchronise_fsdp(megatron(version), chunks)
    assert recorder.calls == ([("gather",)] if does else [])


@pytest.mark.parametrize(
    ("fields", "alone", "forward_only", "called"),
    [
        ({}, False, False, []),
        ({"moe_paged_stash": True}, False, False, ["stash"]),
        ({"fine_grained_activation_offloading": True}, False, False, ["offload"]),
        ({"fine_grained_activation_offloading": True}, True, True, ["offload", "gather"]),
        ({}, True, True, ["gather"]),
        ({}, True, False, []),
    ],
)
def test_a_step_resets_what_its_model_has(
    fields: dict[str, Any], alone: bool, forward_only: bool, called: list[str]
) -> None:
    recorder, config = Recorder(), SimpleNamespace(**fields)
    ddp = SimpleNamespace(use_megatron_fsdp=True, overlap_param_gather=True)
    chunk = SimpleNamespace(ddp_config=ddp, synchronize_param_gather=recorder.named("gather"))
    host: Any = object.__new__(MegatronHost)
    host.megatron = megatron(
        "0.18.0",
        paged_stash_reset=recorder.named("stash"),
        off_interface=SimpleNamespace(reset=recorder.named("offload")),
    )
    host.config, host.alone = config, alone
    host.inputs = SimpleNamespace(config=config, forward_only=forward_only, pg_collection=None, chunks=[chunk])
    settings = SimpleNamespace(timers=None, finalize_model_grads_func=None)
    step: Any = SimpleNamespace(settings=settings, communicator=SimpleNamespace(size=1), cp_size=1)
    host.begin(step)
    host.finish(step, None)
    assert [name for name, *_ in recorder.calls] == called
