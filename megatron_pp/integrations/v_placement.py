"""V placement of Megatron-core's GPTModel: chunk 1 of rank r holds stage 2P - 1 - r, as a loop would place it on rank
P - 1 - r. So whatever Megatron computes for chunk 1 from this rank's place in the pipeline (layers, their numbers and
checkpoint keys, embeddings, output layer, which data to read) comes out right when it is given the mirrored rank.

`install_v` replaces `GPTModel.__init__` and the functions of Megatron that take a `vp_stage`. Nothing changes for
models whose schedule places stages in a loop.
"""

import copy
import functools
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType, ModuleType, TracebackType
from typing import Any

import torch

from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.plan.orders import placement_kind

CHUNKS = 2  # of a rank, in every V schedule

# Functions and methods that depend on the rank's place in the pipeline and take the chunk as `vp_stage`.
_BY_CHUNK = (
    ("megatron.core.parallel_state", "is_pipeline_first_stage"),
    ("megatron.core.parallel_state", "is_pipeline_last_stage"),
    ("megatron.core.transformer.transformer_layer", "get_transformer_layer_offset"),
    ("megatron.core.transformer.transformer_block", "get_num_layers_to_build"),
    ("megatron.core.transformer.multi_token_prediction", "mtp_on_this_rank"),
    (
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        "PipelineParallelLayerLayout.get_num_layers_to_build",
    ),
    ("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout.get_layer_offset"),
)
_MODEL = ("megatron.core.models.gpt.gpt_model", "GPTModel.__init__")


class MirroredGroup:
    """The process group of a pipeline with its ranks in reverse order: no communicator of its own.

    Only `rank()` differs. It equals the group, also as a key of torch.distributed's tables, so that collectives over it
    run over the group.
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
    """The group itself, of one that may be mirrored."""
    return group.group if isinstance(group, MirroredGroup) else group


class ChunkPlace:
    """While it is entered, Megatron's `parallel_state` answers as seen from ``chunk`` of a V: the pipeline rank is
    mirrored for an odd chunk, and there is no embedding group, as the first and the last stage share a rank. Without
    a pipeline in `parallel_state` nothing changes.
    """

    def __init__(self, parallel_state: ModuleType, chunk: int) -> None:
        self._names = vars(parallel_state)
        self._seen: dict[str, Any] = {}
        self._before: list[dict[str, Any]] = []
        group = real_group(self._names["_PIPELINE_MODEL_PARALLEL_GROUP"])
        if group is None:
            return
        ranks, place = torch.distributed.get_process_group_ranks(group), mirrored(group, chunk)
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
    """The pipeline group as ``chunk`` of a V sees it."""
    return MirroredGroup(real_group(group)) if chunk % 2 else real_group(group)


def chunk_place(chunk: int) -> ChunkPlace:
    """For code of your own that asks Megatron about chunk ``chunk`` of a V, such as a model that is not a GPTModel."""
    return ChunkPlace(importlib.import_module("megatron.core.parallel_state"), chunk)


def is_mirrored(chunk_groups: Any) -> bool:
    """Whether a model chunk with this `pg_collection` has been built for the way back of a V."""
    return isinstance(getattr(chunk_groups, "pp", None), MirroredGroup)


@dataclass
class Use:
    """What the models of this process are built for.

    schedule     given to `install_v`; None: what the model's config names
    kind         where the models with virtual stages place them; None before the first
    first_stage  the latest model that holds the first stage
    """

    schedule: str | None = None
    kind: str | None = None
    first_stage: Callable[[], Any] | None = None

    def placement_of(self, config: Any) -> str:
        """Where a model with this config places its stages."""
        if config.pipeline_model_parallel_size == 1:
            return LOOP
        return placement_kind(self.schedule_of(config))

    def schedule_of(self, config: Any) -> str | None:
        return self.schedule or getattr(config, "pipeline_schedule", None)


class ByChunk:
    """Replaces a function or method with a parameter `vp_stage`: where models are built in a V, it runs as seen from
    that chunk.
    """

    def __init__(self, original: Callable[..., Any], use: Use) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.use = use
        self.parameters = inspect.signature(original).parameters

    def __reduce__(self) -> str:
        return self.original.__qualname__  # pickled by name, as a function is

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        chunk, whole_rank = given.get("vp_stage"), given.get("ignore_virtual", "ignore_virtual" in self.parameters)
        if self.use.kind != V_SHAPE or chunk is None or whole_rank:
            return self.original(*args, **kwargs)
        with chunk_place(chunk):
            return self.original(*args, **kwargs)


class PlacedModel(ByChunk):
    """Replaces `GPTModel.__init__`. In a V, `pre_process`, `post_process` and the pipeline group of `pg_collection`
    become those of the stage that the chunk holds, and a weight that the first and the last stage share starts equal.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        config: Any = given["config"]
        chunk: Any = given.get("vp_stage")
        kind = self.use.placement_of(config)
        if kind == V_SHAPE:
            self._check(config, chunk)
        if chunk is not None:
            self._agree(kind)
        if kind == V_SHAPE:
            self._build(given["self"], chunk, given)
        else:
            self.original(*args, **kwargs)

    def _build(self, model: Any, chunk: int, given: dict[str, Any]) -> None:
        with chunk_place(chunk):
            groups = copy.copy(given.get("pg_collection") or _default_groups())
            group = real_group(groups.pp)
            groups.pp, groups.embd = mirrored(group, chunk), None
            placement = Placement(V_SHAPE, group.size(), CHUNKS)
            first, last = (is_at(group.rank(), chunk) for is_at in (placement.is_first_stage, placement.is_last_stage))
            self.original(**given | {"pre_process": first, "post_process": last, "pg_collection": groups})
        if first:
            self.use.first_stage = weakref.ref(model)
        if last:
            self._share_weight(model)

    def _check(self, config: Any, chunk: Any) -> None:
        what = f"pipeline_schedule {self.use.schedule_of(config)!r} places stages in a v, which "
        if "pg_collection" not in self.parameters:
            raise ScheduleInputError(what + "needs a GPTModel that takes pg_collection: a newer megatron-core")
        virtual = config.virtual_pipeline_model_parallel_size
        if chunk is None or virtual != CHUNKS:
            raise ScheduleInputError(
                f"{what}takes {CHUNKS} model chunks a rank: set virtual_pipeline_model_parallel_size={CHUNKS} (it is "
                f"{virtual}) and give vp_stage to GPTModel (it is {chunk})"
            )
        layout = getattr(config, "pipeline_model_parallel_layout", None)
        if layout is not None and any(kind.name == "mtp" for stage in _stages(layout)[:-1] for kind in stage):
            raise ScheduleInputError(
                what + "takes multi-token prediction on the last stage only; put 'm' into the last stage of "
                "pipeline_model_parallel_layout"
            )

    def _agree(self, kind: str) -> None:
        """One process builds for one placement: Megatron's functions of a chunk number do not say for which model."""
        if self.use.kind not in (None, kind):
            raise ScheduleInputError(
                f"a model with stages in a {kind} was built after one with stages in a {self.use.kind}; call "
                "uninstall() and install() between them"
            )
        self.use.kind = kind

    def _share_weight(self, model: Any) -> None:
        weight = shared_weight(model)
        if weight is None:
            return
        first = None if self.use.first_stage is None else self.use.first_stage()
        if first is None or weight.is_meta:
            raise ScheduleInputError(
                "in a v the last stage copies the embedding of the first stage, which is on the same rank: build chunk "
                "0 before chunk 1, and without init_model_with_meta_device"
            )
        weight.data.copy_(shared_weight(first).data)


