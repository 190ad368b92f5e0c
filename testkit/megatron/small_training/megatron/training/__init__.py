"""The arguments of the run, as Megatron-LM has them."""

from typing import Any

ARGS: list[Any] = []


def get_args() -> Any:
    return ARGS[-1]
