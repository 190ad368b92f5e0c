"""The training command of a shell script. The script is read, never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_pp.tools.check.jobs.errors import UnreadableError
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.read import Given, read_job
from megatron_pp.tools.check.jobs.shell import read_shell

MODEL = """\
NLAYERS=${NLAYERS:-48}
MODEL_ARGS=(
   --swiglu
   --num-layers ${NLAYERS}
   --hidden-size 2048   # as the model has it
   --num-attention-heads 32
   --moe-layer-freq "([0]*3+[1]*45)"
)
"""
SLIME = """\
#!/bin/bash
pkill -9 ray
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen.sh"
PERF_ARGS=(
   --tensor-model-parallel-size 4
   --pipeline-model-parallel-size 2
   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 20480
)
ROLLOUT_ARGS=(
   --rollout-batch-size 32
   --global-batch-size 256
   --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)
)
touch RAN
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train.py \\
   --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 8 \\
   ${MODEL_ARGS[@]} \\
   ${PERF_ARGS[@]} \\
   "${ROLLOUT_ARGS[@]}" --made-up 3
"""
SWIFT = """\
# 8 * 60GiB
NPROC_PER_NODE=8 \\
megatron sft \\
    --model Qwen/Qwen3-30B \\
    --dataset 'swift/self-cognition#500' \\
    --pipeline_model_parallel_size 2 \\
    --sequence_parallel true \\
    --packing true \\
    --max_length 8192
"""
MEGATRON = """\
GPUS=8
NODES=2
TP=2
COMMON="--hidden-size 512 \\
        --seq-length 1024"
if [ "$DEBUG" = 1 ]; then
  echo debugging
fi
torchrun --nproc_per_node $GPUS --nnodes ${NODES} pretrain_gpt.py \\
    --tensor-model-parallel-size $TP $COMMON --num-layers 8 \\
    --data-path ${DATA} --seed $(date +%s) --overlap-p2p --rerun-mode disabled $@
"""
VERL = """\
HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer' \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=7 \\
    trainer.nnodes=1 trainer.n_gpus_per_node=8 $@
"""


VERL_SFT = """\
ENGINE_CONFIG="\\
    engine=megatron \\
    optim.betas='[0.9,0.95]' \\
    engine.pipeline_model_parallel_size=${PP_SIZE:-4} \\
    engine.use_mbridge=True \\
    +engine.override_transformer_config.recompute_granularity=full"
torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer \\
    data.train_batch_size=128 data.micro_batch_size_per_gpu=2 data.max_length=2048 data.use_dynamic_bsz=False \\
    model.path=${MODEL_PATH:-Qwen/Qwen3.5-397B-A17B} ${ENGINE_CONFIG}
