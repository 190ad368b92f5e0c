"""Config objects: what is derived, what is refused and with which sentence, what a foreign config object is given."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_pp.config.model_config import ModelParallelConfig, TransformerConfig
from megatron_pp.config.parallel_grid import fit_grid
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ConfigError, ScheduleInputError
from megatron_pp.plan.orders import SCHEDULES

PIPELINE = {"pipeline_model_parallel_size": 4, "pipeline_dtype": torch.bfloat16}
TWO_CHUNKS = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
MODEL = {"num_layers": 8, "hidden_size": 12, "num_attention_heads": 3}


def test_defaults_are_a_single_process_that_frees_its_outputs():
    config = ModelParallelConfig()
    assert config.lowering_policy == "batched"
    assert config.schedule_name == "1f1b"
    assert config.placement_name == "loop"
    assert config.deallocate_pipeline_outputs
    assert not config.batch_p2p_sync
    assert not config.overlap_p2p_comm
    assert config.p2p_timeout is None


def test_fields_left_none_are_derived_as_megatron_does():
    config = ModelParallelConfig(**PIPELINE, virtual_pipeline_model_parallel_size=2, params_dtype=torch.float16)
    assert config.microbatch_group_size_per_vp_stage == 4
    assert config.batch_p2p_comm is True
    assert config.autocast_dtype == torch.float16
    assert config.schedule_name == "interleaved_1f1b"
    assert ModelParallelConfig(overlap_p2p_comm=True).batch_p2p_comm is False
    assert ModelParallelConfig(**PIPELINE, virtual_pipeline_model_parallel_size=1).schedule_name == "1f1b"
    for flags, policy in (("overlap", True), "overlap"), (("batch", True), "batched"), (("batch", False), "plain"):
        assert ModelParallelConfig(**PIPELINE, **{f"{flags[0]}_p2p_comm": flags[1]}).lowering_policy == policy


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"no option 'pipline_schedule' \(did you mean pipeline_schedule\?\)"):
        TransformerConfig(**PIPELINE, **MODEL, pipline_schedule="zb_v")
    with pytest.raises(TypeError, match=r"ModelParallelConfig has no option 'num_layers'$"):
        ModelParallelConfig(num_layers=3)
    with pytest.raises(TypeError, match=r"no option 'overlap_p2p' \(did you mean overlap_p2p_comm"):
        TransformerConfig(**PIPELINE, **MODEL).replace(overlap_p2p=True)


@dataclasses.dataclass
class WithMore(TransformerConfig):
    more: int = 0


class WithItsOwn(TransformerConfig):
    def __init__(self, mine, **options):
        super().__init__(**options)
        self.mine = mine


def test_classes_made_of_a_config_have_options_of_their_own():
    assert WithMore(**PIPELINE, **MODEL, more=3).replace(more=4).more == 4
    assert WithItsOwn(mine=3, **PIPELINE, **MODEL).mine == 3
    assert copy.deepcopy(pickle.loads(pickle.dumps(WithMore(**MODEL, more=3)))).more == 3


def test_replace_derives_again_what_was_not_given():
    config = TransformerConfig(**PIPELINE, **MODEL)
    changed = config.replace(pipeline_model_parallel_size=8, overlap_p2p_comm=True, hidden_size=24)
    assert changed.microbatch_group_size_per_vp_stage == 8
    assert changed.batch_p2p_comm is False
    assert (changed.ffn_hidden_size, changed.kv_channels) == (96, 8)


def test_replace_keeps_what_was_given():
    config = ModelParallelConfig(**PIPELINE, microbatch_group_size_per_vp_stage=7, batch_p2p_comm=False)
    changed = config.replace(pipeline_model_parallel_size=2)
    assert changed.microbatch_group_size_per_vp_stage == 7
    assert changed.lowering_policy == "plain"


BAD = [
    ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size is 0; the smallest legal value is 1"),
    ({"pipeline_model_parallel_size": 2.0}, "pipeline_model_parallel_size is 2.0; it must be a whole number"),
    ({"tensor_model_parallel_size": True}, "tensor_model_parallel_size is True"),
    ({"context_parallel_size": -1}, "context_parallel_size is -1"),
    ({"data_parallel_size": 0}, "data_parallel_size is 0"),
    ({**PIPELINE, "virtual_pipeline_model_parallel_size": 0}, "virtual_pipeline_model_parallel_size is 0.*None"),
    ({"sequence_parallel": True}, "sequence_parallel is True.*at least 2"),
    ({"pipeline_model_parallel_size": 2}, r"pipeline_dtype is missing.*params_dtype \(torch.float32\)"),
    ({**PIPELINE, "pipeline_dtype": "bf16"}, "pipeline_dtype is 'bf16'.*torch.bfloat16"),
    ({"params_dtype": torch.int64}, "params_dtype is torch.int64"),
    ({"params_dtype": None}, "params_dtype is None"),
    ({**TWO_CHUNKS, "microbatch_group_size_per_vp_stage": 3}, "group_size_per_vp_stage is 3.*nearest legal value is 4"),
    ({"microbatch_group_size_per_vp_stage": 0}, "microbatch_group_size_per_vp_stage is 0.*1"),
    ({"overlap_p2p_comm": True, "batch_p2p_comm": True}, "both True.*batch_p2p_comm=False"),
    ({"p2p_channels": "two_way"}, "p2p_channels is 'two_way'.*'one_way', 'shared'"),
    ({"max_pending_sends": -1}, "max_pending_sends is -1.*0"),
    ({"p2p_timeout": 0}, "p2p_timeout is 0.*600.0"),
    ({"compute_timeout": 0}, "compute_timeout is 0.*600.0"),
    ({"p2p_timeout": 600.0, "compute_timeout": 60.0}, "compute_timeout is 60.0, below p2p_timeout, 600.0"),
    ({"p2p_timeout": float("inf")}, "p2p_timeout is inf"),
    ({"p2p_timeout": float("nan")}, "p2p_timeout is nan"),
    ({"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute is True"),
    ({"num_microbatches_with_partial_activation_checkpoints": -1}, "partial_activation_checkpoints is -1"),
    ({"grad_scale_func": 2.0}, "grad_scale_func is 2.0"),
    ({"overlapped_forward_backward": "in_turn"}, "overlapped_forward_backward is 'in_turn'; it must be a callable"),
    ({"no_sync_func": [None]}, r"no_sync_func is \[None\].*one per chunk"),
    ({**PIPELINE, "pipeline_schedule": "2f2b"}, "'2f2b'; it must be one of gpipe, 1f1b"),
    ({**TWO_CHUNKS, "pipeline_schedule": "gpipe"}, "'gpipe' needs 1 .*breadth_first"),
    ({**PIPELINE, "pipeline_placement": "zigzag"}, "'zigzag'; it must be one of 'loop', 'v'"),
    ({**PIPELINE, "pipeline_placement": "v", "pipeline_schedule": "1f1b"}, "1f1b places stages as 'loop'"),
    ({**MODEL, "num_layers": 0}, "num_layers is 0"),
    ({**MODEL, **PIPELINE, "num_layers": 10}, "nearest num_layers: 8 or 12"),
    ({**MODEL, "hidden_size": 13}, "hidden_size is 13.*12 or 15.*kv_channels"),
    ({**MODEL, "hidden_size": 2}, "hidden_size is 2.*nearest: 3"),
    ({**MODEL, "hidden_size": 10**9, "num_attention_heads": 999_999_998}, "999999998 or 1999999996"),
    ({**MODEL, "tensor_model_parallel_size": 2}, "num_attention_heads is 3.*nearest: 2 or 4"),
    ({**MODEL, "ffn_hidden_size": 0}, "ffn_hidden_size is 0"),
    ({**MODEL, "hidden_dropout": 1.0}, "hidden_dropout is 1.0"),
    ({**MODEL, "attention_dropout": -0.1}, "attention_dropout is -0.1"),
    ({**MODEL, "layernorm_epsilon": 0.0}, "layernorm_epsilon is 0.0"),
    ({**MODEL, "init_method_std": -1.0}, "init_method_std is -1.0"),
    ({"skip_cache": "recieved"}, r"skip_cache is 'recieved' \(did you mean received"),
    ({"trace_steps": "x"}, "trace_steps is 'x'; it must list steps"),
    ({"trace_first_step": "x"}, "trace_first_step is 'x'; it must be a whole number"),
    ({"trace_dir": 3}, "trace_dir is 3; it must be a text"),
    ({"pipeline_schedule": 3}, "pipeline_schedule is 3; it must be a text"),
    ({"sequence_slices": "2"}, "sequence_slices is '2'; it must be a whole number"),
    ({"sequence_slices": None}, "sequence_slices is None; it must be a whole number"),
    ({"skip_tensors": 3}, "skip_tensors is 3; it must be a text such as"),
    ({"skip_tensors": [3]}, "skip_tensors: .*must be an iterable"),
    ({**MODEL, "layernorm_epsilon": None}, "layernorm_epsilon is None"),
    ({**MODEL, "init_method_std": "x"}, "init_method_std is 'x'"),
    ({**MODEL, "hidden_size": None}, "hidden_size is None"),
    ({**MODEL, "num_attention_heads": None}, "num_attention_heads is None"),
]


@pytest.mark.parametrize(("values", "sentence"), BAD, ids=[next(iter(reversed(values))) for values, _ in BAD])
def test_impossible_values_are_refused_in_a_sentence(values, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        (TransformerConfig if "num_layers" in values else ModelParallelConfig)(**values)
    assert "\n" not in str(caught.value)


SWITCHES = [field for field in dataclasses.fields(TransformerConfig) if field.type in (bool, bool | None)]


@pytest.mark.parametrize("field", SWITCHES, ids=lambda field: field.name)
def test_a_switch_is_on_or_off(field):
    """As a truth value the text ``"false"`` would be on; 0.5 or NaN would be on in some places and off in others."""
    others = [None] if isinstance(field.default, bool) else []
    for value in ("false", "True", "", 2, 0.5, float("nan"), [], *others):
        with pytest.raises(ConfigError, match=f"^{field.name} is {re.escape(repr(value))}; it must be True or False$"):
            TransformerConfig(**MODEL, **{field.name: value})
    sizes = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 3, "pipeline_dtype": torch.bfloat16}
    layers = {**MODEL, "num_layers": 7} if field.name.startswith("account") else MODEL
    for value in (True, 1, np.True_):
        assert getattr(TransformerConfig(**sizes, **layers, **{field.name: value}), field.name) == 1
    for value in (False, 0, np.False_):
        assert getattr(TransformerConfig(**MODEL, **{field.name: value}), field.name) == 0


def test_every_registered_schedule_is_accepted_with_the_chunks_it_needs():
    for name, family in SCHEDULES.items():
        chunks = family.chunks or 2
        virtual = None if chunks == 1 else chunks
        config = ModelParallelConfig(**PIPELINE, pipeline_schedule=name, virtual_pipeline_model_parallel_size=virtual)
        assert (config.schedule_name, config.placement_name) == (name, family.placement)


def test_layers_go_where_the_config_says():
    config = TransformerConfig(**PIPELINE, **{**MODEL, "num_layers": 7}, pipeline_model_parallel_layout="1,2,2,2")
    assert config.layers_of_stages() == [[0], [1, 2], [3, 4], [5, 6]]


def test_microbatch_counts_follow_the_schedule():
    config = ModelParallelConfig(**PIPELINE, virtual_pipeline_model_parallel_size=2)
    full_speed = {None: False, "interleaved_zb": False, "breadth_first": True, "gis": True, "auto": True}
    for name, expected in full_speed.items():
        assert config.replace(pipeline_schedule=name).explain_microbatch_count(10).full_speed == expected


def test_environment_sets_defaults_which_arguments_override(monkeypatch):
    monkeypatch.setenv("MEGATRON_PP_P2P_DEBUG", "on")
    monkeypatch.setenv("MEGATRON_PP_TRACE_DIR", "traces")
    monkeypatch.setenv("MEGATRON_PP_P2P_TIMEOUT", "60")
    monkeypatch.setenv("MEGATRON_PP_COMPUTE_TIMEOUT", "90.5")
    for config in (ModelParallelConfig(), StepSettings.from_config(SimpleNamespace())):
        assert (config.p2p_debug, config.trace_dir) == (True, "traces")
        assert (config.p2p_timeout, config.compute_timeout) == (60, 90.5)
    own = ModelParallelConfig(p2p_debug=False, p2p_timeout=30)
    assert (own.p2p_debug, own.p2p_timeout) == (False, 30)


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("MEGATRON_PP_P2P_DEBUG", "perhaps", "'perhaps' is not a switch"),
        ("MEGATRON_PP_MEASURE", "many", "measure is 'many'; it must be a whole number of at least 0"),
        ("MEGATRON_PP_P2P_TIMEOUT", "1 min", "p2p_timeout is '1 min'; it must be a number of seconds above 0"),
        ("MEGATRON_PP_TRACE_STEPS", "3-1", "trace_steps is '3-1'; it must list steps"),
    ],
)
def test_an_unreadable_environment_variable_is_named(monkeypatch, variable, text, sentence):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"environment variable {variable}: {sentence}"):
        ModelParallelConfig()


def test_settings_of_a_foreign_config_have_our_defaults():
    ours, bare = StepSettings.from_config(ModelParallelConfig()), StepSettings.from_config(SimpleNamespace())
    filled_in = {"microbatch_group_size_per_vp_stage": None, "autocast_dtype": None, "batch_p2p_comm": None}
    assert ours._replace(**filled_in) == bare
    assert (ours.policy, bare.policy) == ("batched", "plain")  # a grouped call only where it is asked for
    assert (bare.p2p_timeout, bare.compute_timeout, bare.max_pending_sends) == (None, None, 2)
    foreign = SimpleNamespace(overlap_p2p_comm=True, p2p_timeout=None, p2p_channels="shared")
    settings = StepSettings.from_config(foreign)
    assert (settings.policy, settings.p2p_timeout, settings.one_way) == ("overlap", None, False)
    assert StepSettings.from_config(settings) is settings


@pytest.mark.parametrize("minutes", [0.1, 1, 5, 10, 30, 600])
def test_default_timeouts_are_below_the_groups(minutes):
    """Megatron's groups give up after ten minutes, torch's on NCCL too."""
    limit = timedelta(minutes=minutes)
    transfer, compute = StepSettings.from_config(SimpleNamespace()).timeouts(limit)
    assert 0 < transfer < compute < limit.total_seconds()
    assert transfer == min(480.0, 0.8 * limit.total_seconds())


@pytest.mark.parametrize(
    ("given", "seconds", "expected"),
    [
        ({}, None, (480.0, 4800.0)),
        ({}, 600, (480.0, 570.0)),
        ({"p2p_timeout": 60.0}, 600, (60.0, 570.0)),
        ({"p2p_timeout": 30.0}, 600, (30.0, 300.0)),
        ({"p2p_timeout": 900.0}, 600, (900.0, 900.0)),  # a warning says that the group gives up before that
        ({"compute_timeout": 3600.0}, 600, (480.0, 3600.0)),
        ({"compute_timeout": 60.0}, 600, (60.0, 60.0)),
        ({"p2p_timeout": 5.0, "compute_timeout": 8.0}, None, (5.0, 8.0)),
    ],
)
def test_timeouts_that_are_given_are_kept(given, seconds, expected):
    limit = None if seconds is None else timedelta(seconds=seconds)
    assert StepSettings.from_config(SimpleNamespace(**given)).timeouts(limit) == expected


def test_settings_are_read_anew_from_a_config_that_changes():
    config = ModelParallelConfig()
    before = StepSettings.from_config(config)
    config.grad_sync_func = print
    assert before.grad_sync_func is None
    assert StepSettings.from_config(config).grad_sync_func is print


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("p2p_timeout", 0, "config.p2p_timeout is 0; it must be a number of seconds above 0"),
        ("compute_timeout", 0, "config.compute_timeout is 0; it must be a number of seconds above 0"),
        ("batch_p2p_comm", True, "config.overlap_p2p_comm and batch_p2p_comm are both True"),
        ("calculate_per_token_loss", "False", "config.calculate_per_token_loss is 'False'; it must be True or False"),
        ("pipeline_schedule", [1], "config.pipeline_schedule is [1]; it must be a text"),
        ("autocast_dtype", "x", "config.autocast_dtype is 'x'; it must be a floating point torch.dtype"),
        ("virtual_pipeline_model_parallel_size", "x", "config.virtual_pipeline_model_parallel_size is 'x'; it must be"),
        ("context_parallel_size", "x", "config.context_parallel_size is 'x'; it must be a whole number"),
        ("skip_cache", "x", "config.skip_cache is 'x'; it must be one of 'none', 'received', 'all'"),
        ("grad_scale_func", 3, "config.grad_scale_func is 3; it must be a callable, or None"),
        ("grad_sync_func", [1], "config.grad_sync_func is [1]; it must be a callable, or a list of one per chunk"),
        ("overlapped_forward_backward", 3, "config.overlapped_forward_backward is 3; it must be a callable, or None"),
    ],
)
def test_settings_refuse_wrong_values_of_a_foreign_config(field, value, sentence):
    with pytest.raises(ScheduleInputError, match=f"^{re.escape(sentence)}"):
        StepSettings.from_config(SimpleNamespace(overlap_p2p_comm=True, **{field: value}))


def test_every_field_has_a_line_of_help_for_the_command_line():
    for known in dataclasses.fields(TransformerConfig):
        assert known.metadata["help"].strip(), known.name
        assert "\n" not in known.metadata["help"], known.name


def test_what_a_plan_needs_is_importable_without_torch():
    modules = ", ".join(f"megatron_pp.config.{name}" for name in ("layout", "parallel_grid", "settings"))
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_an_absurd_number_is_refused_immediately():
    """Not after a walk to the nearest one that is possible."""
    with pytest.raises(ConfigError, match="nearest: 999999999 processes"):
        fit_grid(2, pipeline_parallel=999_999_999)
