"""Checks of what Megatron-core's optimizer does to parameters that have a copy on another stage. They run on ranks, in
the processes of testkit/megatron/runner.py.
"""

from __future__ import annotations

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case


def embedding_after_a_step(case: Case) -> list[float] | None:
    """Return the embedding's weights after a step in which embeddings have a learning rate of their own, None on a rank
    without embedding."""
    with megatron_lab.engine(case):
        run = megatron_lab.Run(case)
        config = OptimizerConfig(optimizer="adam", lr=0.01, decoupled_lr=0.1, clip_grad=0.0)
        optimizer = get_megatron_optimizer(config, run.chunks)
        rates = {"init_lr": 0.0, "max_lr": config.lr, "min_lr": 0.0, "lr_decay_style": "constant"}
        steps = {"lr_warmup_steps": 0, "lr_decay_steps": 10, "wd_incr_steps": 10}
        decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_style": "constant"}
        OptimizerParamScheduler(optimizer, **rates, **steps, **decay).step(1)
        run.step(0)
        optimizer.step()
    weights = [weight for name, weight in run.parameters().items() if name == "embedding.word_embeddings.weight"]
    return weights[0].flatten().tolist() if weights else None
