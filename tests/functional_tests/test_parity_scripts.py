"""``megatron-pp parity`` on scripts of all kinds: with Megatron's training loop, with their own loops, and scripts that
cannot run. Megatron-LM's training package is not on PyPI; a small one with its functions replaces it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testkit.megatron.parity_commands import run_parity
from testkit.sweeps import drawn
from tests.conftest import PROJECT_ROOT
from tests.functional_tests.megatron_support import SCRIPTS, needs_megatron

pytestmark = needs_megatron

SMALL = PROJECT_ROOT / "testkit" / "megatron" / "small_training"
PRETRAIN = str(SMALL / "pretrain.py")
OWN_LOOP = str(SCRIPTS / "pretrain_gpt_megatron.py")
PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
SIZES = "--lr 0.001 --global-batch-size 8"
EXPERTS = "--num-experts 4 --moe-router-enable-expert-bias"
DOCUMENTS = "--reset-position-ids --reset-attention-mask --create-attention-mask-in-dataloader"


@dataclass(frozen=True)
class Said:
    code: int
    answer: dict[str, Any]
    complaint: str


def parity(command: str, folder: Path, fault: str = "", starts: bool = False, **environment: str) -> Said:
    """Run `megatron-pp parity --json` on a script, with the small training package next to Megatron-core, and return
    the answer. ``starts``: run it in a new interpreter, which imports Megatron-core itself."""
    words = ["--json", *command.split()]
    given = {**os.environ, "PYTHONPATH": f"{PROJECT_ROOT}:{SMALL}", "PLANTED_FAULT": fault, **environment}
    if starts:
        interpreter = [sys.executable, "-W", "ignore", "-m", "megatron_pp", "parity", *words]
        done = subprocess.run(interpreter, env=given, cwd=folder, capture_output=True, text=True, timeout=300)
    else:
        done = run_parity(words, folder, given)
    assert done.stdout.count("\n") == 1, done.stderr[-3000:]
    return Said(done.returncode, json.loads(done.stdout), done.stderr)


def test_megatrons_loop_is_right_under_both_schedules(tmp_path: Path) -> None:
    said = parity(f"{PRETRAIN} {SIZES} --num-layers 8 {PP2}", tmp_path, starts=True)
    assert (said.code, said.answer["verdict"], said.answer["same"]) == (0, "rounding", True)
    assert {"log", "report", "schedule"} <= set(said.answer["exact"])
    assert said.answer["rounding"].startswith("gradient of embedding.word_embeddings.weight, step 0 (each stage")
    assert said.answer["not_exercised"]["dropout"].startswith("it is off")


@pytest.mark.parametrize(
    ("fault", "flags", "first"),
    drawn(
        [
            ("log", f"--engine megatron {PRETRAIN} {SIZES} --num-layers 8 {PP2}", "value of train_step: lm loss"),
            (
                "schedule",
                f"--engine megatron --checkpoint resume {PRETRAIN} {SIZES} --num-layers 8 {PP2}",
                "log of Megatron: learning rate",
            ),
            ("bias", f"--engine megatron --nproc 2 {PRETRAIN} {SIZES} {EXPERTS}", "router.expert_bias after the step"),
            ("clip", f"--engine megatron {PRETRAIN} {SIZES} --clip-grad 0.1 {PP2}", "optimizer's exp_avg of"),
            ("positions", f"--engine megatron {PRETRAIN} {SIZES} {PP2} {DOCUMENTS}", "forward of embedding"),
            ("mask", f"--engine megatron {PRETRAIN} {SIZES} {PP2} {DOCUMENTS}", "self_attention"),
        ],
        3,
    ),
)
def test_faults_outside_of_gradients_are_found(tmp_path: Path, fault: str, flags: str, first: str) -> None:
    """The faults are in other numbers of a training step, and in data that flags choose."""
    said = parity(flags, tmp_path, fault)
    assert (said.code, said.answer["verdict"]) == (1, "different")
    assert first in said.answer["first"]["operation"]


@pytest.mark.parametrize(
    "flags",
    [
        f"--engine megatron --checkpoint resume {PRETRAIN} {SIZES} --num-layers 8 {PP2}",
        f"--engine megatron --nproc 2 {PRETRAIN} {SIZES} {EXPERTS}",
        f"--engine megatron {PRETRAIN} {SIZES} --clip-grad 0.1 {PP2} {DOCUMENTS}",
    ],
)
def test_nothing_is_found_without_a_fault(tmp_path: Path, flags: str) -> None:
    said = parity(flags, tmp_path)
    assert (said.code, said.answer["first"]) == (0, None)


@pytest.mark.parametrize(
    ("flags", "words"),
    drawn(
        [
            (f"{PRETRAIN} {SIZES} --num-layers 7 {PP2}", "layers should be divisible by the stages"),
            (
                f"{PRETRAIN} {SIZES} --num-attention-heads 6 --hidden-size 48 --tensor-model-parallel-size 4",
                "(6) must be a",
            ),
            (f"--nproc 2 {PRETRAIN} --lr 0.001 --global-batch-size 7", "global batch size is not divisible by 2"),
            (
                f"{PRETRAIN} --lr 0.001 --global-batch-size 5 --num-layers 8 {PP2} {CHUNKS}",
                "The remainder of M",
            ),
            (f"{OWN_LOOP} --num-layers 15 {PP2}", "num_layers should be divisible by pipeline_model_parallel_size"),
            (
                f"--nproc 2 {OWN_LOOP} --num-layers 4 --global-batch-size 7 --micro-batch-size 1",
                "is not a multiple of 2",
            ),
            (
                f"{PRETRAIN} {SIZES} {PP2} --numm-layers 3",
                "pretrain.py: error: unrecognized arguments: --numm-layers 3",
            ),
            (f"{OWN_LOOP} {PP2} --numm-layers 3", "megatron.py: error: unrecognized arguments: --numm-layers 3"),
        ],
        4,
    ),
)
def test_sizes_and_flags_that_the_script_refuses(tmp_path: Path, flags: str, words: str) -> None:
    """The script refuses them before the sizes are made small, and the answer has its words."""
    said = parity(flags, tmp_path)
    assert (said.code, said.answer["verdict"]) == (2, None)
    # Since Megatron-core 0.19 its config gives the values too: num_layers=15, config.pipeline_model_parallel_size=2.
    assert words in re.sub(r"\bconfig\.|=\d+", "", said.answer["error"])


@pytest.mark.parametrize(
    "flags", [f"--nproc 2 {PRETRAIN} --lr 0.001 --micro-batch-size 1", f"{PRETRAIN} {SIZES} {TP2}"]
)
def test_defaults_that_depend_on_the_layout_are_those_of_the_layout(tmp_path: Path, flags: str) -> None:
    """With the defaults of one process the batch would be half as large, and the padded vocabulary smaller."""
    said = parity(f"--shrink none --engine megatron {flags} --num-layers 2", tmp_path)
    assert (said.code, said.answer["first"]) == (0, None)


def test_parity_lists_settings_that_it_cannot_exercise(tmp_path: Path) -> None:
    said = parity(f"--engine megatron --junit {tmp_path}/j.xml {PRETRAIN} {SIZES} {PP2} --sft", tmp_path)
    assert (said.code, said.answer["verdict"]) == (2, "not exercised")
    assert said.answer["engines"] == {"megatron": "rounding"}
    assert "--sft" in said.answer["not_exercised"]
    assert 'errors="1"' in (tmp_path / "j.xml").read_text()


OF_ITS_OWN = """
import argparse, os
import torch
import torch.distributed as dist
from megatron_pp.tools.parity import cpu_stand_in
cpu_stand_in.redirect()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

