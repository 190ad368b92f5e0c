"""Tells which functions of the installed Megatron-core differ from those of all known releases, by digests of their
sources. The functions are those that the plug-in replaces, does the work of, or takes message shapes from.

Known are all releases from 0.14.0 to 0.19.2, and the branches dev (`d48bd6be`) and main (`d98e8a64`, 0.20) of August
2026. `scripts/megatron_reads.py` prints the digests of a checkout that are not here.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from megatron_pp.integrations.megatron.releases.versions import STEP_SOURCES, digest

# Function or class -> the first 12 digits of the SHA-256 of its sources, oldest first.
SCHEDULE_SOURCES: dict[str, str] = {
    "forward_backward_no_pipelining": (
        "923c9492368a 6915c8b33db4 84399467bcc0 c86c3a0d6fb4 897d736956bf b52848b05720 dda63d9a0c86 231430dc89b2"
    ),
    "forward_backward_pipelining_without_interleaving": (
        "b5f1e13c0843 03757d1066dc ecf7d69308cd 79bb2ba211d5 c8fd558b6fdc 772d6b7d8182 e9410b11b51b b2582d25713c"
    ),
    "forward_backward_pipelining_with_interleaving": (
        "9b6322eebd58 40a0803de2d8 bd10736079d7 45dd6edc2bf8 450e85c2b521 091263d1c27e a04996870729 f772f7d344ef"
    ),
    "get_tensor_shapes": "c3d870d49b0c aafd487b2ecd ba2dc0b0484d",
    "P2PCommunicator": "7ecaeeb5b9f5 0bff5e498f55 7301a12dceb9 cda3590b5115 9bf7cd5904f4",
    "combined_forward_backward_step": "734d6f8080fd fc58e7c5bc28 0960241d1211 c88509af0f94 eebee7421ea0",
}
KNOWN = SCHEDULE_SOURCES | STEP_SOURCES
MODULES = ("schedules", "p2p_communication", "combined_1f1b")  # the modules that define these functions
_PACKAGE = "megatron.core.pipeline_parallel"


def changed_functions(schedules: ModuleType) -> list[str]:
    """The names in KNOWN whose source no known release has. Functions that the program has replaced are left out."""
    return [name for name, found in _own(schedules) if (source := digest(found)) and source not in KNOWN[name]]


def are_known(schedules: ModuleType, names: Sequence[str]) -> bool:
    """Whether all these functions are those of known releases; a function without its source, or that the program has
    replaced, is not. The names that known functions use need not be read (``reads.py``)."""
    own = dict(_own(schedules))
    return all(name in own and (source := digest(own[name])) and source in KNOWN[name] for name in names)


def _own(schedules: ModuleType) -> Iterator[tuple[str, Any]]:
    modules = {f"{_PACKAGE}.{name}" for name in MODULES}
    combined = sys.modules.get(f"{_PACKAGE}.combined_1f1b")
    for name in KNOWN:
        found = getattr(schedules, name, None) or getattr(combined, name, None)
        found = inspect.unwrap(found) if callable(found) else None
        if found is not None and getattr(found, "__module__", None) in modules:
            yield name, found


def sentence(schedules: ModuleType, version: str) -> str | None:
    """A sentence with the functions that differ; None if all are known."""
    if not (changed := changed_functions(schedules)):
        return None
    return (
        f"megatron-core {version} differs from every release that megatron_pp knows (0.14 to 0.19.2, and the branches "
        f"dev and main of August 2026) in {', '.join(changed)}. megatron_pp does what the newest known release does; "
        "to compare your training with one process: megatron-pp parity"
    )
