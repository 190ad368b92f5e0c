"""Jobs in files of each program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pp.errors import FileFormatError
from megatron_pp.plan.simulate.memory import ModelShape
from megatron_pp.tools.advise.megatron_args import arguments_of, transformer_of
from megatron_pp.tools.check.findings import ERROR
from megatron_pp.tools.check.jobs.errors import UnreadableError
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.read import Given, read_job, settings_of_file, words_of
from megatron_pp.tools.check.priced import transformer_of_job

BRIDGE = """\
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint: {_target_: megatron.bridge.training.config.CheckpointConfig, save: /results, async_save: true}
dataset: {sequence_length: 4096, num_workers: 8}
ddp: {overlap_grad_reduce: true, overlap_param_gather: true, use_distributed_optimizer: true}
logger: {log_interval: 10}
mixed_precision:
  bf16: true
  params_dtype: {_call_: false, _target_: torch.bfloat16}
model:
  _target_: megatron.bridge.models.GPTModelProvider
  num_layers: 62
  hidden_size: 4096
  num_attention_heads: 32
  num_query_groups: 8
  gated_linear_unit: true
  share_embeddings_and_output_weights: false
  num_moe_experts: 64
  moe_layer_freq: [0, 1, 1]
  num_layers_in_first_pipeline_stage: 15
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: null
  seq_length: 4096
  made_up_by_a_test: 3
optimizer: {lr: 3.0e-4, overlap_param_gather: false}
train: {micro_batch_size: 1, global_batch_size: 64, train_iters: 50, exit_signal: null}
"""
VERL = """\
actor_rollout_ref:
  actor:
    strategy: megatron
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 2
    made_up: 1
    megatron:
      _target_: verl.workers.config.McoreEngineConfig
      param_offload: false
      pipeline_model_parallel_size: 4
      virtual_pipeline_model_parallel_size: 2
      tensor_model_parallel_size: 2
      made_up: 7
      override_transformer_config: {recompute_granularity: null, num_layers_in_last_pipeline_stage: 5}
  rollout: {n: 8}
  model: {path: MODEL}