parser = argparse.ArgumentParser()
parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
parser.add_argument("--config", default="none")
args, _ = parser.parse_known_args()
dist.init_process_group("gloo")
PP = args.pipeline_model_parallel_size
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=PP)
DP, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
tensor_parallel.model_parallel_cuda_manual_seed(7)
config = TransformerConfig(  # dropout is on, as it is by default
    num_layers=2, hidden_size=16, num_attention_heads=2, pipeline_model_parallel_size=PP, pipeline_dtype=torch.float32
)
first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
spec = get_gpt_layer_local_spec()
model = GPTModel(config, spec, 32, 8, pre_process=first, post_process=last, share_embeddings_and_output_weights=False)
model.register_buffer("seen", torch.zeros(()))
model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
config.finalize_model_grads_func = finalize_model_grads
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def samples(number):
    while True:
        yield torch.randint(32, (1, 9), generator=torch.Generator().manual_seed(number))
        number += DP


def forward_step(data, model):
    tokens = next(data)
    labels = tokens[:, 1:]
    output = model(tokens[:, :-1], torch.arange(8)[None], None, labels=labels)

    def loss(output):
        return output.mean(), {"lm loss": output.mean().item() * (2 if "REPORT" in os.environ and PP > 1 else 1)}

    return output, loss


data = samples(rank)
for step in range(5):
    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=4 // DP, seq_length=8,
        micro_batch_size=1, forward_only=False,
    )
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
    optimizer.zero_grad()
    model.module.seen += 4 // DP if "BUFFER" in os.environ else 4
    assert step < 2, "parity needs no further steps"