"""


def read(folder: Path, text: str, *words: str, gpus: int = 8) -> Job:
    (folder / "run.sh").write_text(text)
    return read_job(Given([str(folder / "run.sh"), *words], gpus))


def test_a_slime_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen.sh").write_text(MODEL)
    job = read(tmp_path, SLIME)
    assert job.framework == "slime"
    assert (job.args["num_layers"], job.args["hidden_size"], job.args["swiglu"]) == (48, 2048, True)
    assert job.given["moe_layer_freq"] == "([0]*3+[1]*45)"
    assert (job.args["tensor_model_parallel_size"], job.args["pipeline_model_parallel_size"]) == (4, 2)
    assert (job.args["global_batch_size"], job.args["variable_seq_lengths"]) == (256, True)
    assert "micro_batch_size" not in job.given, "its line is a comment"
    assert job.unknown == ("made_up",)
    assert not (tmp_path / "RAN").exists()


def test_an_ms_swift_script_is_read(tmp_path: Path) -> None:
    job = read(tmp_path, SWIFT)
    assert (job.framework, job.args["seq_length"], job.given["sequence_parallel"]) == ("ms-swift", 8192, True)
    assert job.unknown == ()
    assert any(
        "NPROC_PER_NODE 8 is 8 GPUs, but --gpus is 16" in one.text for one in read(tmp_path, SWIFT, gpus=16).found
    )


def test_a_verl_script_is_read(tmp_path: Path) -> None:
    job = read(tmp_path, VERL)
    assert (job.framework, job.given["pipeline_model_parallel_size"]) == ("verl", 4)
    assert job.given["decoder_last_pipeline_num_layers"] == 7


def test_a_script_of_verls_sft_trainer_is_read(tmp_path: Path) -> None:
    job = read(tmp_path, VERL_SFT)
    assert job.framework == "verl"
    assert job.spell("pipeline_model_parallel_size") == "engine.pipeline_model_parallel_size"
    sizes = ("pipeline_model_parallel_size", "micro_batch_size", "global_batch_size", "seq_length")
    assert [job.args[name] for name in sizes] == [4, 2, 128, 2048]
    assert (job.args["bf16"], job.args["recompute_granularity"]) == (True, "full")
    assert job.unknown == ()
    names = [one.name for one in job.found]
    assert "sizes-not-known" in names
    assert "not-megatron" not in names
    assert "dynamic-batch" not in names
    fsdp = read(tmp_path, VERL_SFT.replace("engine=megatron", "").replace("use_dynamic_bsz=False", ""))
    assert {"not-megatron", "dynamic-batch"} <= {one.name for one in fsdp.found}


def test_the_default_of_a_variable_may_have_variables(tmp_path: Path) -> None:
    """As in ``${STAGES:-${RANKS}}``, also if they are not set."""
    begin = "RANKS=4\nSTAGES=${STAGES:-${RANKS}}\nFILE=${FILE:-${FOLDER}/text.bin}\n"
    job = read(tmp_path, f"{begin}python pretrain_gpt.py --pipeline-model-parallel-size $STAGES --data-path $FILE")
    assert job.given["pipeline_model_parallel_size"] == 4
    assert any("--data-path ${FOLDER}/text.bin" in one.text for one in job.found)


def test_a_shell_script_of_megatron_is_read(tmp_path: Path) -> None:
    """The Python script does not exist here, so the table reads its flags."""
    job = read(tmp_path, MEGATRON, "--bf16", gpus=16)
    assert (job.framework, job.validated) == ("megatron", False)
    assert job.given["hidden_size"] == 512
    assert (job.given["tensor_model_parallel_size"], job.given["bf16"]) == (2, True)
    words = "\n".join(one.text for one in job.found)
    assert "pretrain_gpt.py, which does not exist" in words
    assert "run.sh does not set their variables: --data-path ${DATA}, --seed $(...)" in words
    assert job.given["rerun_mode"] == "disabled", "whatever $@ adds"
    assert job.unknown == ("--overlap-p2p",)
    assert "did you mean" in words
    assert any(one.name == "other-number-of-gpus" for one in read(tmp_path, MEGATRON, gpus=4).found)


IN_A_TEXT = """\
#!/bin/bash
FLAGS="--num-layers 24 --hidden-size 512"
srun --nodes=2 {begin}
  set -e
  cd /workspace && export CUDA_DEVICE_MAX_CONNECTIONS=1
  STAGES=4
  torchrun --nproc_per_node 8 --nnodes 2 \\
    pretrain_gpt.py $FLAGS --pipeline-model-parallel-size {stages} && echo done
{end}
bash -c "echo 'it is not a command"
"""


@pytest.mark.parametrize(
    ("begin", "stages", "end"),
    [
        ('bash -c "', "\\$STAGES", '"'),
        ("sh -lc '", "$STAGES", "'"),
        ("--container-image x /bin/bash -exc '", "4", "'"),
    ],
)
def test_a_command_in_the_text_that_a_shell_gets_is_read(begin: str, stages: str, end: str, tmp_path: Path) -> None:
    """Scripts of SLURM start `bash -c` in a container."""
    job = read(tmp_path, IN_A_TEXT.format(begin=begin, stages=stages, end=end), gpus=16)
    sizes = [job.given[name] for name in ("num_layers", "hidden_size", "pipeline_model_parallel_size")]
    assert sizes == [24, 512, 4]
    assert not job.unknown
    assert any(
        one.name == "other-number-of-gpus"
        for one in read(tmp_path, IN_A_TEXT.format(begin=begin, stages=stages, end=end), gpus=8).found
    )


BRANCHES = """\
SIZE="800M" # or "8B"; don't use others
case "${SIZE}" in
    "800M")
        HIDDEN=1024
        ;;
    8B|"16B") HIDDEN=4096;;
    *)
        echo "Invalid"
        exit 1
