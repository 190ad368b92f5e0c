"""Commands and programs on pages that test_printed.py does not run, with the test that does, or why none here can."""

from __future__ import annotations

from typing import NamedTuple

BY_TEST = {
    "docs/advise.md": "functional_tests/test_printed_numbers.py",
    "docs/adding_a_schedule.md": "unit_tests/plan/orders/test_adding_a_schedule.py",
    "docs/migrating/from_deepspeed.md": "functional_tests/test_pages.py",
    "docs/recipes/library.md": "functional_tests/test_pages.py",
    "docs/testkit.md": "unit_tests/testkit/test_page.py",
    "before.py": "functional_tests/test_pages.py",
    "for version in 3.10 3.11 3.12 3.13; do": "functional_tests/test_installed_package.py",
    "done": "functional_tests/test_installed_package.py",
    "example.py": "functional_tests/test_pages.py",
    "megatron_cpu.py": "functional_tests/test_megatron_recipes.py",
    "torchrun --standalone --nproc-per-node 2 examples/torch_pipelining.py --schedule zb_v": (
        "functional_tests/test_pages.py"
    ),
    "torchrun --standalone --nproc-per-node 4 examples/torch_pipelining.py --schedule zb_v --replicas 2": (
        "functional_tests/test_pages.py"
    ),
    "torchrun --standalone --nproc-per-node 2 examples/llama_stages.py --schedule zb_v": (
        "functional_tests/test_pages.py"
    ),
    "torchrun --standalone --nproc-per-node 2 examples/attention_residuals.py --chunks 2": (
        "functional_tests/test_pages.py"
    ),
}
"""A page, a block's title or a command -> the test that runs all of it as printed."""


class Why(NamedTuple):
    """Why no test runs a command. ``reason``: one of EVIDENCE; ``test``: the test that runs the nearest thing here."""

    reason: str
    test: str = ""


HOSTS, GPU, DOWNLOADS, SUITE, MINUTES, BLANK = ("hosts", "GPU", "downloads", "suite", "minutes", "blank")

EVIDENCE = {
    HOSTS: r"NNODES|launch_multinode|SLURM",
    GPU: r"gpu_check",
    DOWNLOADS: r"pip install|\bgit |docker|megatron_versions|python -m build|check_wheel|plan_quality",
    SUITE: r"scripts/test\.sh|\.ci/run|scripts/docs\.sh",
    MINUTES: r"",
    BLANK: r"<\w|\.\.\.|/path/to|\b[A-Z]{4,}\b|my_text|small\.toml|pipeline_plugin|train\.py|--from results",
}
"""Reason -> a pattern in the printed text. HOSTS: it needs several hosts. GPU: it needs GPUs. DOWNLOADS: packages or
sources come from a network. SUITE: it runs these tests, or all checks. MINUTES: a test runs the same with smaller
numbers. BLANK: the reader fills something in, and so does a test."""

_TRAIN = "functional_tests/test_train_script.py::test_a_run_leaves_metrics_a_plot_and_checkpoints"
_GOES_ON = "functional_tests/test_train_script.py::test_a_run_goes_on_with_other_ranks_chunks_schedule_and_replicas"
_CHECKED = "functional_tests/test_check_command.py::test_flags_are_read_by_the_scripts_own_parser"
_COMPARED = "functional_tests/test_parity_scripts.py::test_megatrons_loop_is_right_under_both_schedules"
_UNCHANGED = "functional_tests/test_megatron_recipes.py::test_an_unchanged_program_overlaps_without_virtual_stages"
_MEASURED = "functional_tests/test_train_trace.py::test_measured_stage_costs_are_written_to_the_runs_folder"
_PACKAGE = "functional_tests/test_installed_package.py::test_the_installed_package_works_without_torch_and_rich"
_HOSTS = "functional_tests/test_multinode.py::test_two_hosts_train_as_one_also_when_the_cable_is_out_for_a_while"
_CHECKOUT = "where MEGATRON_CHECKOUT names one"

