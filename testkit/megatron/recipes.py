"""Makes a recipe of examples/recipes small: a Case with the same flags, and with sizes for a machine without a GPU.

`megatron-pp parity` decides the new value of a flag. The caller gives the sizes of the parallel layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_pp.tools.check.jobs.shell import read_shell
from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.layout import Layout
from megatron_pp.tools.parity.shrink import for_parity
from testkit.megatron.cases import Case, Model

STEPS = 2


class SmallRecipe(NamedTuple):
    """A small recipe. ``given``: the recipe's flags. ``flags``: the flags that run. ``case``: the case that runs
    them."""

    given: Flags
    flags: Flags
    case: Case

    def changed(self) -> dict[str, tuple[str, str]]:
        """The changed flags of the recipe: flag -> (the recipe's value, the new value)."""
        names = dict.fromkeys(name for name, _ in self.given.items)
        both = {name: (_value(self.given, name), _value(self.flags, name)) for name in names}
        return {name: (old, new) for name, (old, new) in both.items() if old != new}


def flags_of(file: Path) -> list[str]:
    """The flags of a recipe that is a shell script."""
    return [word for word in read_shell(str(file)).words if word != "$@"]


def small_recipe(words: Sequence[str], sizes: Sequence[str], ranks: int) -> SmallRecipe:
    """The recipe with the flags ``words``, made small, on ``ranks`` ranks. ``sizes``: flags of the parallel layout, in
    place of the recipe's."""
    given = flags = Flags.read(words)
    for name, values in Flags.read(sizes).items:
        flags = flags.set(name, " ".join(values))
    layout, _ = for_parity(Layout(flags, ranks, uneven_masks=False), STEPS, shrunk=True, gpu=False)
    return SmallRecipe(given, layout.flags, _case(layout))


def _case(layout: Layout) -> Case:
    flags = layout.flags
    dp = layout.size("DP")
    tp = layout.size("TP")
    padded = flags.number("--make-vocab-size-divisible-by", 128) * tp
    chunks = layout.size("VPP")
    batch = flags.number("--micro-batch-size", 1)
    model = Model(
        layers=flags.number("--num-layers", 1),
        vocab=-(-flags.number("--vocab-size", 1) // padded) * padded,
        seq=flags.number("--seq-length", 1),
        micro_batch=batch,
        tied="--untie-embeddings-and-output-weights" not in flags,
        experts=flags.number("--num-experts", 0) or None,
        flags=tuple(flags.words()),
    )
    return Case(
        model,
        pp=layout.size("PP"),
        vp=chunks if chunks > 1 else None,
        tp=tp,
        dp=dp,
        cp=layout.size("CP"),
        ep=layout.size("EP"),
        etp=layout.size("ETP"),
        microbatches=flags.number("--global-batch-size", 1) // (batch * dp),
        policy="overlap",
        steps=STEPS,
        optimizer="distributed" if "--use-distributed-optimizer" in flags else "adam",
        overlap_grad_reduce="--overlap-grad-reduce" in flags,
        overlap_param_gather="--overlap-param-gather" in flags,
        align_param_gather=chunks > 1,
    )


def _value(flags: Flags, name: str) -> str:
    """ "on" for a switch, "" for a missing flag."""
    return (flags.text(name) or "on") if name in flags else ""
