"""The outputs of the last stage in one step, put together as torch does."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.pipelining.microbatch import merge_chunks
from torch.utils._pytree import tree_flatten, tree_map_only

from megatron_pp.errors import ScheduleInputError


class LastOutputs:
    """One per step. ``spec``: torch's ``output_merge_spec``; None puts tensors together along the first dimension.

    What cannot be put together is refused when it is added, within the forward: so the step fails on every rank."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self._added: list[Any] = []
        self._form: Any = None  # of the outputs that were tried

    def add(self, output: Any) -> None:
        """Raises ScheduleInputError for an output that cannot be put together with those before it."""
        output = tree_map_only(Tensor, Tensor.detach, output)
        self._added.append(output)
        leaves, tree = tree_flatten(output)
        form = tree, [(type(one), one.shape, one.dtype) if isinstance(one, Tensor) else type(one) for one in leaves]
        if form != self._form:
            self._form = form
            self._merged([self._added[0], output] if len(self._added) > 1 else [output])

    def merged(self) -> Any:
        return self._merged(self._added)

    def _merged(self, outputs: list[Any]) -> Any:
        try:
            return merge_chunks(outputs, self._spec)
        except Exception as error:
            raise ScheduleInputError(
                f"the outputs of the last stage cannot be put together ({type(error).__name__}: {error}): they must "
                "be tensors of at least one dimension, or fit output_merge_spec. If you need only the losses, call "
                "step() or eval() with return_outputs=False"
            ) from error
