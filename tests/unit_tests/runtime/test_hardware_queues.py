"""The advice on CUDA_DEVICE_MAX_CONNECTIONS."""

from __future__ import annotations

import pytest

from megatron_pp.runtime.queue_advice import QUEUES_VARIABLE, queue_advice


@pytest.mark.parametrize(
    ("value", "streams", "needs_one", "words"),
    [
        (None, 5, False, "is not set, which means 8 hardware queues: enough for the pipeline's 5 streams, but"),
        (None, 9, False, "is not set, which means 8 hardware queues: the pipeline uses 9 streams, of which some"),
        (None, 5, True, "before Blackwell, tensor and context parallel layers overlap as intended only in the order"),
        (
            "1",
            5,
            False,
            "is 1: a transfer that waits for its peer can hold compute back, and nothing in this run needs",
        ),
        ("8", 9, False, "is 8: the pipeline uses 9 streams, of which some share a queue and wait for each other"),
        ("8", 9, True, "is 8: before Blackwell, tensor and context parallel layers overlap as intended only"),
        ("none", 2, False, "is none: no number of hardware queues; it must be a whole number from 1 to 32"),
        ("64", 2, True, "is 64: no number of hardware queues; it must be a whole number from 1 to 32"),
    ],
)
def test_one_sentence_where_it_does_not_suit_the_run(
    value: str | None, streams: int, needs_one: bool, words: str
) -> None:
    advice = queue_advice(streams, needs_one, {} if value is None else {QUEUES_VARIABLE: value})
    assert advice is not None
    assert advice.startswith(f"{QUEUES_VARIABLE} is ")
    assert words in advice
    assert advice.endswith(("from 1 to 32", "; set it to 1" if needs_one else "; set it to 32"))


@pytest.mark.parametrize(("value", "streams", "needs_one"), [("1", 9, True), ("8", 8, False), ("32", 9, False)])
def test_nothing_is_said_where_it_suits_the_run(value: str, streams: int, needs_one: bool) -> None:
    assert queue_advice(streams, needs_one, {QUEUES_VARIABLE: value}) is None
