"""Frameworks that replace, wrap or keep Megatron's schedules, installed before and after this engine.

Each replacement is a stand-in of the place where a framework makes it: Primus (`schedule_patches`,
`zero_bubble_patches`, `pp_dump_data_patches`, `odc_lb_mini_patches`, `deepseek_v4_pp_shape_patches`), Megatron-Bridge
(`train.py`), and the wrappers of Megatron's training loop.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from megatron_pp.errors import NotServedError, ScheduleInputError
from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.megatron.releases import other_schedules
from megatron_pp.integrations.megatron.releases.versions import ENTRIES
from megatron_pp.integrations.megatron.steps.call import MegatronHost
from megatron_pp.runtime.host import Host
from tests.unit_tests.integrations.test_megatron_install import CALL, _fresh, stand_in

__all__ = ["_fresh"]  # a fixture
ALONE, ONE_CHUNK, CHUNKS = ENTRIES
Patch = Callable[[types.ModuleType], Any]


@pytest.fixture
def schedules() -> types.ModuleType:
    """Megatron's, and a training module that has imported `get_forward_backward_func`, as Megatron-LM's has."""
    module = stand_in("0.20.0", "return 'theirs'")
    training: Any = types.ModuleType("megatron.training.training")
    training.get_forward_backward_func = module.get_forward_backward_func
    sys.modules[training.__name__] = training
    return module


def runs(function: Callable[..., Any]) -> str:
    """The engine whose schedule a call reaches. Ours raises an error, because there are no process groups."""
    try:
        return str(function(**CALL))
    except ScheduleInputError as error:
        return "ours" if "torch.distributed is not initialised" in str(error) else str(error)


def module_of(name: str, source: str) -> Any:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(source, module.__dict__)
    return module


def set_getter(function: Any) -> None:
    for name in ("megatron.core.pipeline_parallel", "megatron.training.training"):
        sys.modules[name].get_forward_backward_func = function  # type: ignore[attr-defined]


def training_step() -> str:
    return runs(sys.modules["megatron.training.training"].get_forward_backward_func())  # type: ignore[attr-defined]


def own_pipeline(schedules: types.ModuleType) -> Any:
    """Primus's: a getter whose schedule is a method of its own launcher."""
    primus = module_of(
        "primus.schedules",
        "class Launcher:\n    def run(self, **kwargs): return 'another'\n"
        "def get_primus_pipeline_parallel_fwd_backward_func(): return Launcher().run\n",
    )
    set_getter(primus.get_primus_pipeline_parallel_fwd_backward_func)
    return primus


def choosing(schedules: types.ModuleType) -> Any:
    """Primus's for zero bubble: it chooses among Megatron's, which its module has imported, where it has nothing."""
    primus = module_of(
        "primus.zbpp",
        f"from {schedules.__name__} import {', '.join(ENTRIES)}\n"
        f"def get_forward_backward_func_zbpp(size=1): return {ALONE} if size == 1 else {CHUNKS}\n",
    )
    set_getter(primus.get_forward_backward_func_zbpp)
    return primus


def dumping(schedules: types.ModuleType) -> Any:
    """Primus's recording: a wrapper around what the getter of before returns."""
    original = sys.modules["megatron.core.pipeline_parallel"].get_forward_backward_func  # type: ignore[attr-defined]

    def wrapped_get() -> Any:
        function = original()
        return lambda **kwargs: function(**kwargs)

    set_getter(wrapped_get)
    return wrapped_get


def balancing(schedules: Any) -> Any:
    """Primus's load balancing: the schedule without a pipeline gets this rank's number of microbatches."""
    original = getattr(schedules, ALONE)

    def lb_mini_fb(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "num_microbatches": 2})

    setattr(schedules, ALONE, lb_mini_fb)
    return lb_mini_fb


