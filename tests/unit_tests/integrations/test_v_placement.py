"""Parts of V placement under Megatron-core, without Megatron (with it: functional_tests/test_megatron_v_placement)."""

from __future__ import annotations

import inspect
import io
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.megatron.steps import v_logs, v_placement, v_step
from megatron_pp.integrations.megatron.steps.v_placement import ByChunk, MirroredGroup, Use, mirrored, real_group


class Group:
    """A process group's rank, size, and one method more."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 4

    def name(self) -> str:
        return "pipeline"


def test_a_mirrored_group_equals_its_group_except_for_the_rank() -> None:
    group = Group()
    seen = mirrored(group, 1)
    assert isinstance(seen, MirroredGroup)
    assert (seen.rank(), seen.size(), seen.name()) == (2, 4, "pipeline")
    assert {group: "found"}[seen] == "found"
    assert seen == mirrored(seen, 1)
    assert seen != Group()
    assert mirrored(seen, 0) is real_group(seen) is group
    with pytest.raises(AttributeError):
        object.__new__(MirroredGroup).group  # noqa: B018 (as copying and pickling do)


def test_without_a_pipeline_a_place_changes_nothing() -> None:
    state = ModuleType("parallel_state")
    vars(state).update(_PIPELINE_MODEL_PARALLEL_GROUP=None, _EMBEDDING_GROUP="embeddings")
    before = dict(vars(state))
    with v_placement.ChunkPlace(state, 1):
        assert dict(vars(state)) == before


def is_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> Any:
    return ignore_virtual, vp_stage


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that were asked about."""
    chunks: list[int] = []

    class Place:
        def __init__(self, chunk: int) -> None:
            self.chunk = chunk

        def __enter__(self) -> None:
            chunks.append(self.chunk)

        def __exit__(self, *unused: object) -> None: ...

    monkeypatch.setattr(v_placement, "chunk_place", Place)
    return chunks


def test_a_wrapped_function_sees_the_stage_of_the_chunk_in_a_v(entered: list[int]) -> None:
    use = Use()
    asked = ByChunk(is_last_stage, use)
    assert inspect.signature(asked) == inspect.signature(is_last_stage)
    assert asked(ignore_virtual=False, vp_stage=1) == (False, 1)
    use.kind = "loop"
    assert asked(ignore_virtual=False, vp_stage=1) == (False, 1)
    assert entered == []
    use.kind = "v"
    assert asked(False, 1) == (False, 1)
    assert asked(vp_stage=0, ignore_virtual=False) == (False, 0)
    assert entered == [1, 0]
    asked(), asked(vp_stage=1), asked(False)  # the whole rank is meant
    assert entered == [1, 0]


def test_a_wrapped_method_sees_the_stage_of_the_chunk(entered: list[int]) -> None:
    class Layout:
        def offset(self, layer_type: str, vp_stage: int | None = None) -> Any:
            return self, layer_type, vp_stage

    Layout.offset = ByChunk(Layout.offset, Use(kind="v"))  # type: ignore[assignment, method-assign]
    layout = Layout()
    assert layout.offset("decoder", vp_stage=1) == (layout, "decoder", 1)
    assert entered == [1]


def test_the_schedule_of_install_goes_before_that_of_the_config() -> None:
    config = SimpleNamespace(pipeline_model_parallel_size=2, pipeline_schedule="1f1b")
    assert Use().placement_of(config) == "loop"
    assert Use("zb_v").placement_of(config) == "v"
    config.pipeline_model_parallel_size = 1
    assert Use("zb_v").placement_of(config) == "loop"


def chunks(groups: Any) -> list[Any]:
    """Two model chunks in wrappers; the second with these groups."""
    return [SimpleNamespace(module=SimpleNamespace(pg_collection=each)) for each in (None, groups)]


def test_chunks_must_have_been_built_for_the_placement() -> None:
    loop, v = chunks(SimpleNamespace(pp=Group())), chunks(SimpleNamespace(pp=MirroredGroup(Group())))
    v_step.check_chunks("1f1b", "loop", loop)
    v_step.check_chunks("zb_v", "v", v)
    v_step.check_chunks("1f1b", "loop", loop[:1])
    with pytest.raises(ScheduleInputError, match=r"'zb_v' .* was built for a loop; call install"):
        v_step.check_chunks("zb_v", "v", loop)
    with pytest.raises(ScheduleInputError, match=r"was built for stages in a v, and .* 'breadth_first' .* in a loop"):
        v_step.check_chunks("breadth_first", "loop", v)


def stage(first: bool, gradient: float | None, **ddp: Any) -> Any:
    weight = SimpleNamespace(main_grad=None if gradient is None else torch.full((2,), gradient), grad=None)
    model = SimpleNamespace(
        pre_process=first,
        post_process=not first,
        share_embeddings_and_output_weights=True,
        config=SimpleNamespace(),
        shared_embedding_or_output_weight=lambda: weight,
    )
    return SimpleNamespace(module=model, ddp_config=SimpleNamespace(use_megatron_fsdp=False, **ddp))


def test_reports_are_sent_with_their_tensors_in_one_dense_buffer() -> None:
    """Each goes from device to device as a flat one, which a sparse tensor cannot be: its parts are."""
    dense, sparse = torch.arange(4.0), torch.eye(3).to_sparse()
    file = io.BytesIO()
    pickler = v_logs._Pickler(file)
    pickler.dump([{"loss": dense, "hits": sparse, "count": 3}])
    flat = [tensor.reshape(-1) for tensor in pickler.tensors]
    assert len(flat) == 3
    moved = [each.view(tensor.shape) for each, tensor in zip(flat, pickler.tensors, strict=True)]
    (report,) = v_logs._Unpickler(io.BytesIO(file.getvalue()), moved).load()
    assert report["count"] == 3
    assert torch.equal(report["loss"], dense)
    assert report["hits"].is_sparse
    assert torch.equal(report["hits"].to_dense(), torch.eye(3))


def test_gradients_of_a_shared_weight_are_added_on_the_rank_of_both_stages() -> None:
    first, last = stage(True, 1.0), stage(False, 2.0)
    v_step._sum_shared_gradients([first, last])
    assert [v_step.shared_weight(c.module).main_grad.tolist() for c in (first, last)] == [[3.0, 3.0]] * 2
    v_step._sum_shared_gradients([stage(True, None), stage(False, None)])  # a frozen embedding
    last.module.share_embeddings_and_output_weights = False
    v_step._sum_shared_gradients([first, last])
    assert v_step.shared_weight(first.module).main_grad.tolist() == [3.0, 3.0]
