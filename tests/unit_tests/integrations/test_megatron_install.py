"""Installing where Megatron-core is missing, too old, or newer than the table; with stand-ins for its modules."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import logging
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import pytest

import megatron_pp
from megatron_pp.errors import ScheduleInputError, UnknownMegatronError
from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.megatron.releases import release as megatron_release
from megatron_pp.integrations.megatron.releases.versions import ENTRIES
from tests.unit_tests.integrations.test_megatron_versions import ENTRY, PUBLISHED, published_schedules

SCHEDULES = "megatron.core.pipeline_parallel.schedules"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What is loaded here must not be taken for the real Megatron later, nor the other way round."""
    with mock.patch.dict(sys.modules):
        for name in [n for n in sys.modules if n.split(".")[0] == "megatron"]:
            del sys.modules[name]
        yield


def stand_in(version: str, body: str = "...", **changed: str) -> types.ModuleType:
    """Modules named as Megatron-core's, with the schedules of a release; the schedules module."""
    schedules = published_schedules(version if version != "0.99.0" else "0.20.0", body, **changed)
    names = ("megatron", "megatron.core", "megatron.core.pipeline_parallel", "megatron.core.parallel_state")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules[SCHEDULES] = schedules
    modules["megatron.core"].__version__ = version
    modules["megatron.core.pipeline_parallel"].get_forward_backward_func = schedules.get_forward_backward_func
    sys.modules.update(modules)
    return schedules


def test_install_without_megatron_raises_an_error() -> None:
    with mock.patch.dict(sys.modules, {"megatron": None}):
        with pytest.raises(UnknownMegatronError, match=r"cannot be imported .*; install it: pip install"):
            megatron_core.install()
        assert not megatron_core.is_installed()
        megatron_core.uninstall()  # nothing to do


def test_a_release_that_is_too_old_is_left_as_it_is() -> None:
    schedules = stand_in("0.14.0")
    sys.modules["megatron.core"].__version__ = "0.13.1"  # type: ignore[attr-defined]
    original = schedules.get_forward_backward_func
    with pytest.raises(UnknownMegatronError, match=r"0\.13\.1 is not supported"):
        megatron_core.install()
    assert schedules.get_forward_backward_func is original


@pytest.mark.parametrize("version", ["0.14.0", "0.15.3", "0.16.1", "0.19.0", "0.99.0"])
def test_known_signatures_are_installed_and_uninstalled(version: str) -> None:
    schedules = stand_in(version)
    originals = {name: getattr(schedules, name) for name in ENTRIES}
    script = types.ModuleType("a_training_script")
    sys.modules[script.__name__] = script
    script.__dict__.update(run=originals[ENTRIES[0]], chunked=originals[ENTRIES[2]])
    megatron_core.install()
    assert megatron_core.is_installed()
    ours = {name: getattr(schedules, name) for name in ENTRIES}
    assert not set(ours.values()) & set(originals.values())
    assert schedules.get_forward_backward_func() is ours[ENTRIES[0]] is script.run
    assert script.chunked is ours[ENTRIES[2]]
    megatron_core.install()
    assert schedules.get_forward_backward_func() is ours[ENTRIES[0]], "a second install must not wrap the first"
    megatron_core.uninstall()
    assert not megatron_core.is_installed()
    assert {name: getattr(schedules, name) for name in ENTRIES} == originals
    assert (script.run, script.chunked) == (originals[ENTRIES[0]], originals[ENTRIES[2]])


def test_installed_functions_have_the_name_and_pickle_of_the_functions_that_they_replace() -> None:
    schedules = stand_in("0.16.1")
    originals = [getattr(schedules, name) for name in ENTRIES]
    before = [pickle.dumps(function) for function in originals]
    with megatron_core.installed():
        for name, theirs, pickled in zip(ENTRIES, originals, before, strict=True):
            ours = getattr(schedules, name)
            for attribute in functools.WRAPPER_ASSIGNMENTS:
                assert getattr(ours, attribute, None) == getattr(theirs, attribute, None), attribute
            assert ours.__wrapped__ is theirs
            assert inspect.signature(ours) == inspect.signature(theirs)
            assert inspect.getsource(ours) == inspect.getsource(theirs)
            assert pickle.loads(pickle.dumps(ours)) is ours
            assert pickle.loads(pickled) is ours
            assert copy.copy(ours) is copy.deepcopy(ours) is ours
            assert pickle.dumps(ours) == pickled
    assert [pickle.loads(pickled) for pickled in before] == originals


CALL = {"forward_step_func": None, "data_iterator": None, "model": None, "num_microbatches": 1}
CALL |= {"seq_length": 1, "micro_batch_size": 1}


