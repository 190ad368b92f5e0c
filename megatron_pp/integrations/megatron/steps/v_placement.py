"""V placement of Megatron-core's GPTModel and HybridModel: chunk 1 of rank r holds stage 2P - 1 - r, which a loop would
place on rank P - 1 - r. Megatron computes many things of a chunk from the rank's place in the pipeline: its layers,
their numbers and checkpoint keys, embeddings, output layer, and which data to read. All of them are right for chunk 1
if Megatron gets the mirrored rank, P - 1 - r.

`build` makes such a model. `ask_by_chunk` replaces the functions of Megatron that take a `vp_stage`.
"""

import copy
import importlib
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch

from megatron_pp.config.hybrid_pattern import HybridPattern
from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.megatron.named_objects import replace_names
from megatron_pp.integrations.megatron.steps.gpt_models import PlacedModel, Replacement, Use
from megatron_pp.plan.ir.placement import V_SHAPE, Placement

CHUNKS = 2  # model chunks on each rank, in every V schedule

# Functions and methods in megatron.core that depend on the rank's place in the pipeline and take the chunk as
# `vp_stage`.
_BY_CHUNK = (
    ("parallel_state", "is_pipeline_first_stage"),
    ("parallel_state", "is_pipeline_last_stage"),
    ("transformer.transformer_layer", "get_transformer_layer_offset"),
    ("transformer.transformer_block", "get_num_layers_to_build"),
    ("transformer.multi_token_prediction", "mtp_on_this_rank"),
    ("transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout.get_num_layers_to_build"),
    ("transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout.get_layer_offset"),
)


class MirroredGroup:
    """A pipeline's process group with its ranks in reverse order. It has no communicator of its own.

    Only `rank()` differs. The object equals the group, also as a key of torch.distributed's tables, so collectives over
    it run over the group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def rank(self) -> int:
        return self.group.size() - 1 - self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "group"), name)

    def __eq__(self, other: object) -> bool:
        return self.group == real_group(other)

    def __hash__(self) -> int:
        return hash(self.group)


def real_group(group: Any) -> Any:
    """The group itself, or the group that ``group`` mirrors."""
    return group.group if isinstance(group, MirroredGroup) else group


class ChunkPlace:
    """A context in which Megatron's `parallel_state` answers for ``chunk`` of a V: for an odd chunk the pipeline rank
    is mirrored, and there is no embedding group, because the first and the last stage are on one rank. Without a
    pipeline in `parallel_state` nothing changes.
    """

    def __init__(self, parallel_state: ModuleType, chunk: int) -> None:
        self._names = vars(parallel_state)
        self._seen: dict[str, Any] = {}
        self._before: list[dict[str, Any]] = []
        group = real_group(self._names["_PIPELINE_MODEL_PARALLEL_GROUP"])
        if group is None:
            return
        ranks = torch.distributed.get_process_group_ranks(group)
        place = mirrored(group, chunk)
        self._seen = {
            "_MPU_PIPELINE_MODEL_PARALLEL_RANK": place.rank(),
            "_PIPELINE_MODEL_PARALLEL_GROUP": place,
            "_PIPELINE_GLOBAL_RANKS": ranks[::-1] if chunk % 2 else ranks,
            "_EMBEDDING_GROUP": None,
            "_EMBEDDING_GLOBAL_RANKS": None,
        }

    def __enter__(self) -> None:
        self._before.append({name: self._names[name] for name in self._seen})
        self._names.update(self._seen)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._names.update(self._before.pop())


def mirrored(group: Any, chunk: int) -> Any:
    """The pipeline group for ``chunk`` of a V: mirrored if the chunk is odd."""
    return MirroredGroup(real_group(group)) if chunk % 2 else real_group(group)


def chunk_place(chunk: int) -> ChunkPlace:
    """A context for your own code that asks Megatron about ``chunk`` of a V, such as a model other than GPTModel."""
    return ChunkPlace(importlib.import_module("megatron.core.parallel_state"), chunk)


def is_mirrored(chunk_groups: Any) -> bool:
    """Whether a model chunk with this `pg_collection` was built for the second half of a V."""
    return isinstance(getattr(chunk_groups, "pp", None), MirroredGroup)


class ByChunk(Replacement):
    """Replaces a function or method with a parameter `vp_stage`. For models in a V it runs in that chunk's place."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.given(args, kwargs)
        chunk = given.get("vp_stage")
        whole_rank = given.get("ignore_virtual", "ignore_virtual" in self.parameters)
        if self.use.kind != V_SHAPE or self.use.ended or chunk is None or whole_rank:
            return super().__call__(*args, **kwargs)
        with chunk_place(chunk):
            return super().__call__(*args, **kwargs)


