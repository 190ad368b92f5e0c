"""The order of unequal microbatches."""

from __future__ import annotations

import itertools

from megatron_pp.tools.advise import microbatch_order
from megatron_pp.tools.advise.microbatch_order import best_order
from megatron_pp.tools.advise.model import PART, Model, layer
from megatron_pp.tools.advise.pipeline_search import search
from megatron_pp.tools.advise.question import Question


def test_the_order_of_microbatches_does_not_depend_on_the_clock(monkeypatch):
    costs = (2.0, 0.25, 1.75, 0.5, 0.5, 1.0, 1.0, 1.0)
    models = ((1, Model((layer(PART, 2.0, 1.0, 1.0, 2.0),))),)
    asked = Question(2, 8, 80.0, models, schedules=("1f1b",), policies=("overlap",), microbatch_costs=costs)
    best = search(asked).best
    quiet, clock = best_order(asked, best), itertools.count(0.0, 100.0)
    monkeypatch.setattr(microbatch_order.time, "monotonic", lambda: next(clock))
    assert best_order(asked, best) == quiet
    assert quiet.step < quiet.step_as_given
    monkeypatch.setattr(microbatch_order, "_OPERATIONS", 0)
    assert best_order(asked, best).order == tuple(range(8))
