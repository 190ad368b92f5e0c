"""Plans in files: what is written is read back equal; bad files are refused in one line."""

from __future__ import annotations

import json
import os

import pytest

from megatron_pp.errors import FileFormatError, PlanError
from megatron_pp.plan.costs import files
from megatron_pp.plan.costs.files import write_whole
from megatron_pp.plan.io.serialize import format_plan, load_plan, parse_plan
from megatron_pp.plan.ir.instruction import Instruction
from testkit.inputs.plan_text import save_plan, small_plan


def test_files_round_trip_and_leave_nothing_beside_them(tmp_path):
    plan = small_plan("interleaved_1f1b", 2, 2, 4, grad_sync="explicit", param_sync=True, policy="batched")
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert os.listdir(tmp_path) == [path.name]


# Plans of one program each whose instructions have, between them, every key: they need not be valid.
EVERY_KEY = [
    '{"op": "F", "stage": 1, "chunk": 0, "mb": 3}',
    '{"op": "I", "stage": 1, "chunk": 0, "mb": 3, "slice": 2}',
    '{"op": "RECV_F", "stage": 1, "chunk": 0, "mb": 3, "peer": 0}',
    '{"op": "FREE_B", "stage": 3, "chunk": 1, "mb": 0, "peer": 0, "slice": 0, "tensor": "skip"}',
    '{"op": "HAND_B", "stage": 3, "chunk": 1, "mb": 0}',
    '{"op": "PARAM_SYNC", "stage": 3, "chunk": 1, "mb": null}',
    '{"op": "BATCH", "stage": null, "chunk": null, "mb": null, "members": ['
    '{"op": "SEND_F", "stage": 1, "chunk": 0, "mb": 3, "peer": 0, "tensor": "kv"}, '
    '{"op": "RECV_B", "stage": 1, "chunk": 0, "mb": 2, "peer": 0}]}',
    '{"op": "PAIR", "stage": null, "chunk": null, "mb": null, "members": ['
    '{"op": "F", "stage": 1, "chunk": 0, "mb": 3}, {"op": "B", "stage": 3, "chunk": 1, "mb": 0}]}',
]


def test_the_keys_of_an_instruction():
    nodes = [json.loads(text) for text in EVERY_KEY]
    plan = parse_plan(edited(num_chunks=2, programs=[nodes, nodes]))
    assert list(map(str, plan.programs[0])) == [
        *("F0.3", "I0.3s2", "RECV_F0.3", "FREE_B1.0s0:skip", "HAND_B1.0", "PARAM_SYNC1"),
        *("[SEND_F0.3:kv RECV_B0.2]", "(F0.3 B1.0)"),
    ]
    assert plan.programs[0][3] == Instruction("FREE_B", stage=3, mb=0, peer=0, chunk=1, part=0, tensor="skip")
    written = format_plan(plan, "json")
    assert all(f"   {text}" in written.splitlines() or f"   {text}," in written.splitlines() for text in EVERY_KEY)
    assert json.loads(written)["programs"] == [nodes, nodes]
    assert json.loads(written)["version"] == 2
    assert parse_plan(written) == plan


def with_node(node):
    """A file whose first instruction is ``node``."""
    content = json.loads(format_plan(small_plan(), "json"))
    content["programs"][0][0] = node
    return json.dumps(content)


F = {"op": "F", "stage": 0, "chunk": 0, "mb": 0}
B = {"op": "B", "stage": 0, "chunk": 0, "mb": 1}
SEND = {"op": "SEND_F", "stage": 0, "chunk": 0, "mb": 0, "peer": 1}
GROUP = {"stage": None, "chunk": None, "mb": None}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (3, "instruction 0: 3 is no object with a known 'op'"),
        ({}, "no object with a known 'op'"),
        ({**F, "op": "G"}, "no object with a known 'op'"),
        ({**F, "op": ["F"]}, "no object with a known 'op'"),
        ({**F, "mb": "0"}, r"instruction 0 \(F\): 'mb' is '0'; it must be a whole number of at least 0"),
        ({**F, "mb": -1}, "'mb' is -1"),
        ({**F, "mb": True}, "'mb' is True"),
        ({**F, "mb": 10**9}, "'mb' is 1000000000"),
        ({**F, "stage": -1}, "'stage' is -1"),
        ({"op": "F", "stage": 0, "mb": 0}, "'chunk' is None"),
        ({**F, "slice": -1}, "'slice' is -1"),
        ({**F, "tensor": "x"}, "F takes no tensor"),
        ({**SEND, "peer": None}, "'peer' is None"),
        ({**SEND, "tensor": 3}, "'tensor' is 3; it must be a name"),
        ({**SEND, "tensor": "a\nb"}, "is not an instruction"),
        ({"op": "GRAD_SYNC", "stage": 0, "chunk": 0, "mb": None, "slice": 1}, "GRAD_SYNC"),
        ({"op": "PAIR", **GROUP}, "the 'members' of a PAIR are a list of single instructions"),
        ({"op": "PAIR", **GROUP, "members": [F]}, "is no pair; it holds a forward and the full backward"),
        ({"op": "PAIR", **GROUP, "members": [B, F]}, "is no pair"),
        ({"op": "PAIR", **GROUP, "members": [F, {**B, "mb": 0}]}, "is no pair"),
        ({"op": "PAIR", **GROUP, "members": [F, {**B, "op": "I"}]}, "is no pair"),
        ({"op": "BATCH", **GROUP, "members": []}, "a batch holds sends and receives only, and at least one"),
        ({"op": "BATCH", **GROUP, "members": [F]}, "a batch holds sends and receives only"),
        ({"op": "BATCH", **GROUP, "members": SEND}, "the 'members' of a BATCH are a list of single instructions"),
        ({"op": "BATCH", **GROUP, "members": [{**SEND, "op": []}]}, "no object with a known 'op'"),
        ({"op": "BATCH", **GROUP, "members": [{"op": "BATCH", **GROUP, "members": [SEND]}]}, "list of single instruct"),
    ],
)
def test_bad_instructions_are_refused_in_one_line(node, message):
    with pytest.raises(FileFormatError, match=f"programs, rank 0: .*{message}") as caught:
        parse_plan(with_node(node))
    assert "\n" not in str(caught.value)


