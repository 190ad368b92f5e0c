"""Calls a recipe function in a process of its own, and prints the config that it returns as JSON.

python -m megatron_pp.tools.check.jobs.recipe_process megatron.bridge.recipes.llama:llama3_8b_pretrain_config 64
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import sys
import warnings
from typing import Any

from megatron_pp.tools.check.jobs.megatron_process import plain

_DEEPEST = 8


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    os.environ.update(WORLD_SIZE=sys.argv[2], RANK="0", LOCAL_RANK="0")
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that lines which the recipe prints do not get into the answer
    gc.disable()
    warnings.simplefilter("ignore")
    json.dump(values_of(getattr(importlib.import_module(module), name)()), answer)
    answer.close()
    os._exit(0)


def values_of(config: Any, depth: int = 0) -> Any:
    """The fields of a config, and of the configs in it, as plain values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type) and depth < _DEEPEST:
        names = [field.name for field in dataclasses.fields(config)]
        return {name: values_of(getattr(config, name, None), depth + 1) for name in names}
    return plain(config)


if __name__ == "__main__":
    main()
