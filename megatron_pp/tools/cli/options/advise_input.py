"""The options of ``megatron-pp advise``, and the question that they describe."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_pp.plan.costs.stage_costs import Link
from megatron_pp.plan.ir.spec import POLICIES
from megatron_pp.plan.simulate.memory import ModelShape
from megatron_pp.tools.advise.layers.gpus import EFFICIENCY, GB, GPUS, Gpu, gpu_named
from megatron_pp.tools.advise.megatron_args import transformer_of
from megatron_pp.tools.advise.megatron_args import whole as whole_argument
from megatron_pp.tools.advise.model import DECODER, EMBEDDING, LOSS, MTP, PART, Layer, Model, layer
from megatron_pp.tools.advise.question import Question
from megatron_pp.tools.advise.transformer import Transformer
from megatron_pp.tools.cli.errors import UsageError
from megatron_pp.tools.cli.options import cost_options
from megatron_pp.tools.cli.options.advise_costs import FileCosts, layer_of, read_costs
from megatron_pp.tools.cli.options.cost_options import add_from_trace_option, is_on_gloo, number, times, traced_findings
from megatron_pp.tools.cli.options.megatron_input import settings_of
from megatron_pp.tools.cli.options.memory_table import add_outside_options, outside_of
from megatron_pp.tools.cli.options.parser import given, option, refuse
from megatron_pp.tools.cli.options.plan_options import count, counts, device_rules, rules_of, schedule_names, whole
from megatron_pp.tracing.analysis import Findings

_TIMES = ("forward_ms", "backward_ms", "weight_ms")
_SOURCES = ("forward_ms", "costs", "gpu", "gpu_tflops", "from_trace")
_LAYERS = ("rank", "layer")
_ENDS = {"embedding_ms": EMBEDDING, "mtp_ms": MTP, "loss_ms": LOSS}
_SIZES = ("hidden_size", "seq_length", "num_layers")
_MOE = ("experts", "top_k", "expert_hidden_size", "shared_expert_hidden_size", "moe_layer_freq", "expert_parallel")
_OF_SHAPE = (
    *("hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size"),
    *("tensor_parallel", "context_parallel", "sequence_parallel", "recompute"),
)
_ENCODER = ("encoder_layers", "encoder_hidden_size", "encoder_seq_length")
_OF_TRANSFORMER = (*_MOE, *_ENCODER, "gated", "query_groups")
_OF_GPU = ("gpu_bandwidth", "gpu_efficiency", "gpu_link", "gpu_network", "gpus_per_node")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_pipeline_options(parser)
    cost_options.add_cost_options(parser)
    _add_layer_options(parser)
    cost_options.add_model_options(parser, several=True)
    _add_transformer_options(parser)
    add_from_trace_option(parser, "take compute times and transfers from this trace")
    arguments = (
        "sizes from Megatron's arguments as one text, or from a file that check reads; other options override them"
    )
    parser.add_argument("--megatron-args", metavar="ARGS", help=arguments)


def _add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline")
    group.add_argument("-P", "--pipeline-size", type=count, metavar="P", help="ranks of the pipeline")
    group.add_argument("--global-batch", type=count, metavar="N", help="sequences of a step, over all replicas")
    group.add_argument("--memory-gb", type=number, metavar="GB", help="memory of a device; default the GPU's")
    add_outside_options(group)
    most = f"the largest V to try; default {Question.max_chunks}"
    group.add_argument("--max-chunks", type=count, metavar="V", help=most)
    group.add_argument("--schedules", metavar="A,B", help="try only these schedules; default all")
    tried = "numbers of slices to try, with commas; default 1, whole sequences"
    group.add_argument("--sequence-slices", dest="slices", type=counts, metavar="N", help=tried)
    group.add_argument(
        "--policy", choices=POLICIES, help="policy of all plans; default overlap, and also batched for the best plan"
    )
    device = "device rules under which every plan is verified, with commas; default those of a run on NCCL"
    group.add_argument("--device", action="extend", type=device_rules, metavar="RULE", help=device)
    group.add_argument("--no-recompute", action="store_true", help="no layer may be recomputed")
    group.add_argument("--no-split-backward", action="store_true", help="the model cannot split its backwards")


def _add_layer_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layers", "times and memory of layers, for one microbatch")
    per = "whether a single number of times, --activation-gb and --static-gb is for a rank or for a layer; a list "
    per += "has a number for each layer or, with rank, for each of equal stages in model order; default rank"
    group.add_argument("--costs-per", choices=_LAYERS, help=per)
    group.add_argument(
        "--activation-gb", type=times, metavar="GB", help="memory that a forward keeps until its backward"
    )
    static = "memory of parameters, gradients and optimizer states; default 0, or the model's"
    group.add_argument("--static-gb", type=times, metavar="GB", help=static)
    group.add_argument("--embedding-ms", type=times, metavar="F,B,W", help="times of the embedding, on the first stage")
    group.add_argument("--mtp-ms", type=times, metavar="F,B,W", help="times of each layer for multi-token prediction")
    group.add_argument("--loss-ms", type=times, metavar="F,B,W", help="times of the output layer and the loss")
    group.add_argument("--mtp-layers", type=whole, metavar="N", help="layers for multi-token prediction")
    spread = "layers for multi-token prediction and their losses (--loss-ms is the time of one) may be on different "
    spread += "stages: NVIDIA/Megatron-LM#5318, #5329"
    group.add_argument("--spread-mtp", action="store_true", help=spread)
    unequal = "relative costs of the microbatches of a step; the answer has the best order to run them"
    group.add_argument("--microbatch-costs", type=times, metavar="A,B,C", help=unequal)
    costs = "JSON file with all these costs: `layers`, in ms and GB, or a file that --measure has written"
    group.add_argument("--costs", metavar="FILE", help=costs)


def _add_transformer_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPU", "estimated times from sizes and data sheets, if nothing was measured")
    of_links = "per direction; default that of the data sheet, or infinite with --gpu-tflops"
    group.add_argument("--gpu", metavar="NAME", help=f"{', '.join(GPUS)}")
    group.add_argument("--gpu-tflops", type=number, metavar="N", help="dense 16-bit peak of another GPU")
    group.add_argument("--gpu-bandwidth", type=number, metavar="TB/S", help="bandwidth of its memory; default 2")
    group.add_argument("--gpu-link", type=number, metavar="GB/S", help=f"bandwidth to GPUs of its node, {of_links}")
    group.add_argument(
        "--gpu-network", type=number, metavar="GB/S", help=f"bandwidth to GPUs of other nodes, {of_links}"
    )
    near = "number of GPUs that have these links to each other; default 8, or 72 for GB200 and GB300"
    group.add_argument("--gpus-per-node", type=count, metavar="N", help=near)
    reached = f"share of the peak that matrix products reach; default {EFFICIENCY:g}, less on AMD GPUs"
    group.add_argument("--gpu-efficiency", type=number, metavar="SHARE", help=reached)
    group.add_argument("--gated", action="store_true", help="SwiGLU: the feed-forward part has three matrix products")
    group.add_argument("--query-groups", type=whole, metavar="N", help="heads of keys and values")
    group.add_argument("--experts", type=whole, metavar="N", help="number of experts in MoE layers")
    group.add_argument("--top-k", type=whole, metavar="K", help="experts of a token; default 2")
    group.add_argument(
        "--expert-hidden-size", type=whole, metavar="F", help="width of an expert; default that of the dense layers"
    )
    group.add_argument(
        "--shared-expert-hidden-size",
        type=whole,
        metavar="F",
        help="width of the shared expert; default no shared expert",
    )
    freq = "which layers have experts, as in Megatron: N, or ([0]*3+[1]*58); default 1, all"
    group.add_argument("--moe-layer-freq", metavar="FREQ", help=freq)
    group.add_argument("--expert-parallel", type=whole, metavar="N", help="ranks that share the experts; default 1")
    group.add_argument("--encoder-layers", type=whole, metavar="N", help="layers of an encoder on the first stage")
    group.add_argument(
        "--encoder-hidden-size", type=whole, metavar="H", help="width of the encoder, whose attention is not causal"
    )
    group.add_argument("--encoder-seq-length", type=whole, metavar="S", help="tokens of the encoder for one sequence")


def question_of(args: argparse.Namespace) -> Question:
    """The question of the options. Raises UsageError if options contradict each other or one is missing, PlanError for
    impossible values."""
    megatron = settings_of(args.megatron_args) if args.megatron_args is not None else {}
    _check_sources(args, megatron)
    traced = traced_findings(args)
    file = None if args.costs is None else read_costs(args.costs)
    measured = file.micro_batch if file else None
    sizes = args.micro_batch_size or [measured or whole_argument(megatron, "micro_batch_size", 1)]
    if not all(sizes):
        raise UsageError(f"{option(args, 'micro_batch_size')} has a 0; a microbatch needs at least 1 sequence")
    found = traced.measured.plan.spec.pipeline_size if traced else file.ranks if file else None
    ranks = args.pipeline_size or found or whole_argument(megatron, "pipeline_model_parallel_size", 0)
    batch = args.global_batch or whole_argument(megatron, "global_batch_size", 0)
    for name, value in (("pipeline_size", ranks), ("global_batch", batch)):
        if not value:
            raise UsageError(f"{option(args, name)} is missing, or 0")
    gpu = _gpu(args)
    memory = gpu.memory if args.memory_gb is None and gpu is not None else args.memory_gb
    if memory is None:
        raise UsageError("--memory-gb, the memory of a device, is missing")
    of_sizes = _Models(args, megatron, ranks, gpu, traced, file)
    models = tuple((size, of_sizes.of(size, measured or sizes[0])) for size in dict.fromkeys(sizes))
    cost_options.check_links(args, models[0][1].message, ranks)
    if ":" in (args.schedules or ""):
        raise UsageError(f"--schedules is {args.schedules}; advise does not search schedules of your own modules")
    question = Question(
        pipeline_size=ranks,
        global_batch=batch,
        memory=memory,
        models=models,
        latency=args.p2p_ms or 0.0,
        bandwidth=_bandwidth(args, gpu),
        links=tuple((pair, _in_gb(link)) for pair, link in args.link),
        host_bandwidth=_host_bandwidth(args),
        slices=tuple(args.slices or Question.slices),
        recompute=not args.no_recompute,
        schedules=() if args.schedules is None else tuple(schedule_names(args.schedules)),
        policies=(args.policy,) if args.policy else Question.policies,
        device=rules_of(args, is_on_gloo(traced)),
        splits_backward=not args.no_split_backward,
        microbatch_costs=_relative(args.microbatch_costs or ()),
        seq_length=args.seq_length or (file and file.seq_length) or whole_argument(megatron, "seq_length", 0) or None,
        peak_flops=gpu.flops if gpu is not None else None,
        outside=outside_of(args, args.gloo or is_on_gloo(traced)),
        **given(args, ("data_parallel", "max_chunks", "gloo", "keep_outputs")),
    )
    if traced is not None:
        return _on_traced_links(question, traced)
    return question if file is None else file.on_its_links(question)


def _check_sources(args: argparse.Namespace, megatron: dict[str, Any]) -> None:
    """Raises UsageError if the costs are missing, come from several sources, or an option does not fit their source."""
    found = [option(args, name) for name in given(args, _SOURCES)]
    if not found:
        raise UsageError(
            "the costs of the model are missing; give --forward-ms and --backward-ms, --costs FILE, --from-trace "
            "FOLDER, or --gpu NAME with the model's sizes"
        )
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)} each give the costs of the model; give only one of them")
    sizes = [option(args, name) for name in _SIZES if not getattr(args, name) and name not in megatron]
    if given(args, ("gpu", "gpu_tflops")):
        if args.gpu is not None:
            gpu_named(args.gpu)
        if sizes:
            raise UsageError(f"{found[0]} needs the sizes of the model: {' and '.join(sizes)} are missing")
        own = (*_TIMES, *_ENDS, "costs_per", "activation_gb", "static_gb", "attention_share")
        refuse(args, own, f"does not go with {found[0]}")
    else:
        why = "needs --gpu, which estimates times from sizes"
        refuse(args, (*_OF_TRANSFORMER, *_OF_SHAPE, *_OF_GPU), why)
    refuse(args, ["output_ms"], "is not an option of advise; --loss-ms is the time of the output layer with the loss")
    if max(args.slices or (1,)) == 1:
        refuse(args, ["attention_share"], "needs --sequence-slices above 1: it weighs the slices of a sequence")
    if args.costs is not None:
        in_file = (*_TIMES, *_ENDS, "mtp_layers", "spread_mtp", "costs_per", "activation_gb", "attention_share")
        refuse(args, in_file, "does not go with --costs: the file has its value")
    if args.from_trace is not None:
        refuse(args, (*_ENDS, "mtp_layers", "costs_per"), "does not go with --from-trace")
    if args.forward_ms is not None and args.backward_ms is None:
        raise UsageError("--forward-ms and --backward-ms go together")
    if not args.mtp_layers and "mtp_num_layers" not in megatron:
        refuse(args, ["mtp_ms", "spread_mtp"], "needs --mtp-layers")


def _gpu(args: argparse.Namespace) -> Gpu | None:
    if args.gpu is not None:
        refuse(args, ["gpu_bandwidth"], "goes with --gpu-tflops; the bandwidth of --gpu is known")
        found = gpu_named(args.gpu)
    elif args.gpu_tflops is None:
        return None
    else:
        if not args.gpu_tflops or args.memory_gb is None:
            raise UsageError("--gpu-tflops must be above 0, and goes with --memory-gb")
        if args.gpu_bandwidth == 0:
            raise UsageError("--gpu-bandwidth must be above 0")
        bandwidth = 1e12 * (args.gpu_bandwidth or 2.0)
        found = Gpu(1e12 * args.gpu_tflops, args.memory_gb, bandwidth, math.inf, network=math.inf)
    rates = {"link": args.gpu_link, "network": args.gpu_network}
    for name, rate in rates.items():
        if rate == 0:
            raise UsageError(f"{option(args, f'gpu_{name}')} must be above 0")
    given_rates = {name: rate * GB for name, rate in rates.items() if rate is not None}
    return found._replace(domain=args.gpus_per_node or found.domain, **given_rates)


def _bandwidth(args: argparse.Namespace, gpu: Gpu | None) -> float:
    """The bandwidth of a link between stages, in GB per millisecond. If no option is about links, the GPU's share of
    the network."""
    if args.bandwidth is not None:
        return float(args.bandwidth) / 1e3
    silent = args.p2p_ms is None and not args.link and not args.gloo
    return math.inf if gpu is None or not silent else gpu.network / GB / 1e3


def _host_bandwidth(args: argparse.Namespace) -> float | None:
    """The bandwidth of a copy to host memory in GB per millisecond. The options give it, or the time to copy a rank's
    activations."""
    if args.offload_bandwidth is not None:
        refuse(args, ["offload_ms"], "and --offload-bandwidth both give the time of a copy; give only one of them")
        if not args.offload_bandwidth:
            raise UsageError("--offload-bandwidth must be above 0")
        return float(args.offload_bandwidth) / 1e3
    if args.offload_ms is None:
        return None
    copies = list(args.offload_ms)
    kept = list(args.activation_gb or ())
    if len(copies) != 1 or len(kept) != 1 or not copies[0] or not kept[0]:
        raise UsageError(
            "--offload-ms must be one number above 0, the time to copy one --activation-gb; or give --offload-bandwidth"
        )
    return float(kept[0] / copies[0])


def _relative(costs: Sequence[float]) -> tuple[float, ...]:
    """The costs with a mean of 1, because the times are those of a microbatch of mean cost."""
    if costs and not min(costs):
        raise UsageError("--microbatch-costs has a 0; all costs must be above 0")
    return tuple(cost * len(costs) / sum(costs) for cost in costs)


def _in_gb(link: Link) -> Link:
    return Link(link.latency, link.bandwidth / GB)


def _on_traced_links(question: Question, traced: Findings) -> Question:
    network = traced.network
    links = tuple((pair, _in_gb(link)) for pair, link in network.links.items() if max(pair) < question.pipeline_size)
    link = _in_gb(network.link)
    return replace(question, latency=link.latency, bandwidth=link.bandwidth, links=links, gloo=network.gloo)


@dataclass(frozen=True)
class _Models:
    """The model's costs for microbatches of any size, from the options."""

    args: argparse.Namespace
    megatron: dict[str, Any]
    ranks: int
    gpu: Gpu | None
    traced: Findings | None
    file: FileCosts | None

    def of(self, size: int, first: int) -> Model:
        """The model with ``size`` sequences in a microbatch; the given costs are for ``first`` sequences. Raises
        UsageError and PlanError."""
        if self.gpu is not None:
            model = self._transformer(size).model(self.gpu, self.args.gpu_efficiency)
        else:
            model = self._measured(first)
            model = model.times(size / first) if size != first else model
        message = self.args.activation_mb
        return model if message is None else replace(model, message=message / 1e3 * size / first)

    def _measured(self, size: int) -> Model:
        """The model with the given times, and with the size of messages if the sizes of the model are given."""
        if self.traced is not None:
            return self._traced(self.traced)
        static = self.args.static_gb
        if self.file is not None:
            return self.file.model if static is None else self.file.with_static(static, self.ranks)
        known = all(name in self.megatron for name in _SIZES)
        message = self._transformer(size).shape.message_bytes / GB if known else 0.0
        return Model(self._layers(), message, self.args.attention_share or 0.0)

    def _transformer(self, size: int) -> Transformer:
        args = self.args
        megatron = {**self.megatron, **_as_megatron(args)}
        found = transformer_of({**megatron, "micro_batch_size": size}, args.data_parallel or 1)
        own = given(args, ["recompute"])
        if not self.megatron:
            own |= {"element_bytes": ModelShape.element_bytes, **given(args, ["data_parallel"])}
        shape = replace(found.shape, **own)
        return replace(found, shape=shape, spread_mtp=args.spread_mtp, encoder=self._encoder(shape))

    def _encoder(self, shape: ModelShape) -> Transformer | None:
        """The encoder, split over the same parallel groups as the language model; None if there is none."""
        sizes = [getattr(self.args, name) for name in _ENCODER]
        if not any(sizes):
            return None
        if not all(sizes):
            raise UsageError(f"{', '.join(option(self.args, name) for name in _ENCODER)} go together, all above 0")
        layers, hidden, tokens = sizes
        shape = replace(shape, num_layers=layers, hidden_size=hidden, seq_length=tokens, vocab_size=0)
        return Transformer(replace(shape, num_attention_heads=0, ffn_hidden_size=None), causal=False)

    def _traced(self, traced: Findings) -> Model:
        """The model with the times of the trace. Traces have no memory, so the memory of the options is shared
        equally."""
        costs = traced.costs
        ranks = self.ranks
        each = zip(costs.forward, costs.backward_input, costs.weight, strict=True)
        kept, static = (_one(self.args, name) * ranks / costs.num_stages for name in ("activation_gb", "static_gb"))
        layers = tuple(layer(PART, f, i, w, kept, static) for f, i, w in each)
        return Model(layers, traced.network.activation_bytes / GB)

    def _layers(self) -> tuple[Layer, ...]:
        """The layers with the times of the options."""
        args = self.args
        lists = {name: getattr(args, name) for name in (*_TIMES, "activation_gb", "static_gb")}
        lists = {name: values for name, values in lists.items() if values is not None}
        lengths = {option(args, name): len(values) for name, values in lists.items() if len(values) > 1}
        if len(set(lengths.values())) > 1:
            raise UsageError(
                f"lists must have the same length; {', '.join(f'{n} has {k}' for n, k in lengths.items())}"
            )
        per_layer = args.costs_per == "layer"
        known = args.num_layers or whole_argument(self.megatron, "num_layers", 0)
        if args.num_layers == 0:
            raise UsageError(f"{option(args, 'num_layers')} is 0; a model needs at least 1 layer")
        count = max(lengths.values(), default=known if per_layer else self.ranks)
        if per_layer and not count:
            raise UsageError("--costs-per layer needs --layers, or lists with a number for each layer")
        if per_layer and known and known != count:
            raise UsageError(f"the lists have {count} layers, but {option(args, 'num_layers')} is {known}")
        # A single number is for a rank: if lists have more or fewer stages, they have equal shares of it.
        scale = 1.0 if per_layer else self.ranks / count
        rows = [{name: v[k] if len(v) > 1 else v[0] * scale for name, v in lists.items()} for k in range(count)]
        parts = [layer_of(DECODER if per_layer else PART, row) for row in rows]
        if not per_layer and known:
            if lengths:
                raise UsageError(
                    "the lists have costs of stages, so their layers cannot be moved; for costs of layers give "
                    "--costs-per layer"
                )
            parts = [parts[0].scaled(self.ranks / known, parts[0].static * self.ranks / known)] * known
            parts = [replace(one, kind=DECODER) for one in parts]
        return self._with_ends(parts)

    def _with_ends(self, parts: Sequence[Layer]) -> tuple[Layer, ...]:
        args = self.args
        ends = {kind: _end(args, name, kind) for name, kind in _ENDS.items()}
        if all(one.kind == PART for one in parts):
            why = "is the cost of one layer, so the number of layers must be known: --layers N or --costs-per layer"
            refuse(args, (*_ENDS, "mtp_layers"), why)
            return tuple(parts)
        embedding, loss = (ends[kind] or Layer(kind, 0.0, 0.0, 0.0) for kind in (EMBEDDING, LOSS))
        mtp = ends[MTP] or replace(parts[-1], kind=MTP, recomputed=None)
        count = args.mtp_layers or whole_argument(self.megatron, "mtp_num_layers", 0)
        return (embedding, *parts, *[mtp] * count, *[loss] * (1 + count if args.spread_mtp else 1))


