"""What `install()`, `uninstall()` and blocks of `installed()` leave behind: in any order, in several threads, after
errors, and where Megatron's modules are removed and imported anew."""

from __future__ import annotations

import gc
import importlib
import linecache
import sys
import threading
import time
import types
from typing import Any

import pytest

import megatron_pp
from megatron_pp.errors import NotServedError, ScheduleInputError
from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.megatron import removal, stand_ins
from megatron_pp.integrations.megatron.releases import sources
from megatron_pp.integrations.megatron.releases.versions import ENTRIES
from megatron_pp.integrations.megatron.steps import v_placement
from tests.unit_tests.integrations.test_megatron_install import CALL, SCHEDULES, _fresh, stand_in
from tests.unit_tests.integrations.test_megatron_versions import ENTRY, PUBLISHED
from tests.unit_tests.integrations.test_other_schedules import runs, schedules, training_step

__all__ = ["_fresh", "schedules"]  # fixtures
ALONE, ONE_CHUNK, CHUNKS = ENTRIES


def all_three(module: Any) -> list[str]:
    """Names the engine whose schedules run. Only the first of the stand-ins returns something."""
    first, *others = (runs(getattr(module, name)) for name in ENTRIES)
    assert others == (["ours"] * 2 if first == "ours" else ["None"] * 2)
    return [first] * 3


def imported_anew(body: str = "return 'anew'") -> types.ModuleType:
    """Megatron's modules after a program has removed and imported them again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    return stand_in("0.20.0", body)


def test_the_collectors_own_argument_tuple_is_not_reported_as_a_holder(
    schedules: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Since Python 3.13 `gc.get_referrers` reports the tuple of its own arguments."""
    of_before = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: [objects, *of_before(*objects)])
    megatron_core.install()
    assert caplog.messages == []
    megatron_core.uninstall()
    kept = (schedules.get_forward_backward_func(),)  # a tuple of the program's
    megatron_core.install()
    (said,) = caplog.messages
    assert said.startswith(f"{ALONE} was fetched before install() and is held by builtins.tuple: ")
    assert runs(kept[0]) == "theirs"


def test_modules_that_are_imported_anew_are_installed_anew(schedules: Any, caplog: pytest.LogCaptureFixture) -> None:
    megatron_core.install(strict=True)
    new = imported_anew()
    assert not megatron_core.is_installed()
    megatron_core.install(strict=True)
    assert caplog.messages == []
    assert megatron_core.is_installed()
    assert all_three(new) == ["ours"] * 3
    assert runs(new.get_forward_backward_func()) == "ours"
    assert getattr(new, ALONE).plugin.megatron.schedules is new
    assert all_three(schedules) == ["ours"] * 3, "who has kept the modules of before"
    megatron_core.uninstall()
    assert all_three(new) == ["anew"] * 3
    assert all_three(schedules) == ["theirs"] * 3
    assert not any(
        isinstance(getattr(module, name), stand_ins.Schedule) for module in (new, schedules) for name in ENTRIES
    )
    with megatron_core.installed():
        assert all_three(new) == ["ours"] * 3
        newest = imported_anew("return 'newest'")
        assert all_three(newest) == ["newest"] * 3
    assert all_three(new) == ["anew"] * 3, "the block has ended"
    assert caplog.messages == []


def test_modules_imported_anew_and_not_installed_are_reported_at_exit(
    schedules: Any, caplog: pytest.LogCaptureFixture
) -> None:
    megatron_core.install()
    new = imported_anew()
    assert all_three(new) == ["anew"] * 3
    megatron_core._report_unused()
    (said,) = caplog.messages
    assert "imported anew after install()" in said
    assert "call install() again" in said