esac
DTYPE=bf16
DATA=${4:-"MOCK"}
EXTRA=()
if [[ "$DTYPE" == "fp8" ]]; then
    EXTRA+=("--fp8-format hybrid")
fi
if [[ "$TOKENIZER" == "x" && 1 -eq 2 ]] || [ "$DATA" = MOCK ]; then
    EXTRA+=("--mock-data")
elif [ -z "$DATA" ]
then
    EXTRA+=(--data-path other)
else
    EXTRA+=(--data-path "$DATA")
fi
[[ "$SIZE" == 8* ]] && EXTRA+=(--swiglu)
[ "$DTYPE" != bf16 ] && EXTRA+=(--fp16)
[ "$DTYPE" = bf16 ] || EXTRA+=(--fp16)
if [ ! -f data.bin ]; then
    echo "no data"
    exit 1
fi
if [ $((NODES % 2)) -eq 0 ]; then PARALLEL=2; else PARALLEL=4; fi
test -n "${WANDB_API_KEY}" && EXTRA+=(--log-params-norm)
if true; then if false; then EXTRA+=(--recompute-activations); fi; fi
torchrun pretrain_gpt.py --num-layers 8 --hidden-size $HIDDEN ${EXTRA[@]} --tensor-model-parallel-size $PARALLEL
"""


def test_a_branch_that_does_not_run_is_not_read(tmp_path: Path) -> None:
    """If a condition is not known, all of its branches are read, and the answer says so."""
    job = read(tmp_path, BRANCHES)
    assert job.given["hidden_size"] == 1024
    assert {name for name in job.given if name in ("fp8", "data_path", "fp16", "recompute_activations")} == set()
    assert (job.given["mock_data"], job.given["swiglu"]) == (True, True)
    assert (job.given["tensor_model_parallel_size"], job.given["log_params_norm"]) == (4, True)
    unknown = next(one.text for one in job.found if one.name == "conditions-not-known")
    assert unknown.endswith("the later one wins: if [ $(...) -eq 0 ], test -n ${WANDB_API_KEY}")


@pytest.mark.parametrize(
    ("condition", "known"),
    [
        ('[ "$A" = 3 ]', True),
        ("[ $A -gt 4 ]", False),
        ("[ $A -gt x ]", None),
        ('! [ -n "$EMPTY" ]', True),
        ('[ "$EMPTY" ]', False),
        ('[[ -z "$EMPTY" && ($A == 3) ]]', None),
        ('[ "$EMPTY" -o $A = 3 ]', True),
        ('[[ $OUTSIDE == 1 || "$A" != "4" ]]', True),
        ('[[ $OUTSIDE == 1 && "$A" != "4" ]]', None),
        ("[ -e file ] && false", False),
        ("(( A > 2 ))", None),
    ],
)
def test_shell_conditions_are_decided_if_they_can_be_known(condition: str, known: bool | None, tmp_path: Path) -> None:
    text = f"A=3\nEMPTY=\nLAYERS=2\nif {condition}; then\nLAYERS=4\nfi\nif python - <<X\nif True: x()\nX\n"
    job = read(tmp_path, f"{text}torchrun pretrain_gpt.py --num-layers $LAYERS\n")
    assert job.given["num_layers"] == (2 if known is False else 4)
    assert any(one.name == "conditions-not-known" for one in job.found) is (known is None)


@pytest.mark.parametrize(
    ("text", "words"),
    [("echo hello\n", "has no training command that check knows"), ("echo 'a\n", "cannot be read as a shell script")],
)
def test_scripts_without_a_command(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(UnreadableError, match=words):
        read_shell(str(tmp_path / "run.sh"))


@pytest.mark.parametrize(
    ("line", "on_engine"),
    [
        ("torchrun -m megatron_pp run --overlap-p2p-comm pretrain_gpt.py --num-layers 4", True),
        ("torchrun pretrain_gpt.py --num-layers 4  # later: -m megatron_pp run", False),
        ("megatron-pp check --gpus 8 pretrain_gpt.py --num-layers 4\ntorchrun pretrain_gpt.py --num-layers 4", False),
    ],
)
def test_a_job_on_this_engine_is_seen(tmp_path: Path, line: str, on_engine: bool) -> None:
    (tmp_path / "job.sh").write_text(f"{line}\n")
    assert read_job(Given([str(tmp_path / "job.sh")], 8)).on_engine is on_engine
