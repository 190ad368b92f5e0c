"""The table of Megatron-core's releases, walked: every release's signatures as they were published.

Megatron itself is not imported here; that the installed release matches is checked, with everything else, in the
functional tests.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import runpy
import sys
import types
from pathlib import Path

import pytest

from megatron_pp.errors import UnknownMegatronError
from megatron_pp.integrations.megatron.releases import differences as megatron_differences
from megatron_pp.integrations.megatron.releases import sources as megatron_sources
from megatron_pp.integrations.megatron.releases import versions as megatron_versions
from megatron_pp.integrations.megatron.releases.reads import COMMUNICATOR, known_reads, names_read
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.releases.versions import ENTRIES
from tests.conftest import PROJECT_ROOT

FORWARD = (
    "forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, "
    "cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, is_first_microbatch=False, "
    "current_microbatch=None, vp_stage=None, is_last_stage=True"
)
ENTRY = (
    "*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
    "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
    "adjust_tensor_shapes_fn=None"
)
# backward_step after its three tensors, and what the schedules take after ENTRY (without and with a pipeline)
PUBLISHED = {
    "0.14.0": (
        "model_type, config, pipeline_model_parallel_size=1",
        "grad_finalize_pgs=None",
        "p2p_communicator=None, grad_finalize_pgs=None",
    ),
    "0.15.3": ("model_type, config", "pg_collection=None", "p2p_communicator=None, pg_collection=None"),
    "0.16.1": ("model_type, config", *["p2p_communicator=None, pg_collection=None, force_all_reduce=False"] * 2),
    "0.17.1": ("config", *["p2p_communicator=None, pg_collection=None, force_all_reduce=False"] * 2),
    "0.18.2": ("config", *["p2p_communicator=None, pg_collection=None, force_all_reduce=False"] * 2),
    "0.19.0": ("config", *["p2p_communicator=None, pg_collection=None, force_all_reduce=False"] * 2),
    "0.20.0": ("config", *["p2p_communicator=None, pg_collection=None, force_all_reduce=False"] * 2),
}


def published_schedules(version: str, body: str = "...", **changed: str) -> types.ModuleType:
    """A module with the published signatures of a release, named as Megatron's, whose source `inspect` finds.

    `body` is that of the schedule without a pipeline; `changed` maps a function to another list of parameters.
    """
    backward, alone, pipelined = PUBLISHED[version]
    signatures = {
        "forward_step": FORWARD,
        "backward_step": f"input_tensor, output_tensor, output_tensor_grad, {backward}",
        "custom_backward": "output, grad_output",
        "clear_embedding_activation_buffer": "config, model, is_last_stage",
        "finish_embedding_wgrad_compute": "config, embedding_module, is_last_stage, tp_group",
        "get_tensor_shapes": ", ".join(["*", *megatron_differences.TENSOR_SHAPES]),
        "forward_backward_no_pipelining": f"{ENTRY}, {alone}",
        "forward_backward_pipelining_without_interleaving": f"{ENTRY}, {pipelined}",
        "forward_backward_pipelining_with_interleaving": f"{ENTRY}, {pipelined}",
    }
    signatures.update(changed)
    bodies = {"forward_backward_no_pipelining": body}
    lines = [f"def {name}({parameters}): {bodies.get(name, '...')}" for name, parameters in signatures.items()]
    get = "def get_forward_backward_func(pp_size=None, vp_size=None): return forward_backward_no_pipelining"
    source = "\n".join(["class P2PCommunicator: ...", *lines, get])
    module = types.ModuleType("megatron.core.pipeline_parallel.schedules")
    module.__file__ = f"<schedules {len(linecache.cache)}>"
    linecache.cache[module.__file__] = (0, None, source.splitlines(keepends=True), module.__file__)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("version", PUBLISHED)
def test_every_release_of_the_table_has_the_signatures_it_says(version: str) -> None:
    row = megatron_versions.row_of(version)
    megatron_differences.check_signatures(published_schedules(version), row, version)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"backward_step": "input_tensor, output_tensor, output_tensor_grad, config, tensor_map"}, "tensor_map"),
        ({"backward_step": "input_tensor, output_tensor, config"}, "output_tensor_grad"),
        ({"custom_backward": "output, grad_output, keep_graph"}, "keep_graph"),
        ({"forward_step": FORWARD.replace("vp_stage=None", "chunk=None")}, "vp_stage"),
        ({"forward_backward_pipelining_with_interleaving": f"{ENTRY}, force_all_reduce=False"}, "pg_collection"),
        ({"finish_embedding_wgrad_compute": "config, embedding_module, is_last_stage, tp_group, stream"}, "stream"),
    ],
)
def test_an_unknown_signature_is_named(changed: dict[str, str], named: str) -> None:
    version = "0.20.0"
    with pytest.raises(UnknownMegatronError, match=named) as caught:
        megatron_differences.check_signatures(
            published_schedules(version, **changed), megatron_versions.row_of(version), version
        )
    assert version in str(caught.value)
    assert next(iter(changed)) in str(caught.value)


def test_a_missing_function_is_named() -> None:
    schedules = published_schedules("0.20.0")
    del schedules.backward_step
    with pytest.raises(UnknownMegatronError, match="has no backward_step"):
        megatron_differences.check_signatures(schedules, megatron_versions.row_of("0.20.0"), "0.20.0")


def test_new_parameters_with_defaults_are_left_alone() -> None:
    more = f"{FORWARD}, something_new=None"
    version = "0.21.3"
    schedules = published_schedules("0.20.0", forward_step=more)
    megatron_differences.check_signatures(schedules, megatron_versions.row_of(version), version)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.14.0", (0, 14)),
        ("0.15.0rc3", (0, 15)),
        ("0.16.1", (0, 16)),
        ("0.17.0rc0", (0, 17)),
        ("0.19.0", (0, 18)),
        ("1.2.0", (0, 18)),
    ],
)
def test_the_row_of_a_version(version: str, release: tuple[int, int]) -> None:
    assert megatron_versions.row_of(version).release == release


@pytest.mark.parametrize("version", ["0.13.1", "0.9.0", "unknown"])
def test_a_release_older_than_the_table_is_refused(version: str) -> None:
    with pytest.raises(UnknownMegatronError, match=r"oldest supported release is 0\.14"):
        megatron_versions.row_of(version)


def known_steps(schedules: types.ModuleType) -> dict[str, types.CodeType]:
    return megatron_sources.known_steps(schedules, megatron_sources.functions_of(schedules))


def test_functions_of_unknown_source_or_replaced_ones_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = published_schedules("0.20.0")
    assert known_steps(schedules) == {}
    sources = {name: inspect.getsource(getattr(schedules, name)) for name in ("forward_step", "backward_step")}
    digests = {name: hashlib.sha256(source.encode()).hexdigest()[:12] for name, source in sources.items()}
    monkeypatch.setattr(megatron_sources, "KNOWN", digests)
    monkeypatch.setattr(megatron_sources, "STEP_SOURCES", {**digests, "of_a_newer_release": "0"})
    known = known_steps(schedules)
    assert list(known) == list(digests)
    row = megatron_versions.row_of("0.20.0")
    megatron = Megatron("0.20.0", row, schedules, schedules, known_steps=known)
    assert megatron.has_known_steps()
    monkeypatch.setattr(schedules, "backward_step", functools.wraps(schedules.backward_step)(lambda **given: None))
    assert not megatron.has_known_steps()
    assert known_steps(schedules) == {}
    assert not Megatron("0.20.0", row, schedules, schedules).has_known_steps()


ALONE = ENTRIES[0]

SOURCE = """
@traced('step')
def forward_backward(*, model: Module, num_microbatches: int, slots=None):
    config = get_model_config(model)
    outputs = []
    if hasattr(config, 'graph_slots') and getattr(config, "graphs", None):
        outputs.append(forward_step(model, config.timers, slot=slots))
    for chunk in range(num_microbatches):
        chunk.reset_slots(value=1)
    def helper(index: int):
        return len(outputs) + index
    config.finalize(helper(0), groups=model.groups)
    backward = partial(backward_step, model)
    return backward()