NOT_HERE = {
    "scripts/train.sh": Why(MINUTES, _TRAIN),
    "scripts/test_megatron_versions.sh": Why(DOWNLOADS),
    "scripts/test_megatron_versions.sh newest": Why(DOWNLOADS),
    "python scripts/megatron_own_tests.py CHECKOUT": Why(BLANK, _CHECKOUT),
    "python scripts/megatron_reads.py CHECKOUT": Why(BLANK, _CHECKOUT),
    "python scripts/without_feature.py NAME": Why(
        BLANK, "unit_tests/scripts/test_without_feature.py::test_the_rest_is_whole_without_a_feature"
    ),
    "scripts/gpu_check.sh": Why(GPU, "functional_tests/test_first_day.py::test_parts_pass_over_gloo"),
    "pip install .": Why(DOWNLOADS, _PACKAGE),
    "pip install '.[train,viz]'": Why(DOWNLOADS, _PACKAGE),
    "pip install megatron_pp-0.1.0-py3-none-any.whl": Why(DOWNLOADS, _PACKAGE),
    "python -m build": Why(DOWNLOADS, _PACKAGE),
    "scripts/check_wheel.sh dist": Why(DOWNLOADS, _PACKAGE),
    "export MEGATRON_PP_URL=https://<the repository>": Why(BLANK, _PACKAGE),
    "MEGATRON_PP_PYTHON_VERSION=$version MEGATRON_PP_VENV=.venv-$version scripts/check_wheel.sh dist/$version": Why(
        DOWNLOADS, _PACKAGE
    ),
    "docker build -t megatron-pp .": Why(DOWNLOADS),
    "docker run --rm megatron-pp": Why(DOWNLOADS),
    "docker run --rm megatron-pp scripts/test.sh": Why(DOWNLOADS),
    "megatron-pp check --gpus 64 --gpu h100 pretrain_gpt.py <the usual flags>": Why(BLANK, _CHECKED),
    "megatron-pp check --gpus 2048 --gpu h100 pretrain_gpt.py <the usual flags>": Why(BLANK, _CHECKED),
    'megatron-pp check --gpus "$((SLURM_NNODES * 8))" --gpu h100 pretrain_gpt.py "${FLAGS[@]}" '
    "|| [ $? -eq 3 ] || exit 1": Why(HOSTS, _CHECKED),
    "megatron-pp parity pretrain_gpt.py <the usual flags>": Why(BLANK, _COMPARED),
    "megatron-pp parity --nproc 4 --json --junit parity.xml --html parity.html pretrain_gpt.py <the usual flags>": Why(
        BLANK, _COMPARED
    ),
    "torchrun --nproc-per-node 8 -m megatron_pp run --overlap-p2p-comm pretrain_gpt.py <the usual flags>": Why(
        BLANK, _UNCHANGED
    ),
    "torchrun --nproc-per-node 8 -m megatron_pp run --measure 5 pretrain_gpt.py <the usual flags>": Why(
        BLANK, "functional_tests/megatron_settings_checks.py::what_its_stages_cost_is_measured"
    ),
    "torchrun --nproc-per-node 8 -m megatron_pp run --metrics 10 pretrain_gpt.py --tensorboard-dir runs "
    "<the usual flags>": Why(BLANK, "functional_tests/megatron_settings_checks.py::metrics_reach_megatrons_writer"),
    "train.py --pipeline-schedule auto --pipeline-measured megatron_pp_measured.json": Why(BLANK, _MEASURED),
    "megatron-pp run --pipeline-schedule zb_v pretrain_gpt.py --num-virtual-stages-per-pipeline-rank 2 ...": Why(
        BLANK, "functional_tests/test_megatron_v_placement.py"
    ),
    "export VERL_USE_EXTERNAL_MODULES=pipeline_plugin": Why(BLANK, "functional_tests/test_megatron_callers.py"),
    "PYTHONPATH=/path/to/checkout torchrun --standalone --nproc-per-node 2 megatron_cpu.py": Why(BLANK, _UNCHANGED),
    "scripts/pretrain_gpt_megatron.sh --compare --train-iters 10": Why(
        MINUTES,
        "functional_tests/test_megatron_pretrain_script.py::test_the_small_training_has_equal_losses_under_both_engines",
    ),
    "git worktree add ../plan_quality 558fdd36 && cd ../plan_quality && pip install '.[solver]'": Why(DOWNLOADS),
    "for first in 0 50 100 150; do python scripts/plan_quality.py small --first $first --count 50 "
    "--out results.jsonl; done": Why(DOWNLOADS),
    "python scripts/plan_quality.py large --out results.jsonl": Why(DOWNLOADS),
    "python scripts/plan_quality.py page --out results.jsonl": Why(DOWNLOADS),
    "git clone https://github.com/NVIDIA/Megatron-LM": Why(DOWNLOADS),
    "scripts/benchmark.py all --quick --out results --megatron-source Megatron-LM": Why(
        MINUTES, "unit_tests/scripts/test_benchmark_all.py::test_a_failure_ends_no_other_and_a_missing_gpu_is_none"
    ),
    "scripts/benchmark.py tables --from results": Why(BLANK, "unit_tests/scripts/test_benchmark_tables.py"),
    "python scripts/soak.py --seed 21 --ranks 3 --episodes 5 --steps 40 --clean-steps 1000 --p2p-timeout 3.0 "
    "--backend gloo": Why(MINUTES, "functional_tests/test_soak.py::test_a_short_soak_writes_its_part_of_a_page"),
    "export NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1        export NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1": (
        Why(HOSTS, _HOSTS)
    ),
    "scripts/launch_multinode.sh --run-dir /shared/run       scripts/launch_multinode.sh --run-dir /shared/run": (
        Why(HOSTS, _HOSTS)
    ),
    "MAX_RESTARTS=3 scripts/launch_multinode.sh --run-dir /shared/runs/gpt --train-steps 20000": Why(HOSTS, _HOSTS),
    "scripts/train.sh --help": Why(MINUTES, _TRAIN),
    "scripts/train.sh --config small.toml --seed 7": Why(BLANK, _TRAIN),
    "scripts/train.sh --resume runs/NAME --train-steps 800": Why(BLANK, _GOES_ON),
    "NPROC=4 scripts/train.sh --resume runs/NAME --pipeline-schedule zb_h1": Why(BLANK, _GOES_ON),
    "torchrun --nproc-per-node 4 scripts/train.py --pipeline-schedule zb_v --data my_text/": Why(BLANK, _TRAIN),
    "NPROC=4 scripts/train.sh --sequence-slices 4 --seq-length 2048": Why(MINUTES, _TRAIN),
}
"""Commands that no test runs as printed; with commands that match EVIDENCE of SUITE."""