def test_a_strict_install_that_raises_changes_nothing(schedules: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is changed although it has found functions to replace before the error."""
    megatron_core.install(any_microbatch_count=True)
    ours = [getattr(schedules, name) for name in ENTRIES]
    theirs = [one.theirs for one in ours]
    source = "".join(linecache.getlines(schedules.__file__)).replace("'theirs'", "'anew'")
    exec(compile(source, schedules.__file__, "exec"), vars(schedules))  # as importlib.reload
    setattr(schedules, CHUNKS, print)
    before = dict(vars(schedules)), [dict(vars(one)) for one in ours], dict(vars(ours[0].plugin))
    with pytest.raises(NotServedError, match=r"builtins\.print has replaced"):
        megatron_core.install(strict=True)
    assert [one.theirs for one in ours] == theirs
    assert (dict(vars(schedules)), [dict(vars(one)) for one in ours], dict(vars(ours[0].plugin))) == before
    megatron_core.uninstall()
    assert runs(getattr(schedules, ALONE)) == "anew"
    assert caplog.messages == []


def test_an_install_that_cannot_place_models_changes_nothing(schedules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken import of Megatron's models."""

    def broken(*unused: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(stand_ins, "place_models", broken)
    with pytest.raises(RuntimeError, match="broken"):
        megatron_core.install()
    monkeypatch.undo()
    assert not megatron_core.is_installed()
    assert all_three(schedules) == ["theirs"] * 3


def microbatches(module: Any) -> bool | None:
    """A setting of what is installed."""
    plugin = getattr(getattr(module, ALONE), "plugin", None)
    return None if plugin is None else plugin.settings.any_microbatch_count


def test_blocks_end_in_any_order(schedules: Any) -> None:
    first = megatron_core.installed()
    first.__enter__()
    second = megatron_core.installed(any_microbatch_count=True)
    second.__enter__()
    first.__exit__(None, None, None)
    assert microbatches(schedules) is True, "the other block's"
    second.__exit__(None, None, None)
    assert not megatron_core.is_installed()
    assert training_step() == "theirs"


def test_a_block_ends_as_it_began_whatever_happens_within(schedules: Any, caplog: pytest.LogCaptureFixture) -> None:
    megatron_core.install(any_microbatch_count=True)
    with megatron_core.installed():
        assert microbatches(schedules) is False
        megatron_core.uninstall()
        assert not megatron_core.is_installed()
        with megatron_core.installed():
            assert megatron_core.is_installed()
        assert not megatron_core.is_installed()
    assert microbatches(schedules) is True
    with megatron_core.installed():
        megatron_core.install(any_microbatch_count=False)
    assert microbatches(schedules) is True
    with pytest.raises(KeyError), megatron_core.installed():
        raise KeyError
    with megatron_core.installed():
        setattr(schedules, CHUNKS, print)
        with pytest.raises(NotServedError):
            megatron_core.install(strict=True)
    assert microbatches(schedules) is True
    megatron_core.uninstall()
    with megatron_core.installed():
        megatron_core.install(any_microbatch_count=True)
    assert not megatron_core.is_installed()
    assert training_step() == "theirs"
    assert not [said for said in caplog.messages if CHUNKS not in said]


def test_the_end_of_a_block_raises_nothing(schedules: Any) -> None:
    """The end of a block restores functions that were accepted at its begin."""
    megatron_core.install(strict=True, any_microbatch_count=True)
    with megatron_core.installed():
        setattr(schedules, CHUNKS, print)
    assert microbatches(schedules) is True
    assert getattr(schedules, CHUNKS) is print


def test_blocks_of_threads_leave_nothing_behind(
    schedules: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's sources are read by one thread only, while the others wait. Two at the same time may raise a
    SystemError, and may name what the other one holds while it reads."""
    reading: list[Any] = []

    def slowly(module: Any) -> Any:
        reading.append({name: getattr(module, name) for name in ENTRIES})
        time.sleep(0.2)
        reading[-1] = None
        return read(module)

    read = sources.functions_of
    monkeypatch.setattr(sources, "functions_of", slowly)
    barrier = threading.Barrier(4)
    found: list[str] = []

    def blocks() -> None:
        for _ in range(10):
            barrier.wait(30)
            with megatron_core.installed():
                found.append(runs(getattr(schedules, ALONE)))

    threads = [threading.Thread(target=blocks) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["ours"] * 40
    assert reading == [None]
    assert caplog.messages == []
    assert not megatron_core.is_installed()
    assert all_three(schedules) == ["theirs"] * 3


def loaded_again(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plug-in, for a program that has removed its modules."""
    monkeypatch.setattr(megatron_pp, "integrations", megatron_pp.integrations)  # which the import below replaces
    for name in [name for name in sys.modules if name.startswith(megatron_pp.integrations.__name__)]:
        if ".releases" not in name:  # where the tests of this folder put their own digests
            monkeypatch.delitem(sys.modules, name)
    return importlib.import_module(megatron_core.__name__)


def test_an_engine_that_was_loaded_twice_takes_the_place_of_the_first(
    schedules: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook reloads modules, a test removes them."""
    megatron_core.install()
    second: Any = loaded_again(monkeypatch)
    assert sys.modules[stand_ins.__name__] is not stand_ins
    assert removal.__name__ not in sys.modules
    try:
        second.install(strict=True)
        assert second.is_installed()
        assert all_three(schedules) == ["ours"] * 3
        assert not any(isinstance(getattr(schedules, name), stand_ins.Schedule) for name in ENTRIES)
        second.uninstall()
        assert all_three(schedules) == ["theirs"] * 3
        assert not any(isinstance(getattr(schedules, name), stand_ins.Schedule) for name in ENTRIES)
    finally:
        second.uninstall()
        megatron_core.uninstall()
    assert caplog.messages == []
    assert sys.modules[SCHEDULES] is schedules


def test_a_step_of_a_model_in_a_v_never_runs_on_megatrons_schedule(caplog: pytest.LogCaptureFixture) -> None:
    """Megatron's own schedule would run its chunks in another order."""
    parameters = f"{ENTRY}, {PUBLISHED['0.20.0'][1]}, slots=None"
    module: Any = stand_in("0.20.0", "return 'theirs'", forward_backward_no_pipelining=parameters)
    groups = types.SimpleNamespace(pp=v_placement.MirroredGroup(object()))
    chunks = [types.SimpleNamespace(pg_collection=None), types.SimpleNamespace(pg_collection=groups)]
    with megatron_core.installed():
        schedule = getattr(module, ALONE)
        with pytest.raises(ScheduleInputError, match=r"does not serve .*'slots'.* built for stages in a v"):
            schedule(**CALL | {"model": chunks}, slots=2)
        assert schedule(**CALL | {"model": chunks[:1]}, slots=2) == "theirs"


class ImportsAtItsEnd:
    """Garbage from the beginning. Each time it is collected, until ``over``, it adds a module, and another one like
    itself."""

    def __init__(self, names: list[str], over: threading.Event) -> None:
        self.itself, self.names, self.over = self, names, over

    def __del__(self) -> None:
        if not self.over.is_set():
            self.names.append(f"imported_by_a_finalizer_{len(self.names)}")
            sys.modules[self.names[-1]] = types.ModuleType(self.names[-1])
            vars(sys.modules[SCHEDULES])[self.names[-1]] = None
            ImportsAtItsEnd(self.names, self.over)


def test_a_finalizer_may_import_a_module_while_names_are_replaced(
    schedules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`list(sys.modules.items())` raises there until Python 3.12, where it collects garbage half way."""
    many = {f"one_of_many_{number}": types.ModuleType("one") for number in range(4000)}  # Python keeps 2000 free tuples
    thresholds = gc.get_threshold()
    names: list[str] = []
    over = threading.Event()
    with monkeypatch.context() as changed:
        for name, module in many.items():
            changed.setitem(sys.modules, name, module)
        ImportsAtItsEnd(names, over)
        try:
            gc.set_threshold(100)
            megatron_core.install()
            megatron_core.uninstall()
        finally:
            over.set()
            gc.set_threshold(*thresholds)
    for name in names:
        del sys.modules[name]
    assert names, "no garbage was collected: the test tests nothing"
