"""Tells which functions of the installed Megatron-core are those of known releases, by digests of their sources. The
functions are those that the plug-in replaces, calls, does the work of, or takes message shapes from.

If the functions that run a microbatch are known, `steps/known_steps.py` does what they do. Unknown functions are
called.

Known are all releases from 0.14.0 to 0.19.2, and the branches dev (`d48bd6be`) and main (`d98e8a64`, 0.20) of August
2026. `scripts/megatron_reads.py` prints the digests of a checkout that are not here.
"""

import hashlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

from megatron_pp.integrations.megatron.releases.versions import COMMUNICATOR, ENTRIES, Row, row_of

# Function or class -> the first 12 digits of the SHA-256 of its sources, oldest first. A schedule has one in each minor
# release from 0.14 on, and one in each branch.
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
    "clear_embedding_activation_buffer": "83c22dd81102",
    "finish_embedding_wgrad_compute": "f6c147bf0e4e",
    "get_tensor_shapes": "c3d870d49b0c aafd487b2ecd ba2dc0b0484d",
    "P2PCommunicator": "7ecaeeb5b9f5 0bff5e498f55 7301a12dceb9 cda3590b5115 9bf7cd5904f4",
    "combined_forward_backward_step": "734d6f8080fd fc58e7c5bc28 0960241d1211 c88509af0f94 eebee7421ea0",
}
# The same of functions that run a microbatch. If a release lacks one, no other function of that release calls it.
STEP_SOURCES: dict[str, str] = {
    "forward_step": "24c526af4445 d24e8a478a19",
    "forward_step_calc_loss": (
        "58517506d765 7a1192ac53d3 0b552e0742e6 d972e4b02f52 24757f83c3de 9990d300271b d64b2efcb498"
    ),
    "_get_experimental_attention_variant_loss_scale_func": "48af6cc05903",
    "set_current_microbatch": "df4c005d24bb ccb26564d148",
    "backward_step": "3682e74b1769 6ac4aa596b1b 435628e2479e b767f2485190",
    "custom_backward": "134012de6fb7",
}
KNOWN = SCHEDULE_SOURCES | STEP_SOURCES
MODULES = ("schedules", "p2p_communication", "combined_1f1b")  # the modules that define these functions
_PACKAGE = "megatron.core.pipeline_parallel"
# All releases have these. The plug-in passes or takes the parameters of all but the communicator.
NEEDED = {
    *ENTRIES, COMMUNICATOR, "forward_step", "backward_step", "custom_backward", "get_tensor_shapes",
    "clear_embedding_activation_buffer", "finish_embedding_wgrad_compute",
}  # fmt: skip


@dataclass(frozen=True)
class Functions:
    """What the functions in KNOWN are in the installed release. Functions that the program has replaced are left out.

    known    function whose source a known release has -> the digest of its source
    changed  functions whose source no known release has
    """

    known: Mapping[str, str]
    changed: tuple[str, ...]

    def are_of(self, row: Row) -> bool:
        """Whether all functions are known, and the schedules are those of a release with this ``row``."""
        if self.changed or not self.known.keys() >= NEEDED:
            return False
        numbers = {SCHEDULE_SOURCES[name].split().index(self.known[name]) for name in ENTRIES}
        # The branches are behind the releases in the table, and have the newest row.
        return len(numbers) == 1 and row_of(f"0.{14 + numbers.pop()}") == row


def functions_of(schedules: ModuleType) -> Functions:
    """The functions of the installed release. A function without its source is neither known nor changed."""
    modules = {f"{_PACKAGE}.{name}" for name in MODULES}
    combined = sys.modules.get(f"{_PACKAGE}.combined_1f1b")
    known, changed = {}, []
    for name, digests in KNOWN.items():
        found = getattr(schedules, name, None) or getattr(combined, name, None)
        found = inspect.unwrap(found) if callable(found) else None
        is_own = getattr(found, "__module__", None) in modules
        if not is_own and name not in STEP_SOURCES:  # one that runs a microbatch may be of another module
            continue
        source = digest(found)
        if source in digests.split():
            known[name] = source
        elif source and is_own:
            changed.append(name)
    return Functions(known, tuple(changed))


def known_steps(schedules: ModuleType, functions: Functions) -> dict[str, CodeType]:
    """The code of the functions that run a microbatch; empty unless all are known and none is wrapped."""
    steps: dict[str, CodeType] = {}
    for name in STEP_SOURCES:
        function = getattr(schedules, name, None)
        if function is None:
            continue
        if name not in functions.known or hasattr(function, "__wrapped__"):
            return {}
        steps[name] = function.__code__
    return steps


def digest(code: Any) -> str:
    """The first 12 digits of the SHA-256 of the source of a function, its code, or a class; empty without a source."""
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:12]
    except (OSError, TypeError):  # installed without source, or not written in Python
        return ""
