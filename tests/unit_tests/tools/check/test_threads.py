"""Configurations that public threads report as broken, rebuilt from the threads. `check` must find their fault.

If a thread gives a number, the test has the same number; other sizes are as small as possible. ``NOT_NAMED`` lists the
faults that `check` cannot find, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_pp.tools.check.command import check
from megatron_pp.tools.check.findings import ERROR, NOTE, RISK
from megatron_pp.tools.check.jobs.flag_table import read_flags
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.read import Given, read_job

MEGATRON = "https://github.com/NVIDIA/Megatron-LM/"
BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/"
SIZES = "hidden_size: 64, num_attention_heads: 8, seq_length: 64, bf16: true"
FLAGS = "--hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --bf16 "
"""Of a model whose sizes do not matter."""
SIXTEEN = (
    "[[embedding, decoder, decoder, decoder], " + "[decoder, decoder, decoder, decoder], " * 14 + "[decoder, loss]]"
)
EIGHT = "[[embedding, decoder], " + "[decoder, decoder, decoder, decoder, decoder, decoder], " * 7 + "[decoder, loss]]"
EIGHT = EIGHT.replace("[decoder, decoder, decoder, decoder, decoder, decoder], ", "", 1)


@dataclass(frozen=True)
class Broken:
    """A broken configuration. ``given`` has Megatron's flags, or the text of a file named ``file``.

    `check` must have ``finding`` in ``section``, with ``level`` and with ``words`` in its text. After the first text of
    ``mend`` is replaced by the second, it must not have it.
    """

    thread: str
    what: str
    given: str
    section: str
    finding: str
    words: str = ""
    mend: tuple[str, str] = ("", "")
    gpus: int = 8
    level: str = ERROR
    file: str = ""
    release: str = "0.19.2"

    @property
    def name(self) -> str:
        project, number = self.thread.split("/")[4], self.thread.rpartition("/")[2]
        return f"{project}#{number}: {self.what}"

    def job(self, folder: Path) -> Job:
        if not self.file:
            return read_flags(["pretrain_gpt.py", *self.given.split()], self.gpus, "", self.release)
        (folder / self.file).write_text(self.given, encoding="utf-8")
        job = read_job(Given([str(folder / self.file)], self.gpus))
        return self.with_release(job)

    def with_release(self, job: Job) -> Job:
        return replace(job, release=self.release)


def bridge(model: str, train: str = "micro_batch_size: 1, global_batch_size: 256", rest: str = "") -> str:
    return f"model: {{{SIZES}, {model}}}\ntrain: {{{train}}}\n{rest}"


def verl(megatron: str, batch: int = 64) -> str:
    own = "hidden_size: 64, num_attention_heads: 8"
    return f"""\
actor_rollout_ref:
  actor:
    strategy: megatron
    ppo_mini_batch_size: {batch}
    ppo_micro_batch_size_per_gpu: 1
    megatron: {{{megatron}, override_transformer_config: {{num_layers: 16, {own}}}}}
  rollout: {{n: 1}}