def edited(**changes):
    content = json.loads(format_plan(small_plan(), "json"))
    for key, value in changes.items():
        target = content["spec"] if key in content["spec"] else content
        target[key] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (format_plan(small_plan(), "json")[:200], "not a JSON file, or cut off"),
        ("{" * 100_000, "not a JSON file, or cut off"),
        ("{}", "no plan that this reads"),
        (edited(version=3), "no plan that this reads"),
        (edited(version=True), "no plan that this reads"),
        (edited(spec=[]), "'spec' is missing or no object"),
        (edited(pipeline_size=3), "programs of 2 ranks; the pipeline has 3"),
        (edited(pipeline_size="2"), "pipeline_size is '2'; it must be of type int"),
        (edited(forward_only=0), "forward_only is 0; it must be of type bool"),
        (edited(schedule="1f1b\x1b[2J"), r"schedule is '1f1b.x1b.2J'; it holds a character that cannot be printed"),
        (edited(num_microbatches=10**7), "rank 0 has .* instructions for 1 chunk.* of 10000000 microbatches"),
        (edited(num_microbatches=10**9), "1000000000 microbatches make 2,000,000,000 forwards; a plan has at most"),
        (edited(num_microbatches=0), "number of microbatches is 0"),
        (edited(policy="hopeful"), "policy 'hopeful' is not known"),
        (edited(placement="spiral"), "placement 'spiral' is not known"),
        (edited(placement=["loop"]), "is not known"),
        (edited(programs="F0.0"), "'programs' is missing or no list with an entry per rank"),
        (edited(version=1), "no plan that this reads; it would hold"),
        (edited(orders=[[]]), "orders of 1 ranks; the pipeline has 2"),
    ],
)
def test_bad_json_is_refused_in_one_line(text, message):
    with pytest.raises(PlanError, match=message) as caught:
        parse_plan(text)
    assert "\n" not in str(caught.value)


def test_unknown_and_missing_fields_are_named():
    content = json.loads(format_plan(small_plan(), "json"))
    content["spec"]["colour"] = "red"
    with pytest.raises(FileFormatError, match="the spec has no field 'colour'"):
        parse_plan(json.dumps(content))
    del content["spec"]["colour"], content["spec"]["num_chunks"]
    with pytest.raises(FileFormatError, match="the spec lacks num_chunks"):
        parse_plan(json.dumps(content))


def test_a_file_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(files, "_LARGEST_STREAM", 1000)
    with pytest.raises(FileFormatError, match="/dev/zero: longer than 1,000 characters"):
        load_plan("/dev/zero")


def test_files_that_are_missing_or_no_text_are_refused(tmp_path):
    binary = tmp_path / "plan.csv"
    binary.write_bytes(b"\xff\xfe\x00F")
    with pytest.raises(FileFormatError, match="not a text file in UTF-8"):
        load_plan(binary)
    with pytest.raises(FileFormatError, match=r"can ?not be read"):
        load_plan(tmp_path / "nothing.csv")


def test_a_refused_format_writes_nothing(tmp_path):
    with pytest.raises(FileFormatError, match="not as 'pickle'"):
        save_plan(small_plan(), tmp_path / "plan.pickle")
    assert os.listdir(tmp_path) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "out.csv"
    write_whole(target, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileFormatError, match=r"can ?not be written"):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.csv"]