data: {max_prompt_length: 1024, max_response_length: 3072, train_files: [a]}
trainer: {nnodes: 2, n_gpus_per_node: 8, logger: [console]}
critic: {megatron: {pipeline_model_parallel_size: 2}}
"""
SWIFT = """\
model: Qwen/Qwen3-30B
dataset: [swift/self-cognition#500]
pipeline_model_parallel_size: 2
decoder_last_pipeline_num_layers: 13
micro_batch_size: 1
global_batch_size: 16
max_length: 8192
packing: true
padding_free: true
moe_permute_fusion: true
lora_rank: 8
made_up: 1
"""
TITAN = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_made_up = 3
"""
OLD_MEGATRON = """\
language_model: {num_layers: 24, hidden_size: 1024, num_attention_heads: 16, num_moe_experts: null}
model_parallel: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2}
micro_batch_size: 2
global_batch_size: 128
seq_length: 4096
bf16: True
made_up: 4
"""
FUNCTIONAL = """\
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --pipeline-model-parallel-size: 4
  --use-distributed-optimizer: true
  --sequence-parallel: false
  --recompute-modules: "[core_attn, mlp]"
  --moe-layer-freq: ([0]*3+[1]*9)
  --made-up: 3
TEST_TYPE: regular
"""


def read(folder: Path, name: str, text: str, *changes: str, gpus: int = 16) -> Job:
    (folder / name).write_text(text)
    return read_job(Given([str(folder / name), *changes], gpus))


def texts(job: Job) -> str:
    return "\n".join(one.text for one in job.found)


def test_a_megatron_bridge_file_is_read(tmp_path: Path) -> None:
    job = read(tmp_path, "bridge.yaml", BRIDGE)
    assert job.framework == "megatron-bridge"
    assert job.given["num_experts"] == 64
    assert job.given["swiglu"]
    assert job.given["untie_embeddings_and_output_weights"]
    assert job.given["decoder_first_pipeline_num_layers"] == 15
    assert job.given["overlap_param_gather"], "of ddp, whatever optimizer says"
    assert (job.args["data_parallel_size"], job.args["params_dtype"]) == (2, "bfloat16")
    assert job.args["virtual_pipeline_model_parallel_size"] is None
    assert job.spell("num_experts") == "model.num_moe_experts"
    assert job.unknown == ("model.made_up_by_a_test",)
    assert "1 key is not known and was not read: model.made_up_by_a_test" in texts(job)


def test_changes_are_read_as_hydra_has_them(tmp_path: Path) -> None:
    changes = ("model.pipeline_model_parallel_size=8", "+model.virtual_pipeline_model_parallel_size=2", "~ddp.bucket")
    job = read(tmp_path, "bridge.yaml", BRIDGE, *changes)
    assert (job.args["pipeline_model_parallel_size"], job.args["virtual_pipeline_model_parallel_size"]) == (8, 2)
    with pytest.raises(UnreadableError, match=r"'--seq-length' after .* is not a change of it; write changes as"):
        read(tmp_path, "bridge.yaml", BRIDGE, "--seq-length", "3")


@pytest.mark.parametrize(
    ("changes", "in_bf16"),
    [
        (["ddp.grad_reduce_in_fp32=true"], False),
        (["ddp.grad_reduce_in_fp32=false"], True),
        (["ddp.grad_reduce_in_fp32=false", "mixed_precision=bf16_mixed"], False),
        (["ddp.grad_reduce_in_fp32=false", "mixed_precision.grad_reduce_in_fp32=true"], False),
        (["ddp.grad_reduce_in_fp32=true", "mixed_precision.grad_reduce_in_fp32=false"], True),
    ],
)
def test_the_type_of_gradients_in_megatron_bridge(tmp_path: Path, changes: list[str], in_bf16: bool) -> None:
    """Megatron-Bridge's `MixedPrecisionConfig.setup` overwrites the value of `ddp`."""
    job = read(tmp_path, "recipe.yaml", "model: {num_layers: 8, bf16: true}\ntrain: {global_batch_size: 8}\n", *changes)
    assert job.framework == "megatron-bridge"
    assert bool(job.get("grad_reduce_in_bf16")) is in_bf16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16_mixed", (True, False, False)),
        ("bf16-mixed", (True, False, False)),
        ("nemotron_h_bf16_with_fp8_current_scaling_mixed", (True, False, False)),
        ("fp16_mixed", (False, True, True)),
        ("fp16_with_mxfp8_mixed", (False, True, True)),
    ],
)
def test_a_precision_of_megatron_bridge_may_be_a_name(
    tmp_path: Path, name: str, expected: tuple[bool, bool, bool]
) -> None:
    """It overwrites the model's own type, and fp16 also turns gradients in fp32 off."""
    text = "model: {num_layers: 8, bf16: true}\nddp: {grad_reduce_in_fp32: true}\ntrain: {global_batch_size: 8}\n"
    job = read(tmp_path, "recipe.yaml", text, f"mixed_precision={name}")
    assert tuple(bool(job.get(one)) for one in ("bf16", "fp16", "grad_reduce_in_bf16")) == expected
    assert not job.unknown


@pytest.mark.parametrize(
    ("precision", "size"),
    [("fp16_mixed", 2), ("{fp16: true}", 4), ("{fp16: true, grad_reduce_in_fp32: false}", 2), ("{bf16: true}", 4)],
)
def test_the_size_of_gradients_in_megatron_bridge(tmp_path: Path, precision: str, size: int) -> None:
    text = "model: {num_layers: 8, hidden_size: 64, num_attention_heads: 4, seq_length: 64}\n"
    job = read(tmp_path, "recipe.yaml", f"{text}mixed_precision: {precision}\n")
    assert transformer_of_job(job).shape.gradient_bytes == size