def test_the_log_says_once_which_releases_run(caplog: pytest.LogCaptureFixture) -> None:
    stand_in("0.19.0")
    runs = f"megatron_pp {megatron_pp.__version__} runs the pipeline schedules of megatron-core 0.19.0"
    with caplog.at_level(logging.INFO, "megatron_pp"), megatron_core.installed():
        megatron_core.install()
        assert [said for said in caplog.messages if "megatron-core" in said] == [runs]
        megatron_core.uninstall()
        megatron_core.install()
        assert [said for said in caplog.messages if "megatron-core" in said] == [runs] * 2


def test_megatrons_own_schedule_calls_megatrons_own(caplog: pytest.LogCaptureFixture) -> None:
    """A keyword that is unknown here hands the step back, once with a warning; what it calls by name is not ours."""
    body = "check_first_val_step(slots); return get_model_config() if slots else 'theirs'"
    parameters = f"{ENTRY}, {PUBLISHED['0.20.0'][1]}, slots=None"
    schedules = stand_in("0.20.0", body, forward_backward_no_pipelining=parameters)
    calls: list[Any] = []
    names = vars(schedules)
    names.update(check_first_val_step=calls.append, get_model_config=lambda: names[ENTRIES[0]](**CALL))
    with megatron_core.installed():
        caplog.clear()
        ours = schedules.get_forward_backward_func()
        for _ in range(2):
            assert ours(**CALL, slots=2) == "theirs"
        assert calls == [2, None] * 2
        (said,) = caplog.messages
        assert "does not serve the keyword argument 'slots'" in said
        with pytest.raises(ScheduleInputError, match=r"torch\.distributed is not initialised"):
            ours(**CALL, slots=None)  # its default: the engine runs this one
        with pytest.raises(TypeError, match="sloth"):
            ours(**CALL, sloth=2)
        with megatron_core.installed(strict=True), pytest.raises(megatron_core.NotServedError, match="'slots'"):
            ours(**CALL, slots=2)


def test_a_hook_that_is_unknown_here_is_named(caplog: pytest.LogCaptureFixture) -> None:
    stand_in("0.20.0", "config = get_model_config(model); set_current_cuda_graph_slot(model, config.graph_slots)")
    with pytest.raises(UnknownMegatronError, match=r"0\.20\.0 .* config\.graph_slots, set_current_cuda_graph_slot;"):
        megatron_core.install(strict=True)
    assert not megatron_core.is_installed()
    with megatron_core.installed():
        (said,) = caplog.messages
        assert "forward_backward_no_pipelining uses config.graph_slots, set_current_cuda_graph_slot" in said
        with pytest.raises(UnknownMegatronError, match=r"install\(\) without strict=True"):
            megatron_core.install(strict=True)


def test_schedules_that_cannot_be_parsed_are_unknown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads of the program may parse at the same time, which Python 3.11 does not survive."""

    def disturbed(source: str) -> NoReturn:
        raise SystemError("AST constructor recursion depth mismatch (before=90, after=65)")

    stand_in("0.20.0")
    with monkeypatch.context() as context:  # pytest parses too, to show a failure
        context.setattr(ast, "parse", disturbed)
        with megatron_core.installed():
            assert "cannot tell which names the schedules of megatron-core 0.20.0 use (AST constructor" in caplog.text


def test_schedules_without_source_are_unknown(caplog: pytest.LogCaptureFixture) -> None:
    schedules = stand_in("0.16.1")
    linecache.cache.pop(str(schedules.__file__))
    with megatron_core.installed():
        assert "cannot tell which names the schedules of megatron-core 0.16.1 use" in caplog.text


def test_a_newer_release_with_an_unknown_signature_is_left_as_it_is() -> None:
    schedules = stand_in("0.99.0", backward_step="input_tensor, output_tensor, output_tensor_grad, config, graph")
    original = schedules.get_forward_backward_func
    with pytest.raises(UnknownMegatronError, match=r"0\.99\.0: backward_step asks for 'graph'"):
        megatron_core.install()
    assert schedules.get_forward_backward_func is original


def test_the_number_of_the_step_is_that_of_megatrons_training_loop() -> None:
    stand_in("0.14.0")
    megatron = megatron_release.load_megatron()
    assert megatron.current_iteration() is None  # megatron.training is not in use
    loop: Any = types.ModuleType("megatron.training.global_vars")
    sys.modules[loop.__name__] = loop
    for arguments in (None, types.SimpleNamespace()):  # too early; a release that does not have it
        loop._GLOBAL_ARGS = arguments
        assert megatron.current_iteration() is None
    loop._GLOBAL_ARGS = types.SimpleNamespace(curr_iteration=7)
    assert megatron.current_iteration() == 7