def shared_weight(model: Any) -> Any:
    """The parameter of a first or last stage that both hold a copy of; None where they share none."""
    shares = model.share_embeddings_and_output_weights or getattr(model.config, "mtp_num_layers", None)
    return model.shared_embedding_or_output_weight() if shares else None


def _stages(layout: Any) -> list[Any]:
    """The layers of each stage, in model order; Megatron keeps them by rank and chunk."""
    return [row[chunk] for chunk in range(len(layout.layout[0])) for row in layout.layout]


def _default_groups() -> Any:
    return importlib.import_module(
        "megatron.core.process_groups_config"
    ).ProcessGroupCollection.use_mpu_process_groups()


def install_v(schedule: str | None = None) -> list[tuple[Any, Any]]:
    """Let GPTModels be built for V schedules: for ``schedule``, or else for that of their config. Returns what is left
    to the caller, (old, new) of functions to replace under all their names.

    Where GPTModel cannot be imported, nothing is done. A further call changes ``schedule``, and takes what has been
    imported since.
    """
    found = _targets()
    use = next((function.use for _, _, function in found if isinstance(function, ByChunk)), Use())
    use.schedule = schedule
    return _put(
        (owner, name, (PlacedModel if name == "__init__" else ByChunk)(function, use))
        for owner, name, function in found
        if not isinstance(function, ByChunk)
    )


def uninstall_v() -> list[tuple[Any, Any]]:
    """Restore what `install_v` replaced; returns what is left to the caller, as there."""
    return _put((owner, name, current.original) for owner, name, current in _targets() if isinstance(current, ByChunk))


def _put(replacements: Iterable[tuple[Any, str, Any]]) -> list[tuple[Any, Any]]:
    """Put each third item in place of what its class (the first) has under a name (the second). Returns the (old, new)
    of those whose first item is a module.
    """
    named = []
    for owner, name, new in replacements:
        if isinstance(owner, type):
            setattr(owner, name, new)
        else:
            named.append((vars(owner)[name], new))
    return named


def _targets() -> list[tuple[Any, str, Any]]:
    """(module or class, name, function) of all that is replaced, as far as the installed release has it."""
    try:
        importlib.import_module(_MODEL[0])
    except ImportError:
        return []
    found = []
    for module, path in (_MODEL, *_BY_CHUNK):
        owner = sys.modules.get(module)
        *kind, name = path.split(".")
        for part in kind:
            owner = getattr(owner, part, None)
        if hasattr(owner, name):
            found.append((owner, name, vars(owner)[name]))
    return found
