"""Converts Megatron-core's models before their first training step on a schedule that splits backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_pp import weight_grad
from megatron_pp.errors import WeightGradSplitError


def split_for(schedule: str, chunks: Sequence[Any]) -> weight_grad.WeightGradStore:
    """The store of ``chunks``, which are converted. Raises WeightGradSplitError for a model that cannot be converted,
    and says what to do instead."""
    try:
        return weight_grad.split_weight_grad(chunks)
    except WeightGradSplitError as error:
        raise WeightGradSplitError(
            f"schedule {schedule} splits backwards, but {error}; install(split_weight_grad=False) leaves them whole"
        ) from error