PARTS = {
    "docs/features.md": "unit_tests/features/slices/test_slices_in_plans.py",
    "docs/megatron_features.md": "functional_tests/test_megatron_v_placement.py",
    "docs/modules.md": "functional_tests/test_modules.py",
    "docs/parity_check.md": "unit_tests/tools/parity/test_models.py",
    "docs/skip_tensors.md": "unit_tests/features/skip_tensors",
    "docs/migrating/from_torch.md": "functional_tests/test_torchtitan.py",
}
"""Pages with Python that is a part of the reader's own program and uses its names; and tests of the same calls."""

FIRST = {
    "docs/adding_an_instruction.md": "from megatron_pp.feature_table import *\n",
    "docs/schedules.md": """
import torch
from megatron_pp import TransformerConfig
config = TransformerConfig(
    num_layers=4, hidden_size=4, num_attention_heads=1, pipeline_model_parallel_size=4, pipeline_dtype=torch.float32
)
chunks = [torch.nn.Sequential(torch.nn.Linear(4, 4))]
""",
    "docs/skip_tensors.md": """
import torch
from megatron_pp import TransformerConfig
config = TransformerConfig(
    num_layers=4, hidden_size=4, num_attention_heads=1, pipeline_model_parallel_size=4, pipeline_dtype=torch.float32
)
""",
}
"""Page -> lines that its parts of programs need before them."""
