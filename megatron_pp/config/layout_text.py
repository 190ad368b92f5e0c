"""Reads the layers per stage that a user gives: as lists, as text, or for the two ends. Never imports torch.

`pipeline_model_parallel_layout` is

    [8, 8, 7, 7] or "8,8,7,7"                            layers per stage
    [[0, 1, 2], [3, 4], ...]                             layer numbers per stage, ascending
    [["embedding", "decoder"], ["decoder", "loss"]]      Megatron's lists of names
    "Et*3|(tt|)*29,t|L"                                  Megatron's text: E embedding, t layer, L loss, | next stage
"""

import re
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from megatron_pp.config.checks import whole_number
from megatron_pp.config.nearest import nearest_multiples
from megatron_pp.errors import LayoutError
from megatron_pp.plan.ir.placement import Placement

LayerLayout = str | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[str]]

_EMBEDDING = "embedding"
_DECODER = "decoder"
_LOSS = "loss"
_LETTERS = {"E": _EMBEDDING, "t": _DECODER, "L": _LOSS}
_REPEATED_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
_REPEATED_LETTER = re.compile(r"([A-Za-z|])\*(\d+)")
_MOST_DIGITS = 18
_LONGEST_TEXT = 1_000_000  # a longer unrolled text is a typing error, not a model


def chunks_text(place: Placement) -> str:
    return "1 chunk" if place.num_chunks == 1 else f"{place.num_chunks} chunks"


def layers_per_stage(layout: LayerLayout) -> list[int]:
    """The number of layers of each stage, in model order. Raises LayoutError if the layout is of no accepted kind,
    names an unknown layer, repeats, skips or reorders layer numbers, or has the embedding or the loss elsewhere than at
    the two ends."""
    if isinstance(layout, str):
        return _read_text(layout)
    if isinstance(layout, Sequence) and layout:
        if all(map(_is_whole, layout)):
            return _check_counts(cast("list[int]", list(layout)))
        if all(isinstance(entry, Sequence) and not isinstance(entry, str) for entry in layout):
            stages: list[list[Any]] = [list(cast("Sequence[Any]", stage)) for stage in layout]
            entries = [entry for stage in stages for entry in stage]
            if all(map(_is_whole, entries)):
                return _count_numbers(stages)
            if all(isinstance(entry, str) for entry in entries):
                return _count_names(stages)
    raise LayoutError(
        f"pipeline_model_parallel_layout is {layout!r}; it must be a list of layer counts per stage such as "
        "[8, 8, 7, 7], a list of lists of layer numbers, a list of lists of 'embedding', 'decoder' and 'loss', or "
        "Megatron's text"
    )


def _read_text(text: str) -> list[int]:
    compact = re.sub(r"\s", "", text)
    if re.fullmatch(r"\d+(,\d+)*", compact):
        return _check_counts([_number(number, text) for number in compact.split(",")])
    unrolled = _unroll(compact.replace(",", ""), text)
    unknown = sorted(set(unrolled) - set(_LETTERS) - {"|"})
    if unknown or not unrolled:
        what = f"has {', '.join(map(repr, unknown))}" if unknown else "is empty"
        raise LayoutError(
            f"pipeline_model_parallel_layout {text!r} {what}; it may hold counts such as '8,8,7,7', or E (embedding), "
            "t (layer), L (loss), | between stages, and repetitions such as t*3 and (tt|)*2"
        )
    return _count_names([[_LETTERS[letter] for letter in stage] for stage in unrolled.split("|")])


def _unroll(compact: str, text: str) -> str:
    """``compact`` without repetitions. Innermost groups are written out first."""
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
        while (match := pattern.search(compact)) is not None:
            times = _number(match[2] or "1", text)
            if len(match[1]) * times > _LONGEST_TEXT:
                raise LayoutError(
                    f"pipeline_model_parallel_layout {text!r} repeats {match[1]!r} {times} times; without repetitions "
                    f"the text may have at most {_LONGEST_TEXT:,} characters"
                )
            compact = compact[: match.start()] + match[1] * times + compact[match.end() :]
    return compact


def _number(digits: str, text: str) -> int:
    """The int of ``digits``. Raises LayoutError if there are too many: ``int()`` raises for thousands of digits."""
    if len(digits) > _MOST_DIGITS:
        raise LayoutError(f"pipeline_model_parallel_layout {text[:60]!r} has a number of {len(digits)} digits")
    return int(digits)


def _check_counts(counts: list[int]) -> list[int]:
    for stage, count in enumerate(counts):
        if count < 0:
            raise LayoutError(f"pipeline_model_parallel_layout gives stage {stage} {count} layers; give it 0 or more")
    return counts


def _count_numbers(stages: list[list[int]]) -> list[int]:
    """The number of layers of each stage. Raises LayoutError unless the numbers are 0, 1, 2, ... in model order."""
    expected = 0
    for stage, numbers in enumerate(stages):
        for number in numbers:
            if 0 <= number < expected:
                raise LayoutError(f"pipeline_model_parallel_layout places layer {number} twice, again on stage {stage}")
            if number != expected:
                raise LayoutError(
                    f"pipeline_model_parallel_layout has layer {number} on stage {stage} where layer {expected} is "
                    "next; layers run in order, from 0, each once"
                )
            expected += 1
    return [len(numbers) for numbers in stages]


