"""Features stand behind one door: the core names none of them, but in the one table (``feature_table.py``)."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

import megatron_pp
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.errors import PlanError
from megatron_pp.feature_table import FEATURES, SPEC_DEFAULTS
from megatron_pp.plan.costs import added_costs
from megatron_pp.plan.costs.cost_hooks import COST_DEFAULTS, MEASURED_DEFAULTS, STAGE_TIMES
from megatron_pp.plan.costs.measured import Measured, MeasuredFile
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from tests.functional_tests.test_core_size import COMPILER, GLOO, MACHINE, OWN, UNDER_INSTALL

PACKAGE = Path(megatron_pp.__file__).parent

# What a core file calls a feature by, in code or in words.
NAMES = {
    "skip_tensors": r"skip[_ ]tensor|skip_cache|skip_routes|SkipTensor|named tensor|\broutes\b",
    "offload": r"offload_|pipe_offload|\boffload(s|ed)?\b",
    "slices": r"(?<![a-z])slice[sd]?(?![a-z])|key_values|keys and values|\bcausal|seq_1f1b|seq_zb",
    "output_layer": r"output_layer|split output layer|SplitOutputLayer|output_root|output_stages|logits|softmax|vocab_",
    "fsdp": r"fsdp|unshard|reshard|sharded stage|ShardWalk",
    "pairs": r"(?<![a-z])pair(s|ed)?(?![a-z])|PairRunner|overlapped_forward_backward|combined_1f1b|\bhalves\b",
}
# What others call so: Megatron and torch what they do themselves.
OF_OTHERS = re.compile(
    r"fine_grained_activation_offloading|activation[_ ]offload|offload_reset|reset_offload"
    r"|fsdp_resync|resynchronise_fsdp|megatron[-_]fsdp|DistributedDataParallel (or|and) FSDP|and FSDP\."
    r"|slice of time|\b_SLICE\b|rank: (int \| )?slice\b"
    r"|COMBINED_1F1B( = \"combined_1f1b\")?"  # Megatron's schedule, which its host asks for
    r"|vocab_size|logits_bytes|Logits of one microbatch|attention's softmax part"  # sizes of any transformer
    # Other things of which there are two: ranks, ends of a message, an output and its gradient.
    r"|\ba pair of ranks\b|a pair that met|never pair the new step"
    r"|\bpairs\((history|history: [^)]*)\)|    pairs = \[|if pairs:|in pairs\]|A pair \(loss, report\)",
    re.IGNORECASE,
)
# Files that name features all the same. A file leaves the list with the last of its names.
_PUBLIC = "__init__.py"  # names of the package
# Rooms of which no file may name a feature, but for the one that only type checkers read.
_ROOMS = ("plan/costs", "plan/simulate")
_FOR_TYPES = "plan/costs/added_costs.py"
# Fields of the config are those of a dataclass, and of a named tuple, for type checkers.
_CONFIG = ("config/model_config.py", "config/step_fields.py")
_FAMILY = "plan/orders/family.py"  # ``Family.sliced``: families of programs' own give it
EXCEPTIONS = {
    "skip_tensors": {*_CONFIG},
    "offload": {*_CONFIG},
    "fsdp": {*_CONFIG},
    "output_layer": {_PUBLIC},
    "slices": {_PUBLIC, *_CONFIG, _FAMILY},
    "pairs": {*_CONFIG},
}


def core_files() -> list[Path]:
    found = []
    for book in (MACHINE, GLOO, OWN, UNDER_INSTALL, COMPILER):
        for room, names in book.items():
            folder = PACKAGE.joinpath(*room.split("."))
            found += [folder / f"{name}.py" for name in ("__init__", *names.split())]
    for room in _ROOMS:
        found += (PACKAGE / room).glob("*.py")
    return sorted({path for path in found if path.exists()} - {PACKAGE / "feature_table.py", PACKAGE / _FOR_TYPES})


def test_the_list_has_every_feature_of_the_table() -> None:
    assert set(NAMES) == {row.folder for row in FEATURES}
    folders = {path.name for path in (PACKAGE / "features").iterdir() if (path / "__init__.py").exists()}
    assert set(NAMES) <= folders


@pytest.mark.parametrize("feature", NAMES)
def test_no_core_file_names_a_feature(feature: str) -> None:
    naming = {}
    for path in core_files():
        text = OF_OTHERS.sub("", path.read_text(encoding="utf-8"))
        lines = [
            f"{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(NAMES[feature], line, re.IGNORECASE)
        ]
        if lines:
            naming[path.relative_to(PACKAGE).as_posix()] = lines
    allowed = EXCEPTIONS.get(feature, set())
    unexpected = {name: lines for name, lines in naming.items() if name not in allowed}
    assert not unexpected, f"core files name the feature {feature}: {unexpected}"
    assert not allowed - set(naming), "take these files off the exceptions: they name the feature no more"


def test_a_row_has_the_defaults_of_the_config() -> None:
    fields = TransformerConfig.__dataclass_fields__
    for row in FEATURES:
        assert {name: fields[name].default for name in row.config} == dict(row.config), row.folder


def test_a_setting_has_one_value_in_one_form() -> None:
    spec = PlanSpec("1f1b", 2, 1, 4)
    assert not spec.added
    assert PlanSpec("1f1b", 2, 1, 4, **SPEC_DEFAULTS) == spec
    assert hash(PlanSpec("1f1b", 2, 1, 4, **SPEC_DEFAULTS)) == hash(spec)
    with pytest.raises(AttributeError, match="no_such_setting"):
        spec.no_such_setting  # noqa: B018
    with pytest.raises(TypeError, match="no_such_setting"):
        PlanSpec("1f1b", 2, 1, 4, no_such_setting=1)


def test_feature_settings_out_of_range_are_refused() -> None:
    for name, wrong in (("offload_slots", 0), ("offload_slots", True), ("fsdp_max_active_stages", -1)):
        if name in SPEC_DEFAULTS:
            with pytest.raises(PlanError, match=f"{name} is {wrong}; it must be a whole number"):
                PlanSpec("1f1b", 2, 1, 4, **{name: wrong})


def test_a_cost_has_one_value_in_one_form() -> None:
    costs = StageCosts.uniform(2)
    assert not costs.added
    assert replace(costs, **COST_DEFAULTS) == costs
    for name in STAGE_TIMES:
        assert getattr(costs, name) == (0.0, 0.0)
        assert replace(costs, **{name: (0.0, 0.0)}) == costs
        given = replace(costs, **{name: (1.0, 2.0)})
        assert getattr(given, name) == (1.0, 2.0)
        assert getattr(given.regrouped(4), name) == (0.5, 0.5, 1.0, 1.0)
        assert {op: given.of(op, 1) for op in STAGE_TIMES[name]} == dict.fromkeys(STAGE_TIMES[name], 2.0)
        with pytest.raises(PlanError, match=f"costs of {name} are given for 3 stages, of forward for 2"):
            replace(costs, **{name: (1.0,) * 3})
        with pytest.raises(PlanError, match=f"the {name} time of stage 1 is -1.0; it must be finite and at least 0"):
            replace(costs, **{name: (1.0, -1.0)})
    with pytest.raises(AttributeError, match="no_such_cost"):
        costs.no_such_cost  # noqa: B018
    with pytest.raises(TypeError, match="no_such_cost"):
        StageCosts.uniform(2).__class__((1.0,), (1.0,), (1.0,), (1.0,), no_such_cost=1)


def test_type_checkers_know_every_cost() -> None:
    assert {one.name: one.default for one in fields(added_costs.CostSettings)} == COST_DEFAULTS
    assert {one.name: one.default for one in fields(added_costs.MeasuredSettings)} == MEASURED_DEFAULTS


def test_a_file_of_measured_values_has_those_of_features_by_their_names() -> None:
    for name in MEASURED_DEFAULTS:
        content = {"forward": [1.0, 2.0], name: [3.0, 4.0], "links": [[0, 1, 0.5]]}
        file = MeasuredFile.from_dict(content)
        assert getattr(file.values, name) == (3.0, 4.0)
        assert getattr(file.values.costs(2), name) == (3.0, 4.0)
        assert MeasuredFile.from_dict(file.to_dict()) == file
        assert Measured(**{name: [3.0, 4.0]}) == replace(Measured(), **{name: (3.0, 4.0)})
        with pytest.raises(PlanError, match=f"measured {name} is given for 2 stages; there are 3"):
            Measured(**{name: [3.0, 4.0]}).costs(3)
        with pytest.raises(PlanError, match=f"measured {name} is -1.0"):
            Measured(**{name: -1.0})