class SegmentInV(Replacement):
    """Replaces HybridModel's `select_pipeline_segment`, which cuts its pattern of layers at each "|". That function
    asks torch.distributed for the rank in the group, which is never mirrored. So for a chunk in the second half of a V
    it gets the number of the stage, and a pipeline of one rank.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.given(args, kwargs)
        group = given.get("pp_group")
        chunk = given.get("vp_stage")
        stages = len(HybridPattern.read(given["main_pattern"]).stages)
        if self.use.ended or chunk is None or not isinstance(group, MirroredGroup) or stages != CHUNKS * group.size():
            return super().__call__(*args, **kwargs)  # raises for another number of stages
        return self.original(**given | {"pp_group": None, "vp_stage": chunk * group.size() + group.rank()})


def build(placed: PlacedModel, given: dict[str, Any]) -> None:
    """Build a chunk of a V from ``given``, the arguments of the model's `__init__` by name. `pre_process`,
    `post_process` and the pipeline group of `pg_collection` become those of the chunk's stage. Both copies of a weight
    that the first and the last stage share start equal. Raises ScheduleInputError.
    """
    use = placed.use
    model = given["self"]
    chunk: Any = given.get("vp_stage")
    _check(placed, given["config"], chunk)
    use.agree(V_SHAPE)
    ask_by_chunk(use)
    with chunk_place(chunk):
        groups = copy.copy(given.get("pg_collection"))
        if groups is None:
            collections: Any = importlib.import_module("megatron.core.process_groups_config")
            groups = collections.ProcessGroupCollection.use_mpu_process_groups()
        group = real_group(groups.pp)
        groups.pp, groups.embd = mirrored(group, chunk), None
        placement = Placement(V_SHAPE, group.size(), CHUNKS)
        first, last = (is_at(group.rank(), chunk) for is_at in (placement.is_first_stage, placement.is_last_stage))
        placed.original(**given | {"pre_process": first, "post_process": last, "pg_collection": groups})
    use.in_v[model] = None
    if first:
        use.first_stage = weakref.ref(model)
    if last:
        _share_weight(model, use)


def refuse_without_install(model: torch.nn.Module) -> None:
    """Make a forward of ``model``, a chunk of a V, raise while the engine is not installed."""
    model.register_forward_pre_hook(_check_installed)


def _check_installed(model: torch.nn.Module, given: Any) -> None:
    if not _are_placed(type(model)):
        raise ScheduleInputError(
            f"this {type(model).__name__} was built for stages in a v under install(), which uninstall() has ended: "
            "Megatron-core's own schedules take stages in a loop, and would wait for each other or compute wrong "
            "numbers. Call install() again, or build the model anew"
        )


def _check(placed: PlacedModel, config: Any, chunk: Any) -> None:
    what = f"pipeline_schedule {placed.use.schedule_of(config)!r} places stages in a v, which "
    if "pg_collection" not in placed.parameters:
        raise ScheduleInputError(what + "needs a model that takes pg_collection: a newer megatron-core")
    virtual = config.virtual_pipeline_model_parallel_size
    if chunk is None or virtual != CHUNKS:
        raise ScheduleInputError(
            f"{what}takes {CHUNKS} model chunks a rank: set virtual_pipeline_model_parallel_size={CHUNKS} (it is "
            f"{virtual}) and give vp_stage to the model (it is {chunk})"
        )
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        return
    # Megatron stores the layers of a stage by rank and chunk.
    stages = [row[chunk] for chunk in range(len(layout.layout[0])) for row in layout.layout]
    if any(kind.name == "mtp" for stage in stages[:-1] for kind in stage):
        raise ScheduleInputError(
            what + "takes multi-token prediction on the last stage only; put 'm' into the last stage of "
            "pipeline_model_parallel_layout"
        )


def _share_weight(model: Any, use: Use) -> None:
    weight = shared_weight(model)
    if weight is None:
        return
    first = None if use.first_stage is None else use.first_stage()
    if first is None or weight.is_meta:
        raise ScheduleInputError(
            "in a v the last stage copies the embedding of the first stage, which is on the same rank: build chunk "
            "0 before chunk 1, and without init_model_with_meta_device"
        )
    weight.data.copy_(shared_weight(first).data)


def shared_weight(model: Any) -> Any:
    """The parameter of which the first and the last stage both hold a copy; None if there is none."""
    shares = model.share_embeddings_and_output_weights or getattr(model.config, "mtp_num_layers", None)
    return model.shared_embedding_or_output_weight() if shares else None


_SEGMENTS = ("models.hybrid.hybrid_layer_allocation", "select_pipeline_segment", SegmentInV)


def ask_by_chunk(use: Use) -> None:
    """Replace Megatron's functions that take a chunk's number, under all their names, as far as they are imported."""
    _replace_functions(lambda now, kind: now if isinstance(now, Replacement) else kind(now, use))


def ask_as_before() -> None:
    """Undo `ask_by_chunk`."""
    _replace_functions(lambda now, kind: now.original if isinstance(now, Replacement) else now)


def _replace_functions(replacement: Callable[[Any, type[Replacement]], Any]) -> None:
    """Replace each function that the installed release has by ``replacement`` of the function and its kind."""
    functions = []
    for module, path, replaced_by in (*((*row, ByChunk) for row in _BY_CHUNK), _SEGMENTS):
        owner: Any = sys.modules.get(f"megatron.core.{module}")
        *kind, name = path.split(".")
        for part in kind:
            owner = getattr(owner, part, None)
        if not hasattr(owner, name):
            continue
        now = vars(owner)[name]
        new = replacement(now, replaced_by)
        if isinstance(owner, type):
            setattr(owner, name, new)
        elif new is not now:
            functions.append((now, new))
    if functions:
        replace_names(functions)


def _are_placed(model: type) -> bool:
    """Whether models of this class are built for their schedule now."""
    return any(isinstance(vars(kind).get("__init__"), PlacedModel) for kind in model.__mro__)