"""


def test_names_that_a_function_uses_are_found() -> None:
    assert names_read(SOURCE) == {
        *("traced", "get_model_config", "forward_step", "forward_step(slot=)", "partial", "backward_step"),
        *("config.graph_slots", "config.graphs", "config.timers", "config.finalize", "config.finalize(groups=)"),
        *(".reset_slots", ".groups"),
    }


def test_a_communicators_config_is_its_own() -> None:
    source = "class C:\n    def send(self, x):\n        return self.config.compresses(x), self.rank"
    assert names_read(source) == {".config", "config.compresses", ".rank"}


def test_names_are_known_from_their_release_on() -> None:
    assert "config.moe_paged_stash" not in known_reads(ALONE, (0, 17))
    assert "config.moe_paged_stash" in known_reads(ALONE, (0, 18)) & known_reads(ALONE, (1, 0))
    assert ".synchronize_param_gather" not in known_reads(ENTRIES[1], (0, 20))
    assert "config.moe_paged_stash" not in known_reads(COMMUNICATOR, (0, 20))


def test_the_script_prints_what_a_checkout_has_beyond_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "megatron/core/pipeline_parallel"
    folder.mkdir(parents=True)
    (folder.parent / "package_info.py").write_text("MAJOR = 0\nMINOR = 21\n")
    functions = [f"def {name}(model):\n    return set_slot(get_model_config(model).slots)\n" for name in ENTRIES]
    (folder / "schedules.py").write_text("\n".join(functions))
    (folder / "p2p_communication.py").write_text("class P2PCommunicator:\n    x = None\n")
    monkeypatch.setattr(megatron_sources, "KNOWN", megatron_sources.SCHEDULE_SOURCES)
    monkeypatch.setattr(sys, "argv", ["megatron_reads.py", str(tmp_path)])
    runpy.run_path(str(PROJECT_ROOT / "scripts" / "megatron_reads.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "(0, 21)" in printed
    assert f'"{ALONE}":\n        .slots set_slot\n' in printed
    assert f'"{COMMUNICATOR}":\n' not in printed
    for name in (*ENTRIES, COMMUNICATOR):
        source = next(text for text in [*functions, "class P2PCommunicator:\n    x = None\n"] if name in text)
        assert f'source of "{name}": {hashlib.sha256(source.encode()).hexdigest()[:12]}\n' in printed


def test_a_source_is_parsed_again_where_another_thread_was_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, errors = ast.parse, [SystemError("AST constructor recursion depth mismatch (before=90, after=65)")] * 3

    def disturbed(source: str) -> ast.Module:
        if errors:
            raise errors.pop()
        return parse(source)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert names_read("def f(config):\n    return config.compresses") == {"config.compresses"}
    assert not errors
