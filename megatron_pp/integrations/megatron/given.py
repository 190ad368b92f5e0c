"""The settings of `install()` as it has read them. ``settings.py``, which has the table of settings and reads them, is
loaded only if a keyword other than ``strict``, a file, or a variable of the environment was given.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class InstallSettings:
    """The settings that `install()` was given. ``overrides``: field of `StepSettings` -> the value that replaces the
    config's. The other fields are settings of the plug-in itself (``SWITCHES`` of ``settings.py``).
    """

    strict: bool = False
    any_microbatch_count: bool = False
    split_weight_grad: bool = True
    whole_sequence_loss: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
