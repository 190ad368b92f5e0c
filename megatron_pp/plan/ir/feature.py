"""Additions of a feature to plans: rows for the core's tables, and hooks for when plans are made and verified.
Both are in modules of its folder, which are loaded if a plan has the feature (docs/adding_an_instruction.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from megatron_pp.feature_table import FEATURE_OPS, FEATURES, JOINED, ROW_OF, SPEC_DEFAULTS, Row
from megatron_pp.on_demand import load

if TYPE_CHECKING:
    from megatron_pp.plan.hooks import PlanHooks
    from megatron_pp.plan.ir.instruction import Instruction
    from megatron_pp.plan.ir.ledger import Memory, Site
    from megatron_pp.plan.ir.rules import Rule

Settings = tuple[tuple[str, Any], ...]
Spec = TypeVar("Spec", bound=type)


@dataclass(frozen=True)
class PlanFeature:
    """The rows of a feature, by op.

    names     the op in words, for error messages
    rules     when the op is valid
    facts     fact -> words; a fact is a bit that no other feature has
    lacking   why a plan without the feature has none of its instructions
    changes   changes of memory, in all stages or by site
    in_order  ops that the loss stage's rank runs in the order of microbatches: name and reason in words
    ends_use  posts whose tensor is not read any more after the op
    check_members  for joined operations: raises InstructionError for members that the feature does not join
    outside   for joined operations: what is before or after them, in words
    """

    names: Mapping[str, str]
    rules: Mapping[str, Rule]
    facts: Mapping[int, str]
    lacking: str = ""
    changes: Mapping[str, Memory | Callable[[Site], Memory]] = field(default_factory=dict)
    in_order: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ends_use: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check_members: Callable[[tuple[Instruction, ...]], None] | None = None
    outside: str = ""


_CONFIG = {name: default for row in FEATURES for name, default in row.config.items()}
_CONFIG_VALUES, _CONFIG_DEFAULTS = attrgetter(*_CONFIG), tuple(_CONFIG.values())


class AddedSettings:
    """The settings of features as attributes of a value. Its field ``added`` has those that are not the DEFAULTS."""

    DEFAULTS: ClassVar[Mapping[str, Any]]
    added: Settings

    def __getattr__(self, name: str) -> Any:
        if name not in self.DEFAULTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return dict(self.added).get(name, self.DEFAULTS[name])


class SpecSettings(AddedSettings):
    """The settings of features in a plan's spec."""

    DEFAULTS = SPEC_DEFAULTS


def with_settings(added: Settings, given: Mapping[str, Any], defaults: Mapping[str, Any] = SPEC_DEFAULTS) -> Settings:
    """``added`` with the values of ``given`` in place of its own. Defaults are left out: a setting has one form."""
    values = {**defaults, **dict(added), **given}
    return tuple((name, value) for name, value in values.items() if not _same(value, defaults[name]))


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def all_values(of: Any) -> dict[str, Any]:
    """Every value of a dataclass with ``AddedSettings`` by name, those of features where its field for them is."""
    found = {one.name: getattr(of, one.name) for one in fields(of)}
    place = [*found].index("added")
    names = [*found][:place], of.DEFAULTS, [*found][place + 1 :]
    return {name: getattr(of, name) for several in names for name in several}


def known_settings(**settings: Any) -> dict[str, Any]:
    """The ``settings`` that belong to a feature of this package."""
    return {name: value for name, value in settings.items() if name in SPEC_DEFAULTS}


def takes_settings(kind: Spec) -> Spec:
    """Makes a dataclass with ``AddedSettings`` take each of them as an argument of its own name."""
    make: Any = vars(kind)["__init__"]
    defaults: Mapping[str, Any] = getattr(kind, "DEFAULTS")  # noqa: B009 - type checkers know other bases

    @wraps(make)
    def init(self: Any, *args: Any, added: Settings = (), **given: Any) -> None:
        settings = {name: given.pop(name) for name in [*given] if name in defaults}
        make(self, *args, added=with_settings(added, settings, defaults) if settings else added, **given)

    setattr(kind, "__init__", init)  # noqa: B010 - a type checker takes it for a method of one object
    return kind


def of_kind(*kinds: str) -> frozenset[str]:
    return frozenset(op for op, row in FEATURE_OPS.items() if row.kind in kinds)


def feature_of(op: str) -> PlanFeature | None:
    """The rows of the feature that adds ``op``; None for an instruction of the core."""
    return rows_of(ROW_OF[op].rows) if op in ROW_OF else None


def rows_of(name: str) -> PlanFeature:
    rows: PlanFeature = load(name).ROWS
    return rows


def rows_of_barriers() -> Iterator[PlanFeature]:
    """The rows of features that take part in plans whose placement has barriers."""
    return (rows_of(row.rows) for row in FEATURES if row.of_barriers)


def rows_of_names() -> PlanFeature:
    """The rows of the feature whose messages have names."""
    found = next((row.rows for row in FEATURES if row.of_names), None)
    return PlanFeature({}, {}, {}, "no message has a name") if found is None else rows_of(found)


def hooks_of(added: Iterable[tuple[str, Any]], barriers: int = 0) -> tuple[PlanHooks, ...]:
    """The hooks of features that own one of these settings, or that take part if a placement has barriers."""
    return _hooks(tuple(name for name, _ in added), barriers > 0)


@lru_cache(maxsize=256)
def _hooks(names: tuple[str, ...], placed: bool) -> tuple[PlanHooks, ...]:
    return _loaded(row for row in FEATURES if any(name in row.spec for name in names) or (placed and row.of_barriers))


def rows_asked_by(config: Any) -> tuple[Row, ...]:
    """The rows of features for which ``config`` has settings."""
    if _CONFIG_VALUES(config) == _CONFIG_DEFAULTS:
        return ()
    return tuple(row for row in FEATURES if any(getattr(config, name) != value for name, value in row.config.items()))


def hooks_asked_by(config: Any, joins: bool = False) -> tuple[PlanHooks, ...]:
    """The hooks of these features and, if the model ``joins`` operations, those of the feature that joins them."""
    rows = rows_asked_by(config)
    if joins:
        rows += tuple(row for row in FEATURES if row not in rows and any(op.kind == JOINED for op in row.ops.values()))
    return _loaded(rows)


def part_word() -> str:
    """The feature's word for a part of a microbatch."""
    return words_of_features("part_word") or "part"


def words_of_parts(parts: range, part: int) -> str:
    """The parts that exist, in words for an error about ``part`` of a microbatch."""
    if len(parts) > 1:
        return f", {part_word()}s 0..{parts[-1]}"
    return ", all of them whole" if part >= 0 else ""


def words_of_features(name: str) -> str:
    """The words of all features' hooks under this name, for an error message of the core."""
    return "; ".join(words for hooks in _loaded(FEATURES) if (words := getattr(hooks, name)))


def _loaded(rows: Iterable[Row]) -> tuple[PlanHooks, ...]:
    return tuple(load(row.plan).HOOKS for row in rows if row.plan)
