"""An instruction prints as it parses, and what is no instruction is refused with the text that was found."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pp.errors import InstructionError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import CHUNK_OPS, POST_OPS, Instruction, batch, format_program, instruction
from megatron_pp.plan.ir.instruction_text import op_name, parse_instruction, parse_program

indices = st.integers(min_value=0, max_value=999_999_999)
CELL_OPS = sorted(ins.SINGLE_OPS - CHUNK_OPS - ins.RELEASE_OPS)
cells = st.builds(instruction, st.sampled_from(CELL_OPS), indices, indices)
marks = st.builds(instruction, st.sampled_from(sorted(CHUNK_OPS)), indices)
batchable = st.builds(instruction, st.sampled_from(sorted(POST_OPS)), indices, indices)
batches = st.builds(batch, st.lists(batchable, min_size=1, max_size=6))
names = st.from_regex(r"[A-Za-z_]\w{0,63}", fullmatch=True).filter(str.isascii)
moves = st.sampled_from(sorted(ins.TRANSFER_OPS | ins.RELEASE_OPS))
named = st.builds(lambda at, name: at._replace(tensor=name), st.builds(instruction, moves, indices, indices), names)
instructions = st.one_of(cells, marks, batches, named)


@given(st.lists(instructions, max_size=9))
def test_programs_and_instructions_print_as_they_parse(program: list[Instruction]) -> None:
    assert parse_program(format_program(program)) == program
    for at in program:
        assert parse_instruction(f"  {at}\n") == parse_instruction(str(at)) == at


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F0.3", instruction("F", 0, 3)),
        ("B12.0", instruction("B", 12, 0)),
        ("I0.2", instruction("I", 0, 2)),
        ("W1.7", instruction("W", 1, 7)),
        ("SEND_F1.2", instruction("SEND_F", 1, 2)),
        ("FREE_B0.15", instruction("FREE_B", 0, 15)),
        ("HAND_F1.0", instruction("HAND_F", 1, 0)),
        ("GRAD_SYNC0", instruction("GRAD_SYNC", 0)),
        ("PARAM_SYNC3", instruction("PARAM_SYNC", 3)),
        ("F2.3s1", Instruction("F", mb=3, chunk=2, part=1)),
        ("SEND_F0.3:skip", Instruction("SEND_F", mb=3, tensor="skip")),
        ("RECV_B1.3s0:kv", Instruction("RECV_B", mb=3, chunk=1, part=0, tensor="kv")),
        ("[SEND_F0.3 RECV_B0.2]", batch([instruction("SEND_F", 0, 3), instruction("RECV_B", 0, 2)])),
    ],
)
def test_an_instruction_prints_and_parses(text: str, expected: Instruction) -> None:
    assert parse_instruction(text) == expected
    assert str(expected) == text


def test_every_op_has_a_name_in_words() -> None:
    assert all(map(op_name, ins.ALL_OPS))
    assert instruction("F", 0, 3).name == "forward of chunk 0, microbatch 3"
    assert instruction("GRAD_SYNC", 1).name == "gradient sync of chunk 1"
    assert parse_instruction("[SEND_F0.3 RECV_B0.2]").name == "batch [SEND_F0.3 RECV_B0.2]"


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "F0", "F0.", "F.1", "f0.1", "X0.1", "F0.1.2", "F-1.0", "F0.-1", "F0,1", "F 0.1", "F0.1234567890"),
        *("GRAD_SYNC", "GRAD_SYNC0.1", "PARAM_SYNC1.0", "F0.1 B0.1", "F\u0660.1"),
        *("[", "[]", "]", "[F0.1]", "[SEND_F0.1", "SEND_F0.1]", "[[SEND_F0.1]]", "[GRAD_SYNC0]", "[(F0.1 B0.2)]"),
        *("(", "()", "(F0.1)", "(F0.1 B0.1)", "(F0.1 I0.2)", "(B0.1 F0.2)", "(F0.1 B0.2 B0.3)", "((F0.1 B0.2))"),
        *("F0.1s", "F0.1s-1", "F0.1:x", "SEND_F0.1:", "SEND_F0.1:1x", "SEND_F0.1:x y", "GRAD_SYNC0s1"),
        *("SEND_F0.1:x s1", "F0.0 [SEND_F0.0", "F0.0 SEND_F0.0]", "F0.0 ] B0.0", "[SEND_F0.0 [RECV_F0.1]]"),
    ],
)
def test_text_that_is_no_instruction_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(InstructionError) as caught:
        parse_instruction(text)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 200


def test_the_refusal_says_what_would_be_right() -> None:
    with pytest.raises(InstructionError, match=r"'Q7' is not an instruction; it would look like F0\.3"):
        parse_instruction("Q7")
    with pytest.raises(InstructionError, match=r"'GRAD_SYNC0\.1': GRAD_SYNC takes no microbatch \(as in GRAD_SYNC0\)"):
        parse_instruction("GRAD_SYNC0.1")
    with pytest.raises(InstructionError, match=r"'F0': F takes a chunk and a microbatch"):
        parse_instruction("F0")


def test_a_batch_holds_sends_and_receives_only() -> None:
    with pytest.raises(InstructionError, match="sends and receives only"):
        batch([instruction("F", 0, 0)])
    with pytest.raises(InstructionError, match="at least one"):
        batch([])


def test_equal_instructions_are_one_object_and_survive_pickling() -> None:
    assert instruction("F", 0, 3) is instruction("F", 0, 3)
    at = parse_instruction("[SEND_F0.3 RECV_B0.2]")
    assert pickle.loads(pickle.dumps(at)) == at
