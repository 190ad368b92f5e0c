"""Installing where Megatron-core is missing, too old, or newer than the table; with stand-ins for its modules."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from megatron_pp.errors import UnknownMegatronError
from megatron_pp.integrations import megatron_core, megatron_release
from tests.unit_tests.integrations.test_megatron_versions import published_schedules

SCHEDULES = "megatron.core.pipeline_parallel.schedules"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What is loaded here must not be taken for the real Megatron later, nor the other way round."""
    megatron_release.load_megatron.cache_clear()
    with mock.patch.dict(sys.modules):
        for name in [n for n in sys.modules if n.split(".")[0] == "megatron"]:
            del sys.modules[name]
        yield
    megatron_release.load_megatron.cache_clear()


def stand_in(version: str, **changed: str) -> types.ModuleType:
    """Modules named as Megatron-core's, with the schedules of a release; the schedules module."""
    release = version if version != "0.99.0" else "0.20.0"
    schedules = published_schedules(release, **changed)
    exec(
        "def get_forward_backward_func(pp_size=None, vp_size=None): return forward_backward_no_pipelining",
        vars(schedules),
    )
    names = ("megatron", "megatron.core", "megatron.core.pipeline_parallel", "megatron.core.parallel_state")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules[SCHEDULES] = schedules
    modules["megatron.core"].__version__ = version
    modules["megatron.core.pipeline_parallel"].get_forward_backward_func = schedules.get_forward_backward_func
    sys.modules.update(modules)
    return schedules


def test_without_megatron() -> None:
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
    original = schedules.get_forward_backward_func
    megatron_core.install()
    assert megatron_core.is_installed()
    ours = schedules.get_forward_backward_func
    assert sys.modules["megatron.core.pipeline_parallel"].get_forward_backward_func is ours
    assert ours(2, None).__name__ == "forward_backward_no_pipelining"
    megatron_core.uninstall()
    assert schedules.get_forward_backward_func is original
    assert sys.modules["megatron.core.pipeline_parallel"].get_forward_backward_func is original


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