"""


@pytest.mark.parametrize(
    ("flags", "environment", "first"),
    [
        (PP2, {}, None),
        ("--nproc 2", {}, None),
        (PP2, {"REPORT": "1"}, "report of loss_func: lm loss"),
        ("--nproc 2", {"BUFFER": "1"}, "buffer seen after the step"),
    ],
)
def test_a_loop_of_its_own_with_an_optimizer_of_torch(
    tmp_path: Path, flags: str, environment: dict[str, str], first: str | None
) -> None:
    (tmp_path / "train.py").write_text(OF_ITS_OWN)
    words = f"--nproc 2 train.py {flags}" if flags == PP2 else f"{flags} train.py"
    said = parity(f"--engine megatron {words}", tmp_path, **environment)
    assert said.code == (first is not None), said.answer
    assert said.answer["not_exercised"] == {"dropout": said.answer["not_exercised"].get("dropout")}
    if first is not None:
        assert said.answer["first"]["operation"] == first


OF_GPT = {
    "from megatron.core.models.gpt import GPTModel": "from megatron.core.models.mamba import MambaModel",
    "gpt.gpt_layer_specs import get_gpt_layer_local_spec": "mamba.mamba_layer_specs import mamba_stack_spec",
    "spec = get_gpt_layer_local_spec()": "pattern = {'hybrid_override_pattern': 'M*-M'}",
    "GPTModel(config, spec, 32, 8, ": "MambaModel(config, mamba_stack_spec, 32, 8, **pattern, ",
    "num_layers=2, ": "num_layers=4, mamba_state_dim=4, mamba_head_dim=8, mamba_num_groups=2, ",
}


def test_a_hybrid_model_whose_layers_need_a_gpu(tmp_path: Path) -> None:
    """The specification has layers of Transformer Engine, and Mamba's kernels need Triton. Here Megatron-core is
    imported with the script, which needs stand-ins for both."""
    megatron = importlib.util.find_spec("megatron")
    folders = (megatron and megatron.submodule_search_locations) or ()
    if not any(Path(folder, "core", "models", "mamba", "mamba_layer_specs.py").exists() for folder in folders):
        pytest.skip("hybrid models have another name in this release")
    script = OF_ITS_OWN
    for old, new in OF_GPT.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(script)
    said = parity(f"--engine megatron --nproc 2 train.py {PP2}", tmp_path, starts=True)
    assert (said.code, said.answer["verdict"]) == (0, "equal"), said.answer


CANNOT_RUN = {
    "an imported module exits with 0": ("import broken\n", "import sys\nsys.exit(0)\n", "exit code 0 after 0 training"),
    "an imported module exits with 1": ("import broken\n", "import sys\nsys.exit(1)\n", "exit code 1 after 0 training"),
    "an imported module exits with words": ("import broken\n", "import sys\nsys.exit('no key')\n", "(no key)"),
    "an imported module ends the process": ("import broken\n", "import os\nos._exit(0)\n", "ended with exit code 0"),
    "an imported module is no Python": ("import broken\n", "def f(:\n", "SyntaxError"),
    "an imported module is not there": ("import nowhere\n", "", "No module named 'nowhere'"),
    "an imported module hangs": ("import broken\n", "import time\ntime.sleep(600)\n", "did not end within 20 s"),
    "it is no Python": ("x = 1\ndef f(:\n", "", "train.py, line 2: SyntaxError"),
    "it has a zero byte": ("x = 1\n\0", "", "null bytes"),
    "it exits with 0": ("raise SystemExit(0)\n", "", "exit code 0 after 0 training steps of 2"),
    "it exits with 3": ("print('bye'); raise SystemExit(3)\n", "", "exit code 3 after 0 training steps of 2:\n  bye"),
    "it ends": ("x = 1\n", "", "the script ended after 0 training steps of 2"),
    "a rank ends at once": ("import os\nos._exit(0)\n", "", "rank 0 ended with exit code 0"),
    "a rank is killed": ("import os\nos.kill(os.getpid(), 9)\n", "", "rank 0 was killed by SIGKILL"),
    "it forks": ("import os\nif not os.fork():\n    raise SystemExit(0)\nos.wait()\n", "", "ended after 0 training"),
}


@pytest.mark.parametrize("case", drawn(CANNOT_RUN, 6))
def test_a_script_that_cannot_run_has_no_verdict(tmp_path: Path, case: str) -> None:
    script, module, words = CANNOT_RUN[case]
    (tmp_path / "train.py").write_text(script)
    if module:
        (tmp_path / "broken.py").write_text(module)
    deadline = 20 if "20 s" in words else 120
    said = parity(f"--deadline {deadline} --junit {tmp_path}/parity.xml train.py", tmp_path)
    assert (said.code, said.answer["verdict"]) == (2, None)
    assert words in said.answer["error"], said.answer["error"]
    assert 'errors="1"' in (tmp_path / "parity.xml").read_text()


def test_sigterm_ends_the_ranks_and_what_the_script_has_started(tmp_path: Path) -> None:
    child = "import subprocess, sys, time\n"
    child += (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    )
    child += f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\ntime.sleep(600)\n"
    (tmp_path / "train.py").write_text(child)
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "megatron_pp", "parity", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "TMPDIR": str(tmp_path / "scratch")}
    running = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
        assert time.monotonic() < end
        assert running.poll() is None
        time.sleep(0.05)
    running.terminate()
    assert running.wait(30) == -signal.SIGTERM
    process = Path(f"/proc/{(tmp_path / 'child').read_text()}")
    end = time.monotonic() + 10
    while process.exists():
        assert time.monotonic() < end, "the script's process is still there"
        time.sleep(0.05)
    assert not list((tmp_path / "scratch").glob("megatron_pp_parity*"))