def test_a_precision_with_an_unknown_name_was_not_read(tmp_path: Path) -> None:
    job = read(tmp_path, "recipe.yaml", "model: {num_layers: 8}\nmixed_precision: made_up\n")
    assert job.unknown == ("mixed_precision",)


def test_sequence_lengths_of_megatron_bridge_must_agree(tmp_path: Path) -> None:
    job = read(tmp_path, "bridge.yaml", BRIDGE, "dataset.sequence_length=8192")
    assert [one.level for one in job.found if one.name == "sequence-lengths-differ"] == [ERROR]


def test_a_verl_file_is_read(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**sizes, "tie_word_embeddings": True}))
    job = read(tmp_path, "verl.yaml", VERL.replace("MODEL", str(tmp_path / "model")))
    assert job.framework == "verl"
    assert (job.args["num_layers"], job.args["num_query_groups"], job.args["seq_length"]) == (28, 4, 4096)
    assert not job.args["untie_embeddings_and_output_weights"]
    assert (job.args["micro_batch_size"], job.args["global_batch_size"]) == (2, 512), "64 prompts of 8 samples each"
    assert (job.args["pipeline_model_parallel_size"], job.args["virtual_pipeline_model_parallel_size"]) == (4, 2)
    assert job.given["decoder_last_pipeline_num_layers"] == 5
    transfers = ("overlap_p2p_comm", "batch_p2p_comm", "variable_seq_lengths")
    assert [job.args[name] for name in transfers] == [True, False, True], "as verl's code sets them"
    assert job.spell("pipeline_model_parallel_size").endswith("actor.megatron.pipeline_model_parallel_size")
    assert job.unknown == ("actor_rollout_ref.actor.megatron.made_up",)


def test_a_model_that_is_not_on_this_machine_is_named(tmp_path: Path) -> None:
    layers = "+actor_rollout_ref.actor.megatron.override_transformer_config.num_layers=28"
    text = "the sizes of Qwen/Qwen2.5-7B are in its config.json, which is not on this machine"
    asked = VERL.replace("MODEL", "Qwen/Qwen2.5-7B")
    assert text in texts(read(tmp_path, "verl.yaml", asked))
    assert text not in texts(read(tmp_path, "verl.yaml", asked, layers))


def test_the_type_of_gradients_in_verl(tmp_path: Path) -> None:
    """verl's code asks for fp32, unless `override_ddp_config` says something else."""
    key = "+actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32"
    found = [read(tmp_path, "verl.yaml", VERL, *changes) for changes in ([], [f"{key}=true"], [f"{key}=false"])]
    assert [bool(job.get("grad_reduce_in_bf16")) for job in found] == [False, False, True]


def test_another_number_of_gpus_is_a_risk(tmp_path: Path) -> None:
    found = read(tmp_path, "verl.yaml", VERL, gpus=8).found
    assert any(one.name == "other-number-of-gpus" and "is 16 GPUs, but --gpus is 8" in one.text for one in found)


def test_an_ms_swift_file_is_read(tmp_path: Path) -> None:
    job = read(tmp_path, "swift.yaml", SWIFT)
    assert (job.framework, job.args["seq_length"], job.args["variable_seq_lengths"]) == ("ms-swift", 8192, True)
    assert job.given["decoder_last_pipeline_num_layers"] == 13
    assert job.unknown == ("made_up",)