def _count_names(stages: list[list[str]]) -> list[int]:
    names = [[name.strip().lower() for name in stage] for stage in stages]
    for stage, row in enumerate(names):
        unknown = [name for name in row if name not in (_EMBEDDING, _DECODER, _LOSS)]
        if unknown:
            raise LayoutError(
                f"pipeline_model_parallel_layout names {unknown[0]!r} on stage {stage}; it may name "
                f"{_EMBEDDING!r}, {_DECODER!r} and {_LOSS!r}"
            )
    flat = [name for row in names for name in row]
    if flat.count(_EMBEDDING) != 1 or not names[0] or names[0][0] != _EMBEDDING:
        raise LayoutError("pipeline_model_parallel_layout must name 'embedding' once, first on the first stage")
    if flat.count(_LOSS) != 1 or not names[-1] or names[-1][-1] != _LOSS:
        raise LayoutError("pipeline_model_parallel_layout must name 'loss' once, last on the last stage")
    return [row.count(_DECODER) for row in names]


def _is_whole(entry: object) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool)


def counts_of(layout: LayerLayout, num_layers: int, place: Placement) -> list[int]:
    """Layers of each stage of ``place``. Raises LayoutError for another number of stages, or of layers, than given."""
    counts = layers_per_stage(layout)
    if len(counts) != place.num_stages:
        raise LayoutError(
            f"pipeline_model_parallel_layout has {len(counts)} stages; {place.pipeline_size} pipeline ranks with "
            f"{chunks_text(place)} each have {place.num_stages}"
        )
    if sum(counts) != num_layers:
        raise LayoutError(f"pipeline_model_parallel_layout places {sum(counts)} of num_layers {num_layers} layers")
    return counts


def counts_with_own_ends(num_layers: int, place: Placement, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage if the first or last rank has its own count. Counts are per pipeline rank, and a rank's
    chunks share them evenly, as in Megatron."""
    size = place.pipeline_size
    chunks = place.num_chunks
    if size == 1:
        raise LayoutError(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need "
            "pipeline_model_parallel_size of at least 2"
        )
    ends = {rank: count for rank, count in ((0, first), (size - 1, last)) if count is not None}
    for rank, count in ends.items():
        name = f"num_layers_in_{'last' if rank else 'first'}_pipeline_stage"
        _check_rank_count(name, count, num_layers, chunks)
    each = _share_of_middle(num_layers, sum(ends.values()), size - len(ends), place)
    return [ends.get(rank, each) // chunks for rank, _ in place.homes]


def _share_of_middle(num_layers: int, at_ends: int, middle: int, place: Placement) -> int:
    """Layers of each of the ``middle`` ranks that have no count of their own."""
    left = num_layers - at_ends
    if middle == 0:
        if left:
            raise LayoutError(
                f"num_layers is {num_layers}, but the first and last pipeline stage are given {at_ends} together and "
                f"there is no other; nearest num_layers: {at_ends}"
            )
        return 0
    share = middle * place.num_chunks
    if left < share or left % share:
        problem = (
            f"num_layers is {num_layers}; {at_ends} are given to the first or last pipeline stage, and what is left "
            f"({left}) cannot be shared evenly by {middle} rank(s) with {chunks_text(place)} each"
        )
        refuse_division(num_layers, place, at_ends, share, problem)
    return left // middle


def _check_rank_count(name: str, count: int, num_layers: int, chunks: int) -> None:
    whole_number(name, count, error=LayoutError)
    if count % chunks:
        fitting = nearest_multiples(count, chunks)
        raise LayoutError(f"{name} is {count}, which {chunks} chunks cannot share evenly; nearest: {fitting}")
    if count > num_layers:
        raise LayoutError(f"{name} is {count}, more than num_layers {num_layers}")


_EXAMPLE_STAGES = 16  # a longer list would make the error unreadable


def balanced_layout(num_layers: int, num_stages: int) -> list[int]:
    """Layers per stage that differ by at most one; the longer stages come after the first, which has the embedding."""
    least, left_over = divmod(num_layers, num_stages)
    longer = {(1 + i) % num_stages for i in range(left_over)}
    return [least + (stage in longer) for stage in range(num_stages)]


def refuse_division(num_layers: int, place: Placement, at_ends: int, share: int, problem: str) -> NoReturn:
    """Raises LayoutError with the nearest numbers of layers. Those beyond ``at_ends`` must be a multiple of ``share``.
    ``at_ends`` is negative if embedding or loss count as layers."""
    hint = ""
    if place.num_stages <= min(num_layers, _EXAMPLE_STAGES):
        example = balanced_layout(num_layers, place.num_stages)
        hint = f"; or place them yourself: pipeline_model_parallel_layout={example}"
    fewer = (num_layers - at_ends) // share
    nearest = [at_ends + share * n for n in (fewer, max(fewer, 0) + 1) if n > 0 and at_ends + share * n > 0]
    raise LayoutError(f"{problem}; nearest num_layers: {' or '.join(map(str, nearest))}{hint}")
