"""The option ``--megatron-args``: Megatron's settings as one text of flags, or in a file that `check` reads."""

import argparse
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import Network, StageCosts
from megatron_pp.plan.ir.spec import BATCHED, OVERLAP
from megatron_pp.plan.orders import INTERLEAVED
from megatron_pp.plan.simulate.memory import ModelShape
from megatron_pp.tools.advise.layers.gpus import GB, GPUS, gpu_named
from megatron_pp.tools.advise.megatron_args import arguments_of, no_arguments, read_megatron_args
from megatron_pp.tools.advise.transformer import Transformer
from megatron_pp.tools.check.findings import ERROR
from megatron_pp.tools.check.jobs.flag_table import WRONG_VALUE, read_flags
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.jobs.read import is_file_of_settings, settings_of_file
from megatron_pp.tools.check.priced import priced, transformer_of_job
from megatron_pp.tools.check.stages import NotGivenError, chunks_of, microbatches_of, pipeline_size
from megatron_pp.tools.cli.errors import UsageError
from megatron_pp.tools.cli.options import cost_options
from megatron_pp.tools.cli.options.parser import given, refuse

_TIMES = (*cost_options.COSTS, "from_trace")
_NOT_BESIDE = ("source", "modules", "from_trace")


def settings_of(text: str) -> dict[str, Any]:
    """Megatron's arguments, from flags or from a file that `megatron-pp check` reads."""
    path = text.strip()
    if is_file_of_settings(path):
        return arguments_of(_checked(settings_of_file(path)).given)
    return read_megatron_args(text)


def _checked(job: Job) -> Job:
    wrong = [one.text for one in job.found if one.level == ERROR and one.name == WRONG_VALUE]
    if wrong:
        raise UsageError(f"{job.source}: {wrong[0]}")
    return job


def job_of(text: str, data_parallel: int) -> Job:
    """The job of these settings with ``data_parallel`` replicas."""
    path = text.strip()
    if is_file_of_settings(path):
        job = settings_of_file(path)
    else:
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise PlanError(f"Megatron's arguments cannot be read: {error}") from error
        if not any(word.startswith("--") for word in words):
            raise no_arguments(text)
        job = read_flags(["--megatron-args", *words], 1, "only sizes are read")
    return replace(_checked(job), args={**job.args, "data_parallel_size": data_parallel})


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Megatron", "a Megatron job; other options override its settings")
    text = (
        "the pipeline and the sizes of the model from Megatron's arguments as one text, or from a file that check reads"
    )
    group.add_argument("--megatron-args", metavar="ARGS", help=text)
    card = f"estimate times from these sizes and the data sheet of a card: {', '.join(GPUS)}"
    group.add_argument("--gpu", metavar="NAME", help=card)


@dataclass(frozen=True)
class OfMegatron:
    """The costs and the model of a job.

    costs, network  estimated for a card; None without a card
    shape           the model's shape; None if it is not a plain transformer, as ``ModelShape`` has no memory for others
    """

    costs: StageCosts | None = None
    network: Network | None = None
    shape: ModelShape | None = None


def fill(args: argparse.Namespace) -> OfMegatron | None:
    """Sets the missing options of the pipeline to the job's values. Returns None without ``--megatron-args``."""
    if args.megatron_args is None:
        refuse(args, ["gpu"], "needs --megatron-args: it estimates times from a model's sizes")
        return None
    refuse(args, _NOT_BESIDE, "does not go with --megatron-args, which has its own pipeline")
    job = job_of(args.megatron_args, args.data_parallel or 1)
    named = args.schedule
    chunks = chunks_of(job)
    group = int(job.get("microbatch_group_size_per_vp_stage") or 0)
    own: dict[str, Any] = {"pipeline_size": pipeline_size(job)}
    if named is None and args.compare is None:
        own |= {"num_chunks": [chunks], "schedule": INTERLEAVED if chunks > 1 else None}
        own |= {"group_size": group or None, "policy": OVERLAP if job.get("overlap_p2p_comm") else BATCHED}
    with suppress(NotGivenError):  # the default of the option remains
        own["num_microbatches"] = [microbatches_of(job)]
    if args.gpu is not None:
        refuse(args, ["pipeline_size"], "does not go with --gpu, whose times are for the job's own ranks")
    for name, value in own.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return _priced(args, job)


def _priced(args: argparse.Namespace, job: Job) -> OfMegatron:
    costs = network = None
    if args.gpu is not None:
        gpu = gpu_named(args.gpu)
        refuse(args, _TIMES, "does not go with --gpu, which gives times and transfers")
        found = priced(job, gpu)
        costs = found.cut.costs
        network = _in_bytes(found.network(gpu))
    try:
        transformer = transformer_of_job(job)
    except PlanError:  # sizes are missing, but a plan needs none
        return OfMegatron(costs, network)
    if args.activation_mb is None:
        args.activation_mb = transformer.shape.message_bytes / 1e6
    if not _is_plain(transformer):
        why = "needs a plain transformer, without experts, gated or grouped parts; use megatron-pp check for its memory"
        refuse(args, ["memory", "memory_limit", "keep_outputs", *_SHAPE], why)
        return OfMegatron(costs, network)
    return OfMegatron(costs, network, replace(transformer.shape, **given(args, cost_options.MODEL)))


_SHAPE = tuple(name for name in cost_options.MODEL if name != "data_parallel")


def _in_bytes(network: Network) -> Network:
    """The network with bytes instead of GB."""
    link = replace(network.link, bandwidth=network.link.bandwidth * GB)
    return replace(network, activation_bytes=network.activation_bytes * GB, link=link)


def _is_plain(model: Transformer) -> bool:
    """Whether ``ModelShape`` has all sizes that determine the model's memory."""
    heads = model.shape.num_attention_heads
    usual = model.kv_channels in (None, model.shape.hidden_size // (heads or 1))
    all_to_all = model.query_groups in (None, heads) and not {*model.mixers} - {"*"}
    others = (model.gated, model.experts, model.latent, model.window, model.pattern, model.mtp_layers)
    return usual and all_to_all and not any(others)