def test_a_torchtitan_file_is_read(tmp_path: Path) -> None:
    job = read(tmp_path, "llama.toml", TITAN)
    assert (job.framework, job.args["num_layers"], job.args["seq_length"]) == ("torchtitan", 80, 8192)
    assert (job.args["pipeline_model_parallel_size"], job.args["data_parallel_size"]) == (4, 2)
    assert (job.args["micro_batch_size"], job.args["global_batch_size"]) == (1, 16)
    assert job.args["pipeline_schedule"] == "Interleaved1F1B"
    assert job.unknown == ("parallelism.pipeline_parallel_made_up",)
    assert "need 8 GPUs, but the job has 12" in texts(read(tmp_path, "llama.toml", TITAN, gpus=12))
    unsaid = TITAN.replace("data_parallel_shard_degree = -1\n", "")  # -1 is torchtitan's default
    assert unsaid != TITAN
    assert "GPUs" not in texts(read(tmp_path, "llama.toml", unsaid, gpus=16))


def test_megatrons_yaml_file_is_read(tmp_path: Path) -> None:
    job = read(tmp_path, "gpt.yaml", OLD_MEGATRON)
    assert (job.framework, job.args["num_layers"], job.args["data_parallel_size"]) == ("megatron", 24, 8)
    assert job.unknown == ("made_up",)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("2 2", ["2", "2"]),
        ("[2 2]", ["2", "2"]),
        ("[core_attn, mlp]", ["core_attn", "mlp"]),
        ("([0]*3+[1]*9)", ["([0]*3+[1]*9)"]),
        ("Et*3|t*4L", ["Et*3|t*4L"]),
        ("Et\\\\|(tt\\\\|)*2L", ["Et|(tt|)*2L"]),
        (8, ["8"]),
        (True, []),
    ],
)
def test_values_of_a_functional_test_are_words_as_in_megatrons_shell(value: object, words: list[str]) -> None:
    assert words_of("--flag", value) == ["--flag", *words]
    assert words_of("--flag", False) == []