def importing(schedules: types.ModuleType) -> Any:
    """Megatron-Bridge's: the getter by name, and a schedule of a pipeline by name."""
    return module_of(
        "megatron.bridge.training.train",
        f"from {schedules.__name__} import {ALONE}, get_forward_backward_func\n"
        "def step(**kwargs): return get_forward_backward_func(pp_size=1, vp_size=None)(**kwargs)\n"
        f"def direct(**kwargs): return {ALONE}(**kwargs)\n",
    )


@pytest.mark.parametrize("patch", [choosing, dumping, balancing, importing])
def test_wrappers_that_are_put_around_the_engine_reach_it(
    patch: Patch, schedules: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Until `uninstall()`, and again after another `install()`."""
    megatron_core.install(strict=True)
    kept = patch(schedules)
    for _ in range(2):
        assert training_step() == "ours"
        assert megatron_core.is_installed()
        megatron_core.install(strict=True)
        assert training_step() == "ours"
        megatron_core.uninstall()
        assert not megatron_core.is_installed()
        assert training_step() == "theirs"
        megatron_core.install(strict=True)
    assert training_step() == "ours"
    if patch is importing:
        assert [runs(kept.step), runs(kept.direct)] == ["ours", "ours"]
    assert caplog.messages == []


@pytest.mark.parametrize("patch", [choosing, dumping, importing])
def test_getters_that_call_megatrons_reach_an_engine_that_comes_later(
    patch: Patch, schedules: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    kept = patch(schedules)
    assert training_step() == "theirs"
    with megatron_core.installed(strict=True):
        assert training_step() == "ours"
        if patch is importing:
            assert [runs(kept.step), runs(kept.direct)] == ["ours", "ours"]
    assert training_step() == "theirs"
    assert caplog.messages == []


def wire_shapes(schedules: Any) -> Any:
    """Primus's for DeepSeek-V4: an interleaved schedule that says which it wraps, as `functools.wraps` does."""
    original = getattr(schedules, CHUNKS)

    @functools.wraps(original)
    def patched_schedule(*args: Any, **kwargs: Any) -> Any:
        kwargs["seq_length"] *= 4
        return original(*args, **kwargs)

    setattr(schedules, CHUNKS, patched_schedule)
    return patched_schedule


@pytest.mark.parametrize(("patch", "name"), [(balancing, ALONE), (wire_shapes, CHUNKS)])
def test_a_schedule_replaced_before_install_keeps_its_name_and_is_reported(
    patch: Patch, name: str, schedules: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine in its place would lose what it does around Megatron's."""
    kept = patch(schedules)
    with pytest.raises(NotServedError, match=f"does not serve {name}, which .*{kept.__name__} has replaced"):
        megatron_core.install(strict=True)
    assert not megatron_core.is_installed()
    assert getattr(schedules, name) is kept
    assert runs(getattr(schedules, ONE_CHUNK)) == "None", "nothing is changed"
    megatron_core.install()
    (said,) = caplog.messages
    assert f"{name}, which" in said
    assert "Call install() before it is put there" in said
    assert getattr(schedules, name) is kept
    assert runs(kept) == ("theirs" if name == ALONE else "None")
    assert runs(getattr(schedules, ONE_CHUNK)) == "ours"
    megatron_core.uninstall()
    assert getattr(schedules, name) is kept
    assert runs(getattr(schedules, ONE_CHUNK)) == "None"


def test_a_schedule_replaced_after_install_is_reported_by_the_next_install(
    schedules: Any, caplog: pytest.LogCaptureFixture
) -> None:
    megatron_core.install(any_microbatch_count=True)
    plugin = getattr(schedules, ALONE).plugin
    setattr(schedules, CHUNKS, print)
    with pytest.raises(NotServedError, match=f"does not serve {CHUNKS}, which builtins.print has replaced"):
        megatron_core.install(strict=True)
    assert plugin.settings.any_microbatch_count, "nothing is changed"
    assert caplog.messages == []
    megatron_core.install()
    assert not plugin.settings.any_microbatch_count
    (said,) = caplog.messages
    assert f"{CHUNKS}, which builtins.print" in said
    assert getattr(schedules, CHUNKS) is print


def test_a_module_that_is_loaded_again_gets_the_engine_by_the_next_install(
    schedules: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the names of before too, and what is restored are the new functions."""
    megatron_core.install(strict=True)
    kept = importing(schedules)
    source = "".join(linecache.getlines(schedules.__file__)).replace("'theirs'", "'anew'")
    exec(compile(source, schedules.__file__, "exec"), vars(schedules))  # as importlib.reload
    for _ in range(2):
        assert training_step() == "anew"
        megatron_core.install(strict=True)
        assert [runs(getattr(schedules, name)) for name in ENTRIES] == ["ours"] * 3
        assert [training_step(), runs(kept.step), runs(kept.direct)] == ["ours"] * 3
        megatron_core.uninstall()
        assert [training_step(), runs(kept.step), runs(kept.direct)] == ["anew"] * 3
    assert caplog.messages == []


def test_schedules_of_another_engine_are_reported_at_install_or_at_exit(
    schedules: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    megatron_core.install()
    own_pipeline(schedules)
    assert training_step() == "another"
    assert caplog.messages == []
    megatron_core._report_unused()  # at the end of the program
    (said,) = caplog.messages
    assert said.startswith("no step of this program has run through megatron_pp: it does not serve the steps of ")
    megatron_core.uninstall()
    caplog.clear()
    megatron_core._report_unused()
    assert caplog.messages == []
    with pytest.raises(NotServedError, match="get_primus_pipeline_parallel_fwd_backward_func"):
        megatron_core.install(strict=True)
    assert not megatron_core.is_installed()
    with megatron_core.installed():
        (said,) = caplog.messages
    assert "megatron.core.pipeline_parallel and megatron.training.training" in said
    assert "primus.schedules.get_primus_pipeline_parallel_fwd_backward_func" in said
    assert "patch_primus_pipeline" in said


def test_an_engine_that_was_called_has_nothing_to_report(
    schedules: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with megatron_core.installed():
        assert training_step() == "ours"
        own_pipeline(schedules)
        megatron_core._report_unused()
    assert caplog.messages == []


def test_functions_of_a_microbatch_may_be_wrapped_before(schedules: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Primus's recording wraps `forward_step` and `backward_step` like this."""
    for name in ("forward_step", "backward_step"):
        original = getattr(schedules, name)
        setattr(schedules, name, lambda *args, original=original, **kwargs: original(*args, **kwargs))
    with megatron_core.installed(strict=True):
        assert training_step() == "ours"
    assert caplog.messages == []


class WithDict:
    """Keeps it in attributes that have been read as a dict: that dict refers to it then."""

    def __init__(self, function: Any) -> None:
        self.function = function
        assert vars(self)

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)


class Runner:
    """Keeps what it was given, as Megatron's FullCudaGraphWrapper and PagedStashRunner do."""

    def __init__(self, forward_backward_func: Any) -> None:
        self.forward_backward_func = forward_backward_func

    def __call__(self, **arguments: Any) -> Any:
        return self.forward_backward_func(**arguments)


def closure_of(function: Any) -> Any:
    def step(**arguments: Any) -> Any:
        return function(**arguments)

    return step


@pytest.mark.parametrize(
    ("keep", "named"),
    [
        (Runner, "test_other_schedules.Runner"),
        (WithDict, "test_other_schedules.WithDict"),
        (functools.partial, "functools.partial"),
        (closure_of, "closure_of.<loc"),
    ],
)
def test_objects_that_still_hold_megatrons_schedule_are_named(
    keep: Any, named: str, schedules: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keep(schedules.get_forward_backward_func())
    by_name = schedules.get_forward_backward_func
    megatron_core.install()
    (said,) = caplog.messages
    assert said.startswith(f"{ALONE} was fetched before install() and is held by ")
    assert named in said
    assert runs(kept) == "theirs"
    assert runs(by_name()) == "ours", "the getter itself may be fetched at any time"
    kept, later = None, keep(schedules.get_forward_backward_func())
    assert runs(later) == "ours"
    megatron_core.uninstall()
    assert runs(later) == "theirs"
    caplog.clear()
    with megatron_core.installed():
        assert runs(later) == "ours"
    assert caplog.messages == []


def test_benchmarks_do_not_turn_the_warning_off() -> None:
    """They are imported in this process by other tests too."""
    importlib.import_module("benchmarks.engine_megatron")
    assert other_schedules.logger.filters == []


def test_frames_of_an_error_that_is_kept_are_not_named(schedules: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What has failed calls nothing any more."""

    def fails() -> None:
        function = schedules.get_forward_backward_func()
        print(function, 1 // 0)

    with pytest.raises(ZeroDivisionError) as kept:
        fails()
    with megatron_core.installed():
        assert kept.tb is not None
    assert caplog.messages == []


def test_shapes_of_messages_are_changed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Primus's for DeepSeek-V4 wraps `get_tensor_shapes`, and changes `seq_length` of interleaved calls, which do not
    ask that function in Megatron."""

    def shapes(**arguments: Any) -> Any:
        return [arguments["seq_length"]]

    @functools.wraps(shapes)
    def longer(**arguments: Any) -> Any:
        return shapes(**arguments | {"seq_length": 4 * arguments["seq_length"]})

    monkeypatch.setattr(Host, "tensor_shapes", lambda self, *sizes: [])
    for chunked, expected in ((False, 8), (True, 2)):
        call: Any = object.__new__(MegatronHost)
        groups = types.SimpleNamespace(tp=None, cp=None)
        call.inputs = types.SimpleNamespace(
            chunked=chunked, seq_length=2, micro_batch_size=1, decoder_seq_length=None, pg_collection=groups
        )
        call.megatron = types.SimpleNamespace(schedules=types.SimpleNamespace(get_tensor_shapes=longer))
        call.__dict__["overridden_config"] = None
        assert call.tensor_shapes(None, 1, 1) == ([expected], [expected])


def test_megatrons_function_for_shapes_gets_what_its_own_schedules_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interleaved schedule has no sequence length of decoders."""
    asked: list[dict[str, Any]] = []

    def get_tensor_shapes(**arguments: Any) -> Any:
        asked.append(arguments)
        return [()]

    monkeypatch.setattr(Host, "tensor_shapes", lambda self, *sizes: [])
    sizes = {"seq_length": 2, "micro_batch_size": 3}
    for chunked in (False, True):
        call: Any = object.__new__(MegatronHost)
        groups = types.SimpleNamespace(tp="tensor", cp="context")
        call.inputs = types.SimpleNamespace(chunked=chunked, **sizes, decoder_seq_length=5, pg_collection=groups)
        call.megatron = types.SimpleNamespace(schedules=types.SimpleNamespace(get_tensor_shapes=get_tensor_shapes))
        call.__dict__["overridden_config"] = "config"
        received, sent = call.tensor_shapes(None, 1, 1)
        assert received is not sent  # adjust_tensor_shapes_fn may change one of them in place
    given = {**sizes, "config": "config", "tp_group": "tensor", "cp_group": "context"}
    assert asked == [{**given, "decoder_seq_length": 5}, {**given, "decoder_seq_length": None}]


def test_functions_called_through_a_few_objects_are_found() -> None:
    def end() -> None: ...

    class Holder:
        def __init__(self) -> None:
            self.inner = functools.partial(end)

        def __call__(self) -> None:
            self.inner()

    near: Any = Holder()
    assert other_schedules.leads_to(lambda: near(), [end])
    assert not other_schedules.leads_to(lambda: near, [print])
    assert not other_schedules.leads_to(near, [end], depth=1)
