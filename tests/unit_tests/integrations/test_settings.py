"""The settings of install(): where each can come from, which source goes first, and what is refused."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.config.setting_names import PREFIX
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ConfigError
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.integrations.megatron.given import InstallSettings
from megatron_pp.integrations.megatron.settings import OTHER_VARIABLES, SWITCHES, TABLE, read_settings
from testkit.pages import ROOT

# Setting -> its text in the environment, its line in a file, what the engine gets.
EXAMPLES: dict[str, tuple[str, str, Any]] = {
    "pipeline_schedule": ("eager_1f1b", '"eager_1f1b"', "eager_1f1b"),
    "pipeline_measured": ("measured.json", '"measured.json"', "measured.json"),
    "microbatch_group_size_per_vp_stage": ("4", "4", 4),
    "overlapped_forward_backward": ("in_turn", '"in_turn"', in_turn),
    "overlap_p2p_comm": ("yes", "true", True),
    "batch_p2p_comm": ("0", "false", False),
    "batch_p2p_sync": ("on", "true", True),
    "deallocate_pipeline_outputs": ("off", "false", False),
    "variable_seq_lengths": ("1", "true", True),
    "pipeline_dtype": ("bfloat16", '"torch.bfloat16"', torch.bfloat16),
    "offload_chunks": ("1", "1", 1),
    "offload_slots": ("2", "2", 2),
    "fsdp_collectives": ("by_cost", '"by_cost"', "by_cost"),
    "fsdp_max_active_stages": ("2", "2", 2),
    "p2p_channels": ("shared", '"shared"', "shared"),
    "p2p_max_ctas": ("2", "2", 2),
    "max_pending_sends": ("0", "0", 0),
    "warm_up_p2p": ("false", "false", False),
    "device_sync": ("true", "true", True),
    "p2p_timeout": ("2.5", "2.5", 2.5),
    "compute_timeout": ("3600", "3600", 3600),
    "p2p_debug": ("1", "true", True),
    "trace_dir": ("traces", '"traces"', "traces"),
    "trace_steps": ("3,10-12", '"3,10-12"', "3,10-12"),
    "trace_first_step": ("101", "101", 101),
    "metrics": ("10", "10", 10),
    "measure": ("5", "5", 5),
    "measure_out": ("out.json", '"out.json"', "out.json"),
    "strict": ("1", "true", True),
    "any_microbatch_count": ("yes", "true", True),
    "split_weight_grad": ("no", "false", False),
    "whole_sequence_loss": ("yes", "true", True),
}
# Fields that the engine reads and that are the model's, or the training loop's.
NOT_SETTINGS = {
    # Megatron's layers run sequences whole.
    *("sequence_slices", "balance_sequence_slices", "skip_tensors", "skip_cache"),
    *("tensor_model_parallel_size", "context_parallel_size", "virtual_pipeline_model_parallel_size", "hidden_size"),
    *("ffn_hidden_size", "hidden_dropout", "attention_dropout"),
    *("sequence_parallel", "enable_autocast", "autocast_dtype", "calculate_per_token_loss", "mtp_standalone"),
    *("fine_grained_activation_offloading", "moe_paged_stash", "overlap_moe_expert_parallel_comm"),
    *("num_microbatches_with_partial_activation_checkpoints", "defer_embedding_wgrad_compute", "cuda_graph_impl"),
    *("timers", "barrier_with_L1_time", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
    "finalize_model_grads_func",
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("measured.json").write_text(json.dumps({"forward": 2.0}))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def give(**texts: str) -> None:
        for name, text in texts.items():
            monkeypatch.setenv(PREFIX + name.upper(), text)

    return give


def file(*lines: str) -> str:
    Path("settings.toml").write_text("\n".join(lines))
    return "settings.toml"


def given(settings: InstallSettings) -> dict[str, Any]:
    return {**settings.overrides, **{name: getattr(settings, name) for name in SWITCHES}}


def refusal(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_settings(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_field_that_the_engine_reads_is_a_setting_or_known_to_be_none() -> None:
    assert set(TABLE) - set(SWITCHES) == set(StepSettings._fields) - NOT_SETTINGS
    assert set(EXAMPLES) == {name for name, setting in TABLE.items() if not setting.kind.only_keyword}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_source_gives_the_same_value(name: str, environment: Callable[..., None]) -> None:
    text, line, value = EXAMPLES[name]
    assert given(read_settings(file(f"{name} = {line}")))[name] == value
    assert given(read_settings(**{name: value}))[name] == value
    environment(**{name: text})
    found = given(read_settings())[name]
    assert found == value
    assert type(found) is type(value)


def test_nothing_given_changes_nothing() -> None:
    assert read_settings(strict=None, p2p_timeout=None) == InstallSettings()


def test_a_keyword_goes_before_the_environment_before_the_file_before_the_config(
    environment: Callable[..., None],
) -> None:
    config = SimpleNamespace(p2p_timeout=1.0, trace_dir="config's", hidden_size=8)
    before = dict(vars(config))

    def timeout(*arguments: Any, **keywords: Any) -> float:
        return StepSettings.from_config(config, read_settings(*arguments, **keywords).overrides).p2p_timeout

    assert timeout() == 1.0
    path = file("p2p_timeout = 2")
    assert timeout(path) == 2
    environment(p2p_timeout="3")
    assert timeout(path) == 3
    assert timeout(path, p2p_timeout=4) == 4
    assert timeout(path, p2p_timeout=None) == 3
    environment(p2p_timeout="")
    assert timeout(path) == 2, "an empty variable is none"
    settings = StepSettings.from_config(config, read_settings(path).overrides)
    assert (settings.trace_dir, settings.hidden_size) == ("config's", 8)
    assert vars(config) == before


def test_the_file_of_a_keyword_goes_before_that_of_the_environment(environment: Callable[..., None]) -> None:
    Path("other.toml").write_text("p2p_timeout = 7\nmax_pending_sends = 5")
    environment(settings="other.toml")
    assert read_settings().overrides == {"p2p_timeout": 7, "max_pending_sends": 5}
    assert read_settings(Path(file("p2p_timeout = 8"))).overrides == {"p2p_timeout": 8}


def test_paths_and_functions_are_values_of_keywords() -> None:
    def pair(forward: Any, backward: Any) -> None: ...

    taken = read_settings(
        trace_dir=Path("traces"), overlapped_forward_backward=pair, step_number=len, pipeline_measured={"forward": 2.0}
    )
    values = {"overlapped_forward_backward": pair, "step_number": len, "pipeline_measured": {"forward": 2.0}}
    assert taken.overrides == {"trace_dir": "traces", **values}


def test_setting_overlap_p2p_comm_sets_batch_p2p_comm_to_its_opposite(environment: Callable[..., None]) -> None:
    megatrons = SimpleNamespace(overlap_p2p_comm=False, batch_p2p_comm=True)
    assert StepSettings.from_config(megatrons, read_settings(overlap_p2p_comm=True).overrides).policy == "overlap"
    megatrons = SimpleNamespace(overlap_p2p_comm=True, batch_p2p_comm=False)
    assert StepSettings.from_config(megatrons, read_settings(overlap_p2p_comm=False).overrides).policy == "batched"
    assert StepSettings.from_config(megatrons, read_settings(batch_p2p_comm=True).overrides).policy == "batched"
    neither = read_settings(overlap_p2p_comm=False, batch_p2p_comm=False)
    assert StepSettings.from_config(megatrons, neither.overrides).policy == "plain"
    environment(overlap_p2p_comm="1")
    assert StepSettings.from_config(megatrons, read_settings(batch_p2p_comm=True).overrides).policy == "batched"
    assert StepSettings.from_config(megatrons, read_settings(file("batch_p2p_comm = true")).overrides).policy == (
        "overlap"
    )


# -- unknown names ----------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_nearest(environment: Callable[..., None]) -> None:
    for near in ("overlap_p2p_com", "OverlapP2PComm", "overlap_p2p"):
        words = f"setting {near!r} is not known (did you mean overlap_p2p_comm?); it is one of {next(iter(TABLE))}, "
        assert refusal(**{near: True}).startswith(f"install(): {words}")
        assert refusal(file(f"{near} = true")).startswith(f"settings file settings.toml: {words}")
    assert refusal(overlap_p2p_com=None).startswith("install(): setting 'overlap_p2p_com' is not known")
    assert "'hidden_size' is not known" in refusal(hidden_size=4), "it is the model's"
    assert "setting 'megatron_pp' is not known" in refusal(file("[megatron_pp]", "p2p_timeout = 3"))
    environment(p2p_timeouts="3")
    assert refusal().startswith(
        "environment variable MEGATRON_PP_P2P_TIMEOUTS: setting 'p2p_timeouts' is not known (did you mean p2p_timeout?)"
    )


def test_the_step_number_cannot_be_written_down(environment: Callable[..., None]) -> None:
    words = "step_number changes from step to step; give it as a keyword of install()"
    assert refusal(file("step_number = 3")) == f"settings file settings.toml: {words}"
    environment(step_number="3")
    assert refusal() == f"environment variable MEGATRON_PP_STEP_NUMBER: {words}"


def test_variables_of_this_project_that_are_no_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = ("megatron_pp", "scripts", "examples", "benchmarks", "testkit", "tests", "docs", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".md")]
    tests_of_wrong_names = ("test_settings.py", "test_run.py")
    files = [
        path for path in [*files, ROOT / "setup.py", ROOT / ".ci" / "run"] if path.name not in tests_of_wrong_names
    ]
    texts = [path.read_text() for path in files]
    used = {name for text in texts for name in re.findall(rf"\b{PREFIX}[A-Z][A-Z0-9_]*\b", text)}
    settings = {PREFIX + name.upper() for name in TABLE}
    assert used - settings <= OTHER_VARIABLES
    assert used >= OTHER_VARIABLES
    for name in OTHER_VARIABLES - {f"{PREFIX}SETTINGS"}:
        monkeypatch.setenv(name, "1")
    assert read_settings() == InstallSettings()


# -- wrong values -----------------------------------------------------------------------------------------------------

# One of each kind; what else is wrong with a value is in config/test_model_config.py.
WRONG: list[tuple[str, Any, str]] = [
    ("overlap_p2p_comm", 1, "overlap_p2p_comm is 1; it must be true or false"),
    ("strict", "yes", "strict is 'yes'; it must be true or false"),
    ("p2p_timeout", "60", "p2p_timeout is '60'; it must be a number of seconds above 0, such as 600.0"),
    ("p2p_max_ctas", 0, "p2p_max_ctas is 0; the smallest legal value is 1 (None for the pipeline group's own)"),
    ("p2p_channels", "both", "p2p_channels is 'both'; it must be one of 'one_way', 'shared'"),
    ("trace_first_step", 0, "trace_first_step is 0; the smallest legal value is 1"),
    ("trace_steps", "3-1", "trace_steps is '3-1'; it must list steps, as in 3,10-12"),
    ("trace_dir", 3, "trace_dir is 3; it must be a text"),
    ("step_number", "3", "step_number is '3'; it must be a whole number of at least 0 (or a function that returns it)"),
    ("microbatch_costs", 3, "microbatch_costs is 3; it must be a list of numbers above 0, or a function"),
    ("microbatch_costs", [1, 0], "microbatch_costs is [1, 0]; it must be 2 finite numbers above 0, one for each"),
    ("pipeline_schedule", "zbv", "pipeline_schedule is 'zbv' (did you mean zb_v?); it must be one of gpipe, 1f1b, "),
    ("pipeline_schedule", "none.csv", "pipeline_schedule: none.csv: cannot be read (No such file or directory)"),
    ("pipeline_measured", {"forwards": 1.0}, "pipeline_measured: measured value"),
    ("pipeline_dtype", "int64", "pipeline_dtype is torch.int64; it must be a floating point torch.dtype"),
    ("pipeline_dtype", "b16", "pipeline_dtype is 'b16'; it must be a floating point torch.dtype"),
    ("overlapped_forward_backward", "in_turns", "overlapped_forward_backward is 'in_turns' (did you mean in_turn?); i"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_value_is_refused_when_it_is_given(name: str, value: Any, words: str) -> None:
    assert refusal(**{name: value}).startswith(f"install(): {words}")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("overlap_p2p_comm", "perhaps", "'perhaps' is not a switch; it must be 1, true, yes or on, or 0, false, no or"),
        ("p2p_timeout", "soon", "p2p_timeout is 'soon'; it must be a number of seconds above 0, such as 600.0"),
        ("p2p_timeout", "nan", "p2p_timeout is nan; it must be a number of seconds above 0, such as 600.0"),
        ("max_pending_sends", "2.5", "max_pending_sends is 2.5; it must be a whole number of at least 0"),
        ("pipeline_schedule", "zbv", "pipeline_schedule is 'zbv' (did you mean zb_v?); it must be one of gpipe, "),
    ],
)
def test_a_wrong_text_names_its_variable(name: str, text: str, words: str, environment: Callable[..., None]) -> None:
    environment(**{name: text})
    assert refusal().startswith(f"environment variable {PREFIX}{name.upper()}: {words}")


def test_contradictions_are_found_across_sources(environment: Callable[..., None]) -> None:
    assert refusal(overlap_p2p_comm=True, batch_p2p_comm=True).startswith("overlap_p2p_comm and batch_p2p_comm are bo")
    environment(p2p_timeout="60")
    assert refusal(compute_timeout=30).startswith("compute_timeout is 30, below p2p_timeout, 60;")
    assert read_settings(compute_timeout=30, p2p_timeout=20).overrides == {"compute_timeout": 30, "p2p_timeout": 20}


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"p2p_timeout = ", "settings file settings.toml: Invalid value (at end of document)"),
        (b"p2p_timeout = 3\np2p_timeout = 4", "settings file settings.toml: Cannot overwrite a value"),
        (b"a = " + b"[" * 5000, "settings file settings.toml: it is nested too deeply"),
        (b"a." * 50000 + b"b = 1", "settings file settings.toml: it has 100,005 characters; settings have at most"),
        (b"\xff = 3", "settings file settings.toml: not a text file in UTF-8 (byte 0)"),
        (b'p2p_timeout = "3"', "settings file settings.toml: p2p_timeout is '3'; it must be a number of seconds"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(content: bytes, words: str) -> None:
    Path("settings.toml").write_bytes(content)
    assert refusal("settings.toml").startswith(words)


def test_a_file_that_is_missing_is_named(environment: Callable[..., None]) -> None:
    assert refusal("none.toml") == "settings file none.toml: cannot be read (No such file or directory)"
    assert refusal("") == "settings file : cannot be read (No such file or directory)", "an empty name is a name"
    environment(settings="other.toml")
    assert refusal() == "settings file other.toml: cannot be read (No such file or directory)"


def test_before_python_3_11_the_parser_is_tomli_and_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = file("p2p_timeout = 3")
    with monkeypatch.context() as lent:
        if sys.version_info >= (3, 11):  # the same parser under the name that it has on PyPI
            lent.setitem(sys.modules, "tomli", importlib.import_module("tomllib"))
            lent.setitem(sys.modules, "tomllib", None)
        lent.setattr(sys, "version_info", (3, 10, 14))
        assert read_settings(path).overrides == {"p2p_timeout": 3}
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    monkeypatch.setitem(sys.modules, "tomli", None)
    assert refusal(path) == (
        "settings file settings.toml: before Python 3.11, reading it takes the package tomli: pip install tomli"
    )
