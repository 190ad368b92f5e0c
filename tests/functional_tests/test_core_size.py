"""How many lines of the package a default step loads, and which rooms they are in."""

from __future__ import annotations

import gc
import pathlib
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from types import FrameType
from typing import Any

import pytest

from tests.functional_tests.megatron_support import needs_megatron
from tests.harness.processes import run_processes

pytestmark = pytest.mark.callers_thread
# What a default step may load while machine and compiler are not counted apart.
OWN_LINES = 12_400
INSTALLED_LINES = 13_600

# Room -> its modules that a default step loads; those of integrations under install() alone.
ROOMS = {
    "": "errors on_demand parallel_state schedules",
    "comm": (
        "at_exit channels communicator events gloo gloo_transport group_transport p2p_communicator "
        "own_groups stores transport wait_handle"
    ),
    "common": "finalizers module_attributes object_table",
    "config": "checks conversions kinds layout microbatch_counts model_config parallel_grid rules settings",
    "faults": "attach consistency guard heartbeat liveness peers places records stall_detector tracker watchdog",
    "integrations": (
        "after_step gpt_models known_steps megatron_call megatron_core megatron_reads megatron_release megatron_scope "
        "megatron_sources megatron_steps megatron_versions named_objects settings"
    ),
    "plan": "bounded_cache builder gc_pause names",
    "plan.costs": "activations transports",
    "plan.ir": "agenda certificate dataflow feature instruction ledger placement repeated rules spec tasks",
    "plan.lower": "boundaries clock lowering order_check repetition syncs",
    "plan.orders": "family free_ranks interleaved one_chunk overtaking",
    "plan.verify": "device_ranks lifetime queues rendezvous sync_check verifier",
    "runtime": (
        "arguments chunk_places communicators compute deallocate executor gradient_hooks log_once message_shapes "
        "plan_choice step"
    ),
    "tracing": "observers",
}
# They import for others.
_IMPORTERS = {"megatron_pp.on_demand", "importlib", "importlib._bootstrap", "importlib._bootstrap_external"}


class Importers(MetaPathFinder):
    """``by``: module of the package -> where it was first asked for. ``parity``: those of ``megatron_pp.parity`` that
    have started this rank."""

    def __init__(self) -> None:
        self.by: dict[str, str] = {}
        self.parity = {name for name in sys.modules if name.startswith("megatron_pp.parity")}

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
    """Module of the package -> its lines, and where it was first asked for."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron_pp" and name not in importers.parity:
            lines = pathlib.Path(module.__file__ or "").read_text(encoding="utf-8").count("\n")
            found[name] = lines, importers.by.get(name, "the test")
    return found


def forget_what_the_tests_load() -> None:
    """What the engine loads of it comes back."""
    for name in [name for name in sys.modules if name.startswith("megatron_pp.parity")]:
        del sys.modules[name]


def own_steps(rank: int, size: int) -> dict[str, tuple[int, str]]:
    forget_what_the_tests_load()
    sys.meta_path.insert(0, importers := Importers())
    import megatron_pp
    from megatron_pp import parallel_state

    train(megatron_pp, parallel_state, size)
    return loaded(importers)


def installed_steps(rank: int, size: int) -> dict[str, tuple[int, str]]:
    gc.disable()  # a fifth of the time to import Megatron-core
    sys.meta_path.insert(0, importers := Importers())
    from megatron_pp.parity import cpu_stand_in

    cpu_stand_in.redirect()
    with cpu_stand_in.triton_stand_in():
        from megatron.core import parallel_state, pipeline_parallel
        from megatron.core.transformer import TransformerConfig
    forget_what_the_tests_load()

    from megatron_pp.integrations import megatron_core

    megatron_core.install(strict=True)
    pipeline_parallel.TransformerConfig = TransformerConfig  # type: ignore[attr-defined]
    train(pipeline_parallel, parallel_state, size)
    return loaded(importers)


def train(library: Any, parallel_state: Any, size: int) -> None:
    """Two steps of 1F1B, and two of interleaved 1F1B."""
    import torch

    class Stage(torch.nn.Module):
        def __init__(self, config: Any, vp_stage: int) -> None:
            super().__init__()
            self.layer, self.config, self.vp_stage = torch.nn.Linear(8, 8), config, vp_stage
            self.model_type, self.input_tensor = None, None

        def set_input_tensor(self, given: Any) -> None:
            self.input_tensor = given[0] if isinstance(given, list) else given

        def forward(self, data: Any) -> Any:
            return self.layer(data if self.input_tensor is None else self.input_tensor)

    def forward_step(data: Iterator[Any], model: Any) -> Any:
        return model(next(data)), lambda output: (output.mean(), {"loss": output.detach().mean()})

    for chunks in (1, 2):
        virtual = None if chunks == 1 else chunks
        sizes = {"pipeline_model_parallel_size": size, "virtual_pipeline_model_parallel_size": virtual}
        parallel_state.initialize_model_parallel(**sizes)
        config = library.TransformerConfig(
            num_layers=4, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32, **sizes
        )
        model = [Stage(config, chunk) for chunk in range(chunks)]
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


@pytest.mark.parametrize(
    ("steps", "most"),
    [(own_steps, OWN_LINES), pytest.param(installed_steps, INSTALLED_LINES, marks=needs_megatron)],
)
def test_a_default_step_loads_the_core_alone(steps: Any, most: int) -> None:
    # The last rank alone starts as a launcher starts ranks: with nothing loaded. Its peer loads the same modules.
    found = run_processes(steps, 2, timeout=120, start_method="mixed")[-1]
    known = {f"{room}.{part}".strip(".") for room, names in ROOMS.items() for part in ["", *names.split()]}
    new = "".join(
        f"\n{module}: {lines} lines, asked for by {by}"
        for module, (lines, by) in found.items()
        if module.removeprefix("megatron_pp").removeprefix(".") not in known
    )
    strangers = {module for module in found if _room(module) not in ROOMS}
    assert not strangers, f"a default step loads a room that it has no use for:{new}"
    lines = sum(count for count, _ in found.values())
    assert lines <= most, f"a default step loads {lines} lines, and {most} are wanted; modules not listed here:{new}"


def _room(module: str) -> str:
    """`comm` of `megatron_pp.comm.transport`, `plan.ir` of `megatron_pp.plan.ir.spec`."""
    parts = module.split(".")[1:]
    inner = parts[:1] == ["plan"] and ".".join(parts[:2]) in ROOMS
    return ".".join(parts[: 2 if inner else 1]) if len(parts) > 1 else ""