data: {{max_prompt_length: 32, max_response_length: 32}}
trainer: {{nnodes: 1, n_gpus_per_node: 8}}
"""


LAYERS, GROUPS, COMBINED = "layers-on-stages", "microbatches-of-the-last-group", "combined-1f1b"
PARALLEL = "tensor_model_parallel_size: {}, pipeline_model_parallel_size: {}"
STAGES_OF_KIMI = f"num_layers: 60, pipeline_model_parallel_layout: {SIXTEEN}"

NAMED = [
    Broken(
        f"{BRIDGE}pull/5008",
        "a layout of 16 stages stays when the command line asks for 4 ranks and one chunk",
        bridge(f"{STAGES_OF_KIMI}, {PARALLEL.format(2, 4)}, virtual_pipeline_model_parallel_size: 1"),
        *("start", LAYERS, "has 16 stages; 4 pipeline ranks with 1 chunk"),
        mend=("virtual_pipeline_model_parallel_size: 1", "virtual_pipeline_model_parallel_size: 4"),
        gpus=128,
        file="kimi_k2.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5443",
        "the same with 8 ranks",
        bridge(f"{STAGES_OF_KIMI}, {PARALLEL.format(2, 8)}, virtual_pipeline_model_parallel_size: 1"),
        *("start", LAYERS, "has 16 stages; 8 pipeline ranks with 1 chunk"),
        mend=("virtual_pipeline_model_parallel_size: 1", "virtual_pipeline_model_parallel_size: 2"),
        gpus=256,
        file="deepseek_v3.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5578",
        "a layout of 8 stages silently gives 4 ranks two chunks each",
        bridge(f"num_layers: 38, pipeline_model_parallel_layout: {EIGHT}, {PARALLEL.format(1, 4)}"),
        *("layout", "chunks-by-a-layout", "has 8 stages, so each of the 4 pipeline ranks has 2 chunks"),
        mend=(" pipeline_model_parallel_size: 4", " pipeline_model_parallel_size: 8"),
        level=RISK,
        file="glm_45v.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5578",
        "a layout of 8 stages on 16 ranks",
        bridge(f"num_layers: 38, pipeline_model_parallel_layout: {EIGHT}, {PARALLEL.format(1, 16)}"),
        *("start", LAYERS, "has 8 stages; 16 pipeline ranks"),
        mend=(" pipeline_model_parallel_size: 16", " pipeline_model_parallel_size: 8"),
        gpus=16,
        file="glm_45v.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5578",
        "a layout lacks one of the model's layers",
        bridge(f"num_layers: 39, pipeline_model_parallel_layout: {EIGHT}, {PARALLEL.format(1, 8)}"),
        *("start", LAYERS, "has 38 layers (t), but model.num_layers is 39"),
        mend=("num_layers: 39", "num_layers: 38"),
        file="glm_45v.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5581",
        "sizes of the first and the last stage stay when the pipeline has two ranks",
        bridge(
            f"num_layers: 46, {PARALLEL.format(1, 2)}, num_layers_in_first_pipeline_stage: 11, "
            "num_layers_in_last_pipeline_stage: 11"
        ),
        *("start", LAYERS),
        mend=("stage: 11", "stage: 23"),
        file="glm45_air.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5640",
        "a layout of 16 stages silently gives 4 ranks four chunks each",
        bridge(f"{STAGES_OF_KIMI}, {PARALLEL.format(2, 4)}"),
        *("layout", "chunks-by-a-layout", "4 pipeline ranks has 4 chunks"),
        mend=(" pipeline_model_parallel_size: 4", " pipeline_model_parallel_size: 16"),
        gpus=128,
        level=RISK,
        file="kimi_k25_vl.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5708",
        "27 layers on two ranks, without the recipe's layout",
        bridge(f"num_layers: 27, {PARALLEL.format(1, 2)}, virtual_pipeline_model_parallel_size: 1"),
        *("start", LAYERS, "27"),
        mend=("num_layers: 27", "num_layers: 27, num_layers_in_first_pipeline_stage: 14"),
        gpus=16,
        file="moonlight.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5846",
        "sizes of the first and the last stage stay without a pipeline",
        bridge(
            f"num_layers: 40, {PARALLEL.format(1, 1)}, num_layers_in_first_pipeline_stage: 17, "
            "num_layers_in_last_pipeline_stage: 23"
        ),
        *("start", LAYERS),
        mend=(", num_layers_in_first_pipeline_stage: 17, num_layers_in_last_pipeline_stage: 23", ""),
        file="qwen35_vl.yaml",
    ),
    Broken(
        f"{BRIDGE}issues/2952",
        "lengths of packed sequences are missing on middle stages",
        bridge(
            f"num_layers: 48, {PARALLEL.format(1, 12)}",
            rest="dataset: {packed_sequence_specs: {packed_sequence_size: 4096}}",
        ),
        *("risks", "packed-lengths-missing-on-middle-stages", "attend across sequences"),
        mend=("packed_sequence_size: 4096", "packed_sequence_size: -1"),
        gpus=12,
        level=RISK,
        file="sft.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5884",
        "60 layers on 8 ranks",
        bridge(f"num_layers: 60, {PARALLEL.format(1, 8)}"),
        *("start", LAYERS, "60"),
        mend=(
            "num_layers: 60",
            "num_layers: 60, num_layers_in_first_pipeline_stage: 4, num_layers_in_last_pipeline_stage: 8",
        ),
        file="qwen35_vl_397b.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5893",
        "40 layers on two ranks with 12 chunks",
        bridge(f"num_layers: 40, {PARALLEL.format(1, 2)}, virtual_pipeline_model_parallel_size: 12"),
        *("start", LAYERS, "12 chunk"),
        mend=("virtual_pipeline_model_parallel_size: 12", "virtual_pipeline_model_parallel_size: 10"),
        gpus=16,
        file="qwen35_vl_35b.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/4604",
        "48 layers on 8 ranks with 4 chunks",
        bridge(f"num_layers: 48, {PARALLEL.format(2, 8)}, virtual_pipeline_model_parallel_size: 4"),
        *("start", LAYERS, "4 chunk"),
        mend=("virtual_pipeline_model_parallel_size: 4", "virtual_pipeline_model_parallel_size: 2"),
        gpus=128,
        file="qwen35_vl_122b.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/6091",
        "a global batch of 192 on 128 data-parallel ranks",
        bridge(f"num_layers: 8, {PARALLEL.format(2, 1)}", "micro_batch_size: 1, global_batch_size: 192"),
        *("start", "global-batch", "192 cannot be divided by train.micro_batch_size 1 x 128"),
        mend=("192", "768"),
        gpus=256,
        file="nemotronh.yaml",
    ),
    Broken(
        f"{BRIDGE}issues/6006",
        "overlap of experts' all-to-all stays on, without virtual stages",
        bridge(
            f"num_layers: 8, {PARALLEL.format(1, 2)}, expert_model_parallel_size: 4, num_moe_experts: 8, "
            "moe_token_dispatcher_type: alltoall",
            rest="comm_overlap: {overlap_moe_expert_parallel_comm: true}",
        ),
        *("start", COMBINED, "needs virtual stages"),
        mend=("parallel_comm: true", "parallel_comm: false"),
        file="moe.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/4971",
        "overlap of experts' all-to-all with the recomputation of moe",
        bridge(
            f"num_layers: 8, {PARALLEL.format(1, 2)}, virtual_pipeline_model_parallel_size: 2, num_moe_experts: 8, "
            "expert_model_parallel_size: 4, moe_token_dispatcher_type: alltoall, recompute_modules: [moe]",
            rest="comm_overlap: {overlap_moe_expert_parallel_comm: true}",
        ),
        *("start", COMBINED, "refuses the recomputation of moe"),
        mend=("[moe]", "[core_attn]"),
        file="moe.yaml",
    ),
    Broken(
        f"{BRIDGE}pull/5978",
        "the layout of a checkpoint with two stages on four ranks",
        bridge(
            f"num_layers: 4, {PARALLEL.format(1, 4)}, pipeline_model_parallel_layout: "
            "[[embedding, decoder, decoder], [decoder, decoder, loss]]"
        ),
        *("start", LAYERS, "has 2 stages; 4 pipeline ranks"),
        mend=(" pipeline_model_parallel_size: 4", " pipeline_model_parallel_size: 2"),
        file="loaded.yaml",
    ),
    Broken(
        "https://github.com/NVIDIA/cloudai/pull/1025",
        "virtual stages without a pipeline",
        bridge(f"num_layers: 8, {PARALLEL.format(1, 1)}, virtual_pipeline_model_parallel_size: 2"),
        *("start", "chunks-without-a-pipeline", "there is one pipeline rank"),
        mend=(" pipeline_model_parallel_size: 1", " pipeline_model_parallel_size: 2"),
        file="sweep.yaml",
    ),
    Broken(
        "https://github.com/NVIDIA/cloudai/pull/1025",
        "overlap of experts' all-to-all in a pipeline without virtual stages",
        bridge(
            f"num_layers: 8, {PARALLEL.format(1, 4)}, expert_model_parallel_size: 2, num_moe_experts: 8, "
            "moe_token_dispatcher_type: alltoall, virtual_pipeline_model_parallel_size: 1",
            rest="comm_overlap: {overlap_moe_expert_parallel_comm: true}",
        ),
        *("start", COMBINED, "needs virtual stages"),
        mend=("virtual_pipeline_model_parallel_size: 1", "virtual_pipeline_model_parallel_size: 2"),
        file="sweep.yaml",
    ),
    Broken(
        "https://github.com/NVIDIA-NeMo/Speech/issues/14288",
        "3 microbatches on 6 ranks with virtual stages",
        FLAGS + "--num-layers 24 --pipeline-model-parallel-size 6 --num-virtual-stages-per-pipeline-rank 2 "
        "--micro-batch-size 1 --global-batch-size 3",
        *("start", GROUPS, "at least the pipeline's 6 ranks and at most the 3 microbatches"),
        mend=("size 3", "size 12"),
        gpus=6,
    ),
    Broken(
        "https://github.com/verl-project/verl/pull/1617",
        "microbatches that do not fill the last group of a chunk",
        verl("pipeline_model_parallel_size: 4, virtual_pipeline_model_parallel_size: 2", batch=12),
        *("start", GROUPS),
        mend=("batch_size: 12", "batch_size: 16"),
        file="ppo.yaml",
    ),
    Broken(
        "https://github.com/NVIDIA-NeMo/RL/pull/1126",
        "10 microbatches in groups of 4",
        FLAGS + "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--micro-batch-size 1 --global-batch-size 20",
        *("start", GROUPS, "the last group has 2"),
        mend=("size 20", "size 16"),
    ),
    Broken(
        "https://github.com/modelscope/ms-swift/issues/5737",
        "46 layers on 4 ranks",
        "NPROC_PER_NODE=8 megatron sft --num_layers 46 --hidden_size 64 --num_attention_heads 8 "
        "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 4 --micro_batch_size 2 --global_batch_size 16\n",
        *("start", LAYERS, "46"),
        mend=("layers 46", "layers 48"),
        file="sft.sh",
    ),
    Broken(
        "https://github.com/THUDM/slime/pull/2077",
        "8 expert-parallel ranks times two stages on 8 GPUs",
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --num-layers 8 --hidden-size 64 "
        "--num-attention-heads 8 --num-experts 64 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1\n",
        *("start", "gpus-of-the-experts", "= 16"),
        mend=("expert-model-parallel-size 8", "expert-model-parallel-size 4"),
        file="run_glm.sh",
    ),
    Broken(
        f"{MEGATRON}issues/1304",
        "30 layers on 4 ranks",
        FLAGS + "--num-layers 30 --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8",
        *("start", LAYERS, "30"),
        mend=("layers 30", "layers 32"),
    ),
    Broken(
        f"{MEGATRON}issues/468",
        "80 layers on 16 ranks with 2 chunks",
        FLAGS + "--num-layers 80 --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 2 "
        "--micro-batch-size 1 --global-batch-size 16",
        *("start", LAYERS, "80"),
        mend=("layers 80", "layers 64"),
        gpus=16,
    ),
    Broken(
        f"{MEGATRON}pull/326",
        "40 layers on 8 ranks with 2 layers a chunk",
        FLAGS + "--num-layers 40 --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 2 "
        "--micro-batch-size 1 --global-batch-size 16",
        *("start", LAYERS, "40"),
        mend=("layers 40", "layers 48"),
    ),
    Broken(
        f"{MEGATRON}issues/1778",
        "the size of the last stage without a pipeline",
        FLAGS + "--num-layers 20 --decoder-last-pipeline-num-layers 1 --micro-batch-size 1 --global-batch-size 8",
        *("risks", "layers-without-a-stage"),
        mend=("last-pipeline-num-layers 1", "last-pipeline-num-layers 20"),
        release="0.14.0",
    ),
    Broken(
        f"{MEGATRON}issues/2718",
        "sizes of two stages that leave 24 of 48 layers out",
        FLAGS + "--num-layers 48 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 11 "
        "--decoder-last-pipeline-num-layers 13 --micro-batch-size 1 --global-batch-size 8",
        *("risks", "layers-without-a-stage", "builds a model without these layers"),
        mend=("num-layers 13", "num-layers 37"),
        release="0.15.3",
    ),
    Broken(
        f"{MEGATRON}issues/1852",
        "a layout with an empty stage, and fewer layers than the model",
        FLAGS + "--num-layers 61 --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout Et|(tt|)*29|L "
        "--micro-batch-size 1 --global-batch-size 16",
        *("start", LAYERS, "has 59 layers"),
        mend=("Et|(tt|)*29|L", "Et|(tt|)*30L"),
        gpus=16,
    ),
    Broken(
        f"{MEGATRON}issues/1069",
        "overlap is turned off without virtual stages",
        bridge(f"num_layers: 8, {PARALLEL.format(1, 4)}", rest="comm_overlap: {overlap_p2p_comm: true}"),
        *("layout", "overlap-without-virtual-stages"),
        mend=("overlap_p2p_comm: true", "overlap_p2p_comm: false"),
        level=RISK,
        file="overlap.yaml",
    ),
    Broken(
        f"{MEGATRON}issues/750",
        "virtual stages on two ranks without overlap",
        FLAGS + "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--no-overlap-p2p-communication --micro-batch-size 1 --global-batch-size 16",
        *("risks", "batched-exchange-on-two-ranks", "wrong order"),
        mend=("--no-overlap-p2p-communication ", ""),
    ),
    Broken(
        f"{MEGATRON}issues/1450",
        "varying lengths and virtual stages on two ranks without overlap",
        verl(
            "pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2, variable_seq_lengths: true, "
            "batch_p2p_comm: true, overlap_p2p_comm: false"
        ),
        *("risks", "varying-shapes-on-two-ranks", "wrong order"),
        mend=("batch_p2p_comm: true, overlap_p2p_comm: false", "batch_p2p_comm: false, overlap_p2p_comm: true"),
        file="ppo.yaml",
    ),
    Broken(
        f"{MEGATRON}issues/5100",
        "varying lengths on 4 ranks",
        bridge(
            f"num_layers: 80, {PARALLEL.format(1, 4)}, num_moe_experts: 256, expert_model_parallel_size: 2, "
            "variable_seq_lengths: true, moe_token_dispatcher_type: alltoall"
        ),
        *("risks", "varying-shapes-in-long-pipelines", "deadlock"),
        mend=("variable_seq_lengths: true", "variable_seq_lengths: false"),
        level=RISK,
        file="glm.yaml",
    ),
    Broken(
        f"{MEGATRON}pull/4047",
        "outputs that are freed while they are sent",
        FLAGS + "--num-layers 128 --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 8 "
        "--micro-batch-size 1 --global-batch-size 32",
        *("risks", "outputs-freed-before-they-are-sent", "freed while"),
        mend=("--num-virtual-stages-per-pipeline-rank 8 ", ""),
        gpus=16,
        level=RISK,
        release="0.17.1",
    ),
    Broken(
        f"{MEGATRON}pull/5240",
        "a hang in a receive of the interleaved schedule",
        FLAGS + "--num-layers 24 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--micro-batch-size 1 --global-batch-size 16",
        *("risks", "communicators-made-within-the-first-step"),
        mend=("--micro", "--no-overlap-p2p-communication --micro"),
        level=NOTE,
    ),
    Broken(
        f"{MEGATRON}pull/6839",
        "multi-latent attention with tensor and without sequence parallelism",
        FLAGS + "--num-layers 8 --multi-latent-attention --tensor-model-parallel-size 2 --micro-batch-size 1 "
        "--global-batch-size 16",
        *("risks", "shared-rotary-key-not-summed"),
        mend=("size 2 --micro", "size 2 --sequence-parallel --micro"),
    ),
    Broken(
        f"{MEGATRON}issues/7452",
        "attention sinks with tensor parallelism (finding 8)",
        FLAGS + "--num-layers 8 --softmax-type learnable --tensor-model-parallel-size 2 --micro-batch-size 1 "
        "--global-batch-size 16",
        *("risks", "attention-sinks-left-out-of-the-norm"),
        mend=("learnable", "off-by-one"),
    ),
    Broken(
        f"{MEGATRON}issues/7452",
        "gated delta net with tensor and without sequence parallelism (finding 11)",
        FLAGS + "--num-layers 8 --experimental-attention-variant gated_delta_net --tensor-model-parallel-size 2 "
        "--micro-batch-size 1 --global-batch-size 16",
        *("risks", "gated-delta-net-norm-not-summed"),
        mend=("size 2 --micro", "size 2 --sequence-parallel --micro"),
    ),
    Broken(
        f"{MEGATRON}pull/7513",
        "masked losses with context parallelism",
        FLAGS + "--num-layers 8 --context-parallel-size 2 --sft --micro-batch-size 1 --global-batch-size 16",
        *("risks", "masked-loss-of-each-shard"),
        mend=("--sft", "--sft --calculate-per-token-loss"),
        level=RISK,
    ),
    Broken(
        f"{MEGATRON}pull/7498",
        "multi-token prediction with context parallelism",
        FLAGS + "--num-layers 8 --mtp-num-layers 1 --context-parallel-size 2 --calculate-per-token-loss "
        "--micro-batch-size 1 --global-batch-size 16",
        *("risks", "mtp-counts-the-tokens-of-its-shard"),
        mend=(" --calculate-per-token-loss", ""),
        level=RISK,
    ),
    Broken(
        f"{MEGATRON}issues/4092",
        "packed sequences of --sft have no lengths on some tensor-parallel ranks",
        f"{FLAGS}--num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sft "
        "--micro-batch-size 1 --global-batch-size 4",
        *("risks", "packed-lengths-missing-on-tensor-parallel-ranks"),
        mend=("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 1"),
        release="0.17.1",
    ),
    Broken(
        f"{BRIDGE}pull/5380",
        "multi-token prediction on a stage of its own is in no group of the embedding",
        bridge(
            "num_layers: 4, mtp_num_layers: 1, pipeline_model_parallel_layout: "
            f"[[embedding, decoder, decoder], [decoder, decoder], [mtp], [loss]], {PARALLEL.format(1, 4)}"
        ),
        *("risks", "embedding-of-a-stage-between-the-ends"),
        mend=("[mtp], [loss]", "[decoder], [mtp, loss]"),
        level=RISK,
        file="layout.yaml",
    ),
    Broken(
        "https://github.com/modelscope/mcore-bridge/pull/104",
        "NaN with multi-token prediction and context parallelism",
        "NPROC_PER_NODE=8 megatron rlhf --num_layers 8 --hidden_size 64 --num_attention_heads 8 --mtp_num_layers 1 "
        "--context_parallel_size 2\n",
        *("risks", "mtp-without-tokens-is-nan"),
        mend=("context_parallel_size 2", "context_parallel_size 1"),
        level=RISK,
        file="dpo.sh",
        release="0.16.1",
    ),
]

NOT_NAMED = {
    f"{MEGATRON}issues/1715": "an index error in the schedule with settings that are right; the cause is not known",
    f"{MEGATRON}issues/1810": "a deadlock of overlapped all-to-alls, whose cause was not confirmed",
    f"{BRIDGE}pull/6097": "a hang on 256 GPUs that went away with half the pipeline; the cause is not known",
    "https://github.com/THUDM/slime/pull/1486": "a framework that did not pass sizes of stages on; the job is right",
    "https://github.com/pytorch/torchtitan/issues/775": "fewer microbatches than ranks under torch's own 1F1B, which "
    "is an error of torch's today; torch's schedules are not checked",
}
"""Thread -> the reason why `check` cannot find its fault."""


@pytest.mark.parametrize("broken", NAMED, ids=lambda one: one.name)
def test_check_names_the_cause_of_a_public_thread(broken: Broken, tmp_path: Path) -> None:
    answer = check(broken.job(tmp_path), None)
    section = next(one for one in answer.sections if one.name == broken.section)
    found = [one for one in section.findings if one.name == broken.finding and broken.words in one.text]
    assert found, [(one.name, one.text) for one in section.findings]
    assert {one.level for one in found} == {broken.level}


@pytest.mark.parametrize("broken", NAMED, ids=lambda one: one.name)
def test_the_fix_of_a_thread_ends_its_finding(broken: Broken, tmp_path: Path) -> None:
    before, after = broken.mend
    assert before in broken.given
    answer = check(replace(broken, given=broken.given.replace(before, after)).job(tmp_path), None)
    section = next(one for one in answer.sections if one.name == broken.section)
    assert [one.text for one in section.findings if one.name == broken.finding] == []


def test_at_least_thirty_threads_are_rebuilt_and_each_is_once() -> None:
    assert len({one.name for one in NAMED}) == len(NAMED)
    threads = {one.thread for one in NAMED}
    assert len(threads) >= 30
    assert not threads & {*NOT_NAMED}
