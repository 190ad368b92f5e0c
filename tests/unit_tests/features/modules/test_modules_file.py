"""Plans of several modules in JSON: read back equal; a file without a whole graph is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_pp.errors import FileFormatError, PlanError
from megatron_pp.features.modules.graph import module_graphs
from megatron_pp.features.modules.modules_plan import modules_plan, modules_spec
from megatron_pp.features.modules.modules_text import graphs_in
from megatron_pp.features.modules.modules_verify import verify_modules
from megatron_pp.plan.io.serialize import format_plan, load_plan, parse_plan
from megatron_pp.plan.ir.spec import ONE_QUEUE
from testkit.models.module_grids import encoders_before, module_on
from tests.unit_tests.features.modules.test_modules_plan import GRAPHS

FEWER_CHUNKS = graphs_in("vision*0.1/0.3=1; llm#5=1,0; vision>llm")[0]
REPLICAS = encoders_before(module_on("llm", 4, pp=2, dp=2), module_on("vision", dp=4))
LINES_OF_ONE_GRID = module_graphs([module_on("llm", 3, pp=2, dp=2, tp=2)], {})


@pytest.mark.parametrize("graph", [*GRAPHS.values(), FEWER_CHUNKS, *REPLICAS, *LINES_OF_ONE_GRID], ids=str)
@pytest.mark.parametrize(
    "fields", [{"forward_only": True}, {"variable_shapes": True, "release_after": 2, "device": (ONE_QUEUE,)}]
)
def test_a_plan_is_read_back_equal(graph: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    plan = modules_plan(modules_spec(graph, 3, **fields))
    path = tmp_path / "plan.json"
    path.write_text(format_plan(plan, "json", certified=True))
    found = load_plan(path)
    assert found == plan
    assert found.spec.describe() == plan.spec.describe()
    assert verify_modules(found).certificate == plan.certificate


def edited(**spec: Any) -> str:
    content = json.loads(format_plan(modules_plan(modules_spec(GRAPHS["in_bubbles"], 2)), "json"))
    content["spec"] |= spec
    return json.dumps(content)


LLM = {"name": "llm", "ranks": [[[0], [1]]], "chunk": 0, "times": [1, 2]}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"graph": 3}, "no object with a list of modules and their topology"),
        ({"graph": {"modules": [LLM]}}, "no object with a list of modules and their topology"),
        ({"graph": {"modules": [LLM], "topology": {"llm": "llm"}}}, "'llm' must be a list of names"),
        ({"graph": {"modules": [LLM], "topology": {"llm": ["lm"]}}}, "names a module 'lm'"),
        ({"graph": {"modules": [LLM, LLM], "topology": {}}}, "module llm is there twice"),
        ({"graph": {"modules": [{"name": "llm"}], "topology": {}}}, "each is an object with name, ranks"),
        ({"graph": {"modules": [{**LLM, "ranks": [[0, 1]]}], "topology": {}}}, "each is an object with name, ranks"),
        ({"graph": {"modules": [{**LLM, "ranks": [[[-1]]]}], "topology": {}}}, "each is an object with name, ranks"),
        ({"graph": {"modules": [{**LLM, "chunk": True}], "topology": {}}}, "each is an object with name, ranks"),
        ({"graph": {"modules": [{**LLM, "times": [1]}], "topology": {}}}, "each is an object with name, ranks"),
        ({"graph": {"modules": [{**LLM, "times": [1, float("nan")]}], "topology": {}}}, "finite and above 0"),
        ({"graph": {"modules": [LLM], "topology": {}}}, "num_chunks is 2; on the graph of its modules it is 1"),
        ({"policy": "batched"}, "policy is 'batched'; on the graph of its modules it is 'overlap'"),
        ({"graph": {"modules": [{**LLM, "ranks": [[[0]], [[1]]]}], "topology": {}}}, "2 pipelines"),
    ],
)
def test_a_file_without_a_whole_graph_is_refused(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        parse_plan(edited(**spec))


def test_a_module_graph_with_a_v_placement_is_refused() -> None:
    with pytest.raises(FileFormatError, match="several modules has no placement 'v' with 0 barriers"):
        parse_plan(edited().replace('"placement": "loop"', '"placement": "v"'))
