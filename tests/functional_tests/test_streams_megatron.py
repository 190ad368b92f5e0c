"""Megatron-core's GPTModel on virtual devices has no stream race, with whole and split backwards, and with Megatron's
own forward and backward step.

No call is redirected: its code uses ``torch.cuda``. It runs in its own process, since Megatron's state is global.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from testkit.processes import run_processes
from tests.functional_tests.megatron_support import needs_megatron

RANKS, MICROBATCHES, LENGTH, WORDS = 2, 4, 8, 32
POLICIES: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_p2p_comm": True, "batch_p2p_comm": False},
    "batched": {"overlap_p2p_comm": False, "batch_p2p_comm": True, "batch_p2p_sync": False},
}


# (policy, schedule, whether backwards are split, whether Megatron calls the engine through the plug-in)
CASES = [
    ("overlap", "1f1b", False, False),
    ("batched", "1f1b", False, False),
    ("overlap", "zb_h1", True, False),
    ("overlap", "1f1b", False, True),
]


def run_cases(rank: int, size: int) -> list[dict[str, Any]]:
    """Run all cases one after the other in one process, since imports take most of the time."""
    return [run_gpt(*case) for case in CASES]


def set_up() -> None:
    """Make Megatron's groups, with this process as the only member, and its random state."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from testkit.streams import virtual_cuda

    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    with virtual_cuda():
        model_parallel_cuda_manual_seed(1)


def gpt_config(policy: str, schedule: str) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        **POLICIES[policy],
    )
    config.pipeline_schedule = schedule
    return config


def run_gpt(policy: str, schedule: str, split: bool, plugged_in: bool) -> dict[str, Any]:
    """Take a step of a GPT of two layers, one on each rank. The job has one process, so that all groups but the
    pipeline's have one member."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_pp.comm.p2p_communicator import P2PCommunicator
    from megatron_pp.integrations import megatron_core
    from megatron_pp.schedules import get_forward_backward_func
    from megatron_pp.weight_grad import split_weight_grad
    from testkit.streams import check_streams

    set_up()
    config = gpt_config(policy, schedule)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        tokens = next(data_iterator).cuda(non_blocking=True)
        positions = torch.arange(LENGTH, device="cuda").unsqueeze(0)
        output = model(tokens, positions, None, labels=tokens)
        return output, lambda out: (out.mean(), {"loss": out.detach().mean()})

    def rank_main(communicator: P2PCommunicator) -> list[float]:
        first, last = communicator.rank == 0, communicator.rank == RANKS - 1
        spec = get_gpt_layer_local_spec()
        model = GPTModel(config, spec, WORDS, LENGTH, pre_process=first, post_process=last).train()
        if split:
            split_weight_grad([model])
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.pp = communicator.pp_group
        batches = [torch.randint(0, WORDS, (2, LENGTH), device="cpu").pin_memory() for _ in range(MICROBATCHES)]
        reports = schedule_function(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        return [float(report["loss"]) for report in reports]

    with megatron_core.installed(strict=True):
        schedule_function = (
            schedules.get_forward_backward_func(RANKS) if plugged_in else get_forward_backward_func(RANKS)
        )
        report = check_streams(rank_main, RANKS, config)
    return {"races": list(map(str, report.races)), "losses": report.results[-1], "operations": report.operations}


@needs_megatron
def test_gpt_does_not_race() -> None:
    (outcomes,) = run_processes(run_cases, 1, timeout=240.0, start_method="forkserver")
    for case, said in zip(CASES, outcomes, strict=True):
        assert said["races"] == [], case
        assert said["operations"] > 700
        assert [2.0 < loss < 6.0 for loss in said["losses"]] == [True] * MICROBATCHES
