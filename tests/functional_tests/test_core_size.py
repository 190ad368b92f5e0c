"""The modules that a default step loads, by name, in two books with a limit of lines for each.

The *machine* is what a rank runs in a step. The *compiler* makes and verifies plans, and never imports torch. A reader
of either needs no other module. The table of features, which both look into, is counted with the machine.

The default steps run on gloo. A rank on NCCL, which runs on a virtual device, loads other modules in place of gloo's.
"""

from __future__ import annotations

import gc
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import MetaPathFinder
from types import FrameType
from typing import Any

import pytest

import megatron_pp
from megatron_pp.config.setting_names import PREFIX
from testkit.processes import run_processes
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = pytest.mark.callers_thread
# The most lines of a book. The aim for the machine under install() is 6,500: lower its limit if you remove modules.
COMPILER_LINES = 4_380
MACHINE_LINES = 7_317
INSTALLED_MACHINE_LINES = 6_940
NCCL_MACHINE_LINES = 7_529  # under install()

# Package -> its modules that a default step loads.
MACHINE = {
    "": "errors feature_table on_demand",
    "comm": "backends communicator group_transport stores transport wait_handle",
    "common": "finalizers log_once module_attributes object_table",
    "config": "checks dtypes rules setting_names settings step_fields",
    "faults": "attach consistency guard heartbeat watchdog",
    "faults.position": "places tracker",
    "faults.store": "fault_store peers processes records",
    "runtime": (
        "arguments communicators host kept_calls make_step message_shapes plan_choice run_step step step_features"
    ),
    "runtime.engine": "compute executor gradient_hooks",
    "runtime.model_checks": "chunk_places",
    "tracing": "observers",
}
# The modules that carry the messages have their own package; further modules belong to them.
GLOO = {"comm.gloo": "gloo_transport waiting_threads"}
NCCL = {
    "comm": "batches channels events",
    "comm.nccl": "nccl_transport",
    "config": "device_rules",
    "faults": "nccl_settings optimizer_hooks",
    "faults.position": "device_events host_ahead",
    "runtime.model_checks": "queue_advice",
}
# Modules for the library's own programs, which make their groups and configs, and have their own loop.
OWN = {
    "": "parallel_state schedules",
    "comm": "own_groups",
    "config": "kinds layout made model_config nearest parallel_grid",
    "runtime": "own_host",
    "runtime.engine": "deallocate model_steps swapped_outputs",
    "runtime.model_checks": "unsynchronised",
}
UNDER_INSTALL = {
    "integrations": "megatron_core",
    "integrations.megatron": "given named_objects stand_ins",
    "integrations.megatron.releases": "release sources versions",
    "integrations.megatron.steps": "after_step call gpt_models known_steps",
    "integrations.megatron.steps.served": "scope served_configs",
}
COMPILER = {
    "common": "bounded_cache gc_pause names",
    "plan": "builder",
    "plan.costs": "transports",
    "plan.ir": "agenda certificate dataflow feature instruction ledger placement repeated rules spec tasks",
    "plan.lower": "boundaries clock lowering order_check repetition syncs turns",
    "plan.orders": "family interleaved one_chunk",
    "plan.verify": "device_ranks lifetime queues rendezvous sync_check verifier",
}
# A rank of a slow machine that waits for more than a second looks for the cause.
OF_A_SLOW_RANK = {
    "comm": "abort failed_transfers",
    "faults": "failing",
    "faults.causes": "diagnosis liveness mutual_waits positions stall_detector",
    "faults.position": "host_threads",
    "faults.store": "failures",
}
# Modules that import for others.
_IMPORTERS = {"megatron_pp.on_demand", "importlib", "importlib._bootstrap", "importlib._bootstrap_external"}


class Importers(MetaPathFinder):
    """Notes who imports modules of the package. ``by``: module -> where it was first imported. ``tools``: modules of
    ``tools`` that have started this rank."""

    def __init__(self) -> None:
        self.by: dict[str, str] = {}
        self.tools = {name for name in sys.modules if name.startswith("megatron_pp.tools")}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "megatron_pp":
            asks = next(frame for frame in _callers(sys._getframe(1)) if not _passes_on(frame))
            self.by[name] = f"{asks.f_globals['__name__']}, line {asks.f_lineno}"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _passes_on(frame: FrameType) -> bool:
    return frame.f_globals["__name__"] in _IMPORTERS or frame.f_code.co_name == "__getattr__"


