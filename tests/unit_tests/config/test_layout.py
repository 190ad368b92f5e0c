"""Where layers go: every layer exactly once, or a LayoutError that says what would be right."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pp.config.layout import place_layers
from megatron_pp.config.layout_text import balanced_layout, layers_per_stage
from megatron_pp.errors import LayoutError


def sizes(stages):
    return [len(stage) for stage in stages]


def test_layers_are_divided_evenly_over_stages():
    assert place_layers(8, 2, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "layout",
    [
        [8, 8, 7, 7],
        "8, 8,7,7",
        "Et*8|t*8|t*7|t*7L",
        "E(tttt)*2|(tt)*4|" + "t*7|" + "t*7,L",
        "E(t*4)*2|t*8|(t*7|)*1t*7L",
        [["embedding", *["decoder"] * 8], ["decoder"] * 8, ["decoder"] * 7, [*["Decoder "] * 7, "loss"]],
        [list(range(8)), list(range(8, 16)), tuple(range(16, 23)), list(range(23, 30))],
    ],
)
def test_one_layout_in_all_its_spellings(layout):
    stages = place_layers(30, 4, layout=layout)
    assert sizes(stages) == [8, 8, 7, 7]
    assert [layer for stage in stages for layer in stage] == list(range(30))


def test_embedding_and_loss_may_have_stages_of_their_own():
    assert place_layers(4, 4, layout="E|(tt|)*2L") == [[], [0, 1], [2, 3], []]


def test_repetitions_multiply_whole_stages_as_in_megatron():
    assert layers_per_stage("Et*3|(tt|)*29,t|L") == [3, *[2] * 29, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_layers_in_first_pipeline_stage": 1}, [1, 3, 3, 3]),
        ({"num_layers_in_last_pipeline_stage": 4}, [2, 2, 2, 4]),
        ({"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2}, [2, 3, 3, 2]),
        ({"layout": [3, 3, 3, 1]}, [3, 3, 3, 1]),
        ({"account_for_embedding": True, "account_for_loss": True}, [2, 3, 3, 2]),
    ],
)
def test_first_and_last_stage_may_have_their_own_number_of_layers(arguments, expected):
    assert sizes(place_layers(10, 4, **arguments)) == expected


def test_chunks_of_a_rank_share_its_layers():
    assert sizes(place_layers(8, 2, 2, num_layers_in_first_pipeline_stage=2)) == [1, 3, 1, 3]
    first_on_a_v = place_layers(8, 2, 2, num_layers_in_first_pipeline_stage=2, placement="v")
    assert sizes(first_on_a_v) == [1, 3, 3, 1]


def test_every_layer_is_placed_once_or_it_is_an_error():
    rng, found = random.Random(1), {"placed": 0, "an error": 0}
    for _ in range(1000):
        num_layers, size, chunks = rng.randint(1, 40), rng.randint(1, 5), rng.randint(1, 3)
        try:
            stages = place_layers(
                num_layers,
                size,
                chunks,
                num_layers_in_first_pipeline_stage=rng.choice([None, rng.randint(1, 8)]),
                num_layers_in_last_pipeline_stage=rng.choice([None, rng.randint(1, 8)]),
                account_for_embedding=rng.random() < 0.5,
                account_for_loss=rng.random() < 0.5,
                placement=rng.choice(["loop", "v"]),
            )
        except LayoutError:
            found["an error"] += 1
            continue
        assert len(stages) == size * chunks
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        assert all(stages[1:-1])
        found["placed"] += 1
    assert min(found.values()) > 80, found


@given(num_layers=st.integers(1, 200), num_stages=st.integers(1, 16))
def test_the_layout_that_errors_propose_is_legal(num_layers, num_stages):
    layout = balanced_layout(num_layers, num_stages)
    assert max(layout) - min(layout) <= 1
    if num_layers >= num_stages:
        assert sizes(place_layers(num_layers, num_stages, layout=layout)) == layout


REFUSED = [
    ((30, 4), {}, r"num_layers is 30.*28 or 32.*pipeline_model_parallel_layout=\[7, 8, 8, 7\]"),
    ((30, 4, 2), {}, "24 or 32"),
    ((3, 4), {}, "num_layers is 3.*nearest num_layers: 4$"),
    ((10**27, 2), {}, "num_layers is 10{27}; at most 1,000,000 layers"),
    ((0, 2), {}, "num_layers is 0"),
    ((5, 2), {"layout": [2, 2]}, "places 4 of num_layers 5"),
    ((4, 2), {"layout": [1, 1, 2]}, "has 3 stages; 2 pipeline ranks with 1 chunk each have 2"),
    ((4, 2), {"layout": [5, -1]}, "gives stage 1 -1 layers"),
    ((4, 2), {"layout": [[0, 1], [1, 2]]}, "places layer 1 twice"),
    ((4, 2), {"layout": [[0, 1], [3, 2]]}, "has layer 3 on stage 1 where layer 2 is next"),
    ((3, 2), {"layout": [[0, 1], [3]]}, "has layer 3 on stage 1 where layer 2 is next"),
    ((4, 4), {"layout": [2, 0, 1, 1]}, "stage 1 of 4 would hold no layer"),
    ((4, 2), {"layout": "Ett|tmL"}, "has 'm'"),
    ((4, 2), {"layout": ""}, "is empty"),
    ((4, 2), {"layout": "tt|ttL"}, "name 'embedding' once, first"),
    ((4, 2), {"layout": "EttL|ttL"}, "name 'loss' once, last"),
    ((4, 2), {"layout": "Ett|Lt"}, "name 'loss' once, last"),
    ((4, 2), {"layout": "Ett|ttEL"}, "name 'embedding' once, first"),
    ((4, 2), {"layout": "t*99999999999"}, "repeats 't'"),
    ((4, 2), {"layout": [["embedding", "encoder"], ["loss"]]}, "names 'encoder' on stage 0"),
    ((4, 2), {"layout": [["embedding"], [3]]}, "it must be a list"),
    ((4, 2), {"layout": ["Ett", "ttL"]}, "it must be a list"),
    ((4, 2), {"layout": [2.0, 2.0]}, "it must be a list"),
    ((4, 2), {"layout": 4}, "it must be a list"),
    ((4, 2), {"layout": []}, "it must be a list"),
    ((12, 4), {"num_layers_in_first_pipeline_stage": 2}, r"what is left \(10\).*11 or 14"),
    ((12, 4, 2), {"num_layers_in_first_pipeline_stage": 3}, "2 chunks cannot share.*2 or 4"),
    ((2, 4), {"num_layers_in_last_pipeline_stage": 3}, "is 3, more than num_layers 2"),
    ((4, 1), {"num_layers_in_first_pipeline_stage": 4}, "pipeline_model_parallel_size of at least 2"),
    ((3, 2), {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}, "num_layers: 2"),
    ((13, 2, 2), {"account_for_embedding": True, "account_for_loss": True}, "embedding and loss.*10 or 14"),
    ((4, 2), {"layout": [2, 2], "account_for_loss": True}, "set one of them"),
    ((4, 2), {"layout": [2, 2], "num_layers_in_first_pipeline_stage": 2}, "set one of them"),
]


@pytest.mark.parametrize(("sizes", "arguments", "sentence"), REFUSED)
def test_layouts_that_lose_or_repeat_a_layer_are_refused(sizes, arguments, sentence):
    with pytest.raises(LayoutError, match=sentence):
        place_layers(*sizes, **arguments)


@given(st.integers(1, 40), st.integers(2, 8), st.integers(1, 3), st.integers(0, 6), st.booleans())
def test_the_numbers_of_layers_that_are_named_are_the_nearest_that_work(layers, size, chunks, ends, loss):
    more = {"num_layers_in_first_pipeline_stage": ends * chunks} if ends and size > 2 else {"account_for_loss": loss}

    def works(count):
        try:
            return place_layers(count, size, chunks, **more)
        except LayoutError:
            return False

    try:
        place_layers(layers, size, chunks, **more)
    except LayoutError as error:
        named = [int(n) for n in re.findall(r"nearest num_layers: (\d+)(?: or (\d+))?", str(error)) for n in n if n]
        if named:
            assert all(map(works, named))
            assert not any(works(n) for n in range(layers + 1, named[-1]) if n not in named)


def test_an_absurd_number_of_stages_is_refused_immediately():
    with pytest.raises(LayoutError, match=r"nearest num_layers: 999999999$"):
        place_layers(4, 999_999_999)


@pytest.mark.parametrize("account", [0.5, float("nan")])
def test_an_account_setting_that_is_not_boolean_ends_the_search(account):
    """For a number of layers that such a number divides."""
    with pytest.raises(LayoutError, match=r"nearest num_layers: 3 or 5"):
        place_layers(4, 2, account_for_embedding=account)