def _end(args: argparse.Namespace, name: str, kind: str) -> Layer | None:
    values = getattr(args, name)
    if values is None:
        return None
    if len(values) != 3:
        raise UsageError(f"{option(args, name)} has {len(values)} numbers; it needs three, F,B,W")
    return Layer(kind, *values)


def _one(args: argparse.Namespace, name: str) -> float:
    """The single number of an option; 0 if it was not given."""
    values = getattr(args, name) or (0.0,)
    if len(values) > 1:
        raise UsageError(f"{option(args, name)} has {len(values)} numbers; with --from-trace it needs one, for a rank")
    return float(values[0])


def _as_megatron(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes of the options, by Megatron's names."""
    names = {
        "tensor_parallel": "tensor_model_parallel_size",
        "context_parallel": "context_parallel_size",
        "experts": "num_experts",
        "top_k": "moe_router_topk",
        "expert_hidden_size": "moe_ffn_hidden_size",
        "shared_expert_hidden_size": "moe_shared_expert_intermediate_size",
        "expert_parallel": "expert_model_parallel_size",
        "gated": "swiglu",
        "query_groups": "num_query_groups",
        "mtp_layers": "mtp_num_layers",
    }
    same = ("num_layers", "hidden_size", "seq_length", "num_attention_heads", "ffn_hidden_size", "vocab_size")
    names |= {name: name for name in (*same, "sequence_parallel", "moe_layer_freq")}
    return {names[name]: value for name, value in given(args, names).items()}