def loaded(importers: Importers) -> dict[str, tuple[int, str]]:
    """Return, for each loaded module of the package, its number of lines and where it was first imported."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron_pp" and name not in importers.tools:
            lines = pathlib.Path(module.__file__ or "").read_text(encoding="utf-8").count("\n")
            found[name] = lines, importers.by.get(name, "the test")
    return found


def forget_what_the_tests_load() -> None:
    """Forget modules that the test has loaded; the engine loads again those that it needs."""
    for name in [name for name in sys.modules if name.startswith(("megatron_pp.tools", "megatron_pp.comm.bound"))]:
        del sys.modules[name]


def own_steps(rank: int, size: int) -> dict[str, tuple[int, str]]:
    forget_what_the_tests_load()
    sys.meta_path.insert(0, importers := Importers())
    from megatron_pp import parallel_state

    train(megatron_pp, parallel_state, size)
    return loaded(importers)


def installed_steps(rank: int, size: int) -> dict[str, tuple[int, str]]:
    gc.disable()  # a fifth of the time to import Megatron-core
    for variable in [name for name in os.environ if name.startswith(PREFIX)]:  # the project's scripts set some
        del os.environ[variable]  # install() reads its settings if there is one
    sys.meta_path.insert(0, importers := Importers())
    from megatron_pp.tools.parity import cpu_stand_in

    cpu_stand_in.redirect()
    with cpu_stand_in.triton_stand_in():
        from megatron.core import parallel_state, pipeline_parallel
        from megatron.core.transformer import TransformerConfig
    forget_what_the_tests_load()

    from megatron_pp.integrations import megatron_core

    megatron_core.install(strict=True)
    pipeline_parallel.TransformerConfig = TransformerConfig  # type: ignore[attr-defined]
    # Megatron's training loop always has a function that finalises gradients.
    train(pipeline_parallel, parallel_state, size, finalize_model_grads_func=lambda model, tokens, **groups: None)
    return loaded(importers)


def steps_on_nccl(rank: int, size: int) -> set[str]:
    """Forget the modules of gloo and NCCL, and return those that ranks on virtual devices load again."""
    from megatron_pp.testing.pipeline import run_rank
    from megatron_pp.testing.toy import ToyData
    from testkit.device_runs.nccl_runs import on_nccl
    from testkit.streams import StreamNetwork

    forgotten = names_in(GLOO, NCCL) - names_in(MACHINE, COMPILER)
    for name in sorted(forgotten & set(sys.modules), reverse=True):
        room, _, module = name.rpartition(".")
        del sys.modules[name]
        delattr(sys.modules[room], module)
    for chunks in (1, 2):
        on_nccl(
            StreamNetwork(2, seed=None),
            lambda communicator, chunks=chunks: run_rank(
                communicator.rank, 2, chunks, ToyData(4), communicator.config, communicator
            ),
        )
    return forgotten & set(sys.modules)


def train(library: Any, parallel_state: Any, size: int, **more: Any) -> None:
    """Take two steps of 1F1B, and two of interleaved 1F1B. ``more``: fields of the config."""
    import torch

    from testkit.models.linear_stage import LinearStage, forward_step

    for chunks in (1, 2):
        virtual = None if chunks == 1 else chunks
        sizes = {"pipeline_model_parallel_size": size, "virtual_pipeline_model_parallel_size": virtual}
        parallel_state.initialize_model_parallel(**sizes)
        config = library.TransformerConfig(
            num_layers=4, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32, **sizes, **more
        )
        model = [LinearStage(config, chunk) for chunk in range(chunks)]
        for _ in range(2):
            data = [iter([torch.ones(4, 1, 8)] * 4) for _ in model]
            library.get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data if virtual else data[0],
                model=model if virtual else model[0],
                num_microbatches=4,
                seq_length=4,
                micro_batch_size=1,
                forward_only=False,
            )
        parallel_state.destroy_model_parallel()


def names_in(*books: Mapping[str, str]) -> set[str]:
    """Return the names of the modules in ``books``, and of their packages."""
    return {
        ".".join(filter(None, ("megatron_pp", room, name)))
        for book in books
        for room, names in book.items()
        for name in ("", *names.split())
    }


@pytest.mark.parametrize(
    ("steps", "more", "most"),
    [
        (own_steps, OWN, MACHINE_LINES),
        pytest.param(installed_steps, UNDER_INSTALL, INSTALLED_MACHINE_LINES, marks=needs_megatron),
    ],
)
def test_a_default_step_loads_two_books(steps: Any, more: Mapping[str, str], most: int) -> None:
    # The last rank alone starts as a launcher starts ranks: with nothing loaded. Its peer loads the same modules.
    found = run_processes(steps, 2, timeout=120, start_method=("forkserver", "spawn"))[-1]
    machine, compiler = names_in(MACHINE, GLOO, more), names_in(COMPILER)
    unlisted = set(found) - machine - compiler - names_in(OF_A_SLOW_RANK)
    said = "".join(f"\n{name}: {found[name][0]} lines, asked for by {found[name][1]}" for name in sorted(unlisted))
    assert not unlisted, f"a default step loads modules that are in neither book:{said}"
    gone = (machine | compiler) - set(found)
    assert not gone, f"no default step loads {', '.join(sorted(gone))}: take them out of the book"
    for book, limit in ((machine, most), (compiler, COMPILER_LINES)):
        lines = {name: found[name][0] for name in book}
        assert sum(lines.values()) <= limit, f"{sum(lines.values())} lines, and {limit} are wanted: {lines}"


def test_a_rank_on_nccl_loads_no_module_of_gloos() -> None:
    (found,) = run_processes(steps_on_nccl, 1, timeout=120, backend=None)
    assert found == names_in(NCCL) - names_in(MACHINE, COMPILER)
    book = names_in(MACHINE, UNDER_INSTALL, NCCL)
    lines = {name: _file_of(name).read_text(encoding="utf-8").count("\n") for name in book}
    assert sum(lines.values()) <= NCCL_MACHINE_LINES, f"{sum(lines.values())} lines: {lines}"


def _file_of(name: str) -> pathlib.Path:
    path = pathlib.Path(megatron_pp.__file__).parent.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