def test_a_functional_test_of_megatrons(tmp_path: Path) -> None:
    job = read(tmp_path, "model_config.yaml", FUNCTIONAL)
    assert job.given["recompute_modules"] == ["core_attn", "mlp"]
    assert job.given["moe_layer_freq"] == "([0]*3+[1]*9)"
    assert job.given["use_distributed_optimizer"] is True
    assert "sequence_parallel" not in job.given
    assert job.unknown == ("--made-up",)
    assert not job.validated


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tab.yaml", "model:\n\tnum_layers: 3\n", r"tab.yaml, line 2, column 1: this is not YAML"),
        ("deep.yaml", "[" * 5000, "nested too deeply"),
        ("empty.yaml", "", "is empty; a file of settings has lines such as"),
        ("comment.yaml", "# nothing\n", "is empty"),
        ("list.yaml", "- 1\n- 2\n", "contains a list, not settings with names"),
        (
            "other.yaml",
            "services: {web: 1}\n",
            "has services as top-level keys, which no known program has. Possible: YAML of Megatron,",
        ),
        ("bad.toml", "[parallelism\n", "this is not TOML"),
        ("args.yaml", "MODEL_ARGS: 3\n", "MODEL_ARGS has no flags; a flag looks like --num-layers: 32"),
    ],
)
def test_an_unreadable_file_is_reported_in_one_sentence(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(UnreadableError, match=words):
        read(tmp_path, name, text)


def test_files_that_are_missing_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_job(Given([str(tmp_path / "no.yaml")], 8))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="not a text file"):
        read_job(Given([str(tmp_path / "bytes.yaml")], 8))
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UnreadableError, match="is a folder"):
        read_job(Given([str(tmp_path / "folder.yaml")], 8))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnreadableError, match=r"config.json is not a job that check reads: .* \(.yaml, .yml, .toml\)"):
        read_job(Given([str(tmp_path / "config.json")], 8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.num_layers=many", "model.num_layers is 'many'; it must be a whole number"),
        ("model.num_layers=3.5", "model.num_layers is 3.5; it must be a whole number"),
        ("model.sequence_parallel=7", "model.sequence_parallel is 7; it must be true or false"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; it must be a number"),
        ("model.num_layers=true", "model.num_layers is True; it must be a whole number"),
    ],
)
def test_values_of_the_wrong_kind_are_errors(tmp_path: Path, change: str, words: str) -> None:
    found = read(tmp_path, "bridge.yaml", BRIDGE, change).found
    assert any(one.level == ERROR and words in one.text for one in found), found


def test_sizes_of_a_file_for_advise(tmp_path: Path) -> None:
    """Names are written as flags or settings, at any depth. A switch that is off is left out."""
    (tmp_path / "args.yaml").write_text(
        "ARGS:\n  num_layers: 30  # all\n  hidden-size: 2048\n  --seq-length: '4096'\n  bf16: true\n"
        "  swiglu: false\n  num_experts: null\n"
    )
    found = arguments_of(settings_of_file(str(tmp_path / "args.yaml")).given)
    assert found == {"num_layers": "30", "hidden_size": "2048", "seq_length": "4096", "bf16": True}
    assert transformer_of(found).shape == ModelShape(30, 2048, 4096)


@pytest.mark.parametrize(("name", "text"), [("bridge.yaml", BRIDGE), ("args.yaml", FUNCTIONAL), ("llama.toml", TITAN)])
def test_files_of_all_kinds_for_advise(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text.replace("  --made-up: 3", "  --seq-length: 1024").replace("[0, 1, 1]", "2"))
    given = settings_of_file(str(tmp_path / name)).given
    found = transformer_of(arguments_of(given))
    assert found.shape.num_layers == given["num_layers"]
    assert found.experts == given.get("num_experts", 0)


def test_values_of_functional_tests_are_words_as_megatrons_runner_makes_them() -> None:
    assert words_of("--recompute-modules", "[core_attn, mlp]") == ["--recompute-modules", "core_attn", "mlp"]
    sizes = "--hierarchical-context-parallel-sizes"
    assert words_of(sizes, "2 2") == words_of(sizes, [2, 2]) == [sizes, "2", "2"]
    assert words_of("--step-batch-size-schedule", "0:384 200B:768") == ["--step-batch-size-schedule", "0:384 200B:768"]
    assert (words_of("--swiglu", True), words_of("--swiglu", "false")) == (["--swiglu"], [])


def test_references_within_a_file_are_followed(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    changes = (
        f"{actor}.megatron.tensor_model_parallel_size=${{{actor}.megatron.pipeline_model_parallel_size}}",
        f"{actor}.megatron.context_parallel_size=${{oc.select:{actor}.megatron.no_such_key,2}}",
        f"{actor}.megatron.expert_model_parallel_size=${{oc.env:EP}}",
        "trainer.project=${oc.env:PROJECT}",
    )
    job = read(tmp_path, "verl.yaml", VERL, *changes, gpus=32)
    assert (job.args["tensor_model_parallel_size"], job.args["context_parallel_size"]) == (4, 2)
    assert "expert_model_parallel_size" not in job.given
    found = next(one for one in job.found if one.name == "references-not-followed")
    assert found.settings == (f"{actor}.megatron.expert_model_parallel_size",)


def test_megatrons_yaml_takes_the_place_of_all_flags(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(OLD_MEGATRON)
    (tmp_path / "train.py").write_text("")
    words = [str(tmp_path / "train.py"), "--num-layers", "3", "--yaml-cfg", str(tmp_path / "gpt.yaml")]
    assert read_job(Given(words, 4)).args["num_layers"] == 24


def test_a_key_that_is_given_twice_is_named_where_its_values_differ(tmp_path: Path) -> None:
    found = read(tmp_path, "gpt.yaml", OLD_MEGATRON + "seq_length: 8192\nbf16: True\n").found
    texts_of_it = [one.text for one in found if one.name == "key-given-twice"]
    assert len(texts_of_it) == 1
    assert texts_of_it[0].endswith("the last one counts: seq_length (line 8)")
    assert not [one for one in read(tmp_path, "gpt.yaml", OLD_MEGATRON).found if one.name == "key-given-twice"]
