"""Which stage holds which layers. Each layer is placed exactly once, or LayoutError is raised. Never imports torch.

Megatron dropped layers that did not divide: of 30 layers over 4 ranks it built 28 (NVIDIA/Megatron-LM#1304). Stages are
in model order. In the loop placement these are vp(0)pp(0), vp(0)pp(1), ...
"""

from itertools import accumulate, pairwise
from typing import Any

from megatron_pp.config.checks import whole_number
from megatron_pp.errors import LayoutError
from megatron_pp.plan.ir.placement import LOOP, Placement

_MOST_LAYERS = 1_000_000


def place_layers(
    num_layers: int,
    pipeline_size: int,
    num_chunks: int = 1,
    *,
    layout: Any = None,
    num_layers_in_first_pipeline_stage: int | None = None,
    num_layers_in_last_pipeline_stage: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    placement: str = LOOP,
) -> list[list[int]]:
    """Layer numbers (from 0) of each of the P * V stages, in model order.

    layout                  one entry per stage (``layout_text.py``); excludes the next four
    num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage   layers of rank 0 and of rank P - 1, all
                            chunks of the rank together, as in Megatron
    account_for_embedding, account_for_loss   the embedding (the loss) counts as one layer of the first (last) stage
    placement               which rank holds which stage: "loop" or "v"

    Raises LayoutError, with the nearest numbers that work, if a layer would be left over or placed twice, or if a stage
    between the first and the last would be empty."""
    num_layers = whole_number("num_layers", num_layers, error=LayoutError)
    if num_layers > _MOST_LAYERS:
        raise LayoutError(f"num_layers is {num_layers}; at most {_MOST_LAYERS:,} layers can be placed")
    place = Placement(placement, pipeline_size, num_chunks)
    first, last = num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage
    _check_one_way(layout, first, last, account_for_embedding or account_for_loss)
    if layout is not None:
        from megatron_pp.config import layout_text

        counts = layout_text.counts_of(layout, num_layers, place)
    elif first is not None or last is not None:
        from megatron_pp.config import layout_text

        counts = layout_text.counts_with_own_ends(num_layers, place, first, last)
    else:
        counts = _even_counts(num_layers, place, bool(account_for_embedding), bool(account_for_loss))
    _check_no_empty_stage(counts)
    return [list(range(start, end)) for start, end in pairwise(accumulate(counts, initial=0))]


def _check_one_way(layout: Any, first: int | None, last: int | None, accounts: bool) -> None:
    given = {
        "pipeline_model_parallel_layout": layout is not None,
        "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage": (first, last) != (None, None),
        "account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split": accounts,
    }
    used = [name for name, is_used in given.items() if is_used]
    if len(used) > 1:
        raise LayoutError(f"{' and '.join(used)} are both set; each decides how layers are placed, so set one of them")


def _even_counts(num_layers: int, place: Placement, embedding: bool, loss: bool) -> list[int]:
    """The same number of layers for each stage. ``embedding`` and ``loss``: whether each counts as one layer."""
    extra, stages = embedding + loss, place.num_stages
    if (num_layers + extra) % stages:
        counted = f" (plus {extra} for embedding and loss)" if extra else ""
        from megatron_pp.config import layout_text

        problem = (
            f"num_layers is {num_layers}, which{counted} does not divide over {place.pipeline_size} pipeline ranks "
            f"with {layout_text.chunks_text(place)} each"
        )
        layout_text.refuse_division(num_layers, place, -extra, stages, problem)
    counts = [(num_layers + extra) // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    if min(counts) < 0:
        raise LayoutError(f"num_layers is {num_layers}: too few beside embedding and loss on {stages} stage(s)")
    return counts


def _check_no_empty_stage(counts: list[int]) -> None:
    """Raises LayoutError if a middle stage has no layer. The first and the last stage have embedding and loss."""
    for stage in range(1, len(counts) - 1):
        if counts[stage] == 0:
            raise LayoutError(
                f"stage {stage} of {len(counts)} would hold no layer; only the first and the last stage may, and "
                f"{sum(counts)} layers fill at most {sum(counts) + 2} stages"
            )
