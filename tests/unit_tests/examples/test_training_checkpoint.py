"""Checkpoints: exact, whole or not there; made to do harm, damaged, and what users keep beside theirs."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gpt.checkpoint import LATEST, CheckpointWriter, check_layout, find_checkpoint, load_tensors
from examples.gpt.errors import CheckpointError, CheckpointLayoutError, CheckpointWriteError
from testkit.inputs.forged import sealed

TENSORS = {
    "w": torch.arange(40.0),
    "h": torch.randn(3, 2, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "rng": torch.arange(9, dtype=torch.uint8),
    "empty": torch.zeros(0),
}
LAYOUT = {"stages": 2, "layers_of_stages": [[0], [1, 2]]}
DESCRIPTION, TENSORS_FILE = "description.json", "__0_0.distcp"


@contextmanager
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with lone_group():
        yield


def save(folder: Path, step: int, keep: int = 1) -> Path:
    return CheckpointWriter(folder, keep, LAYOUT).save(
        step, {**TENSORS, "step": torch.tensor(float(step))}, {"n": step}
    )


def is_whole(path: Path, step: int | None = None) -> bool:
    """Whether what is loaded is what was saved in ``step``, to the bit."""
    found = find_checkpoint(path)
    expected = {**TENSORS, "step": torch.tensor(float(found.step))}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_tensors(found, tensors)
    assert found.progress == {"n": found.step}
    return step in (None, found.step) and all(tensor.equal(expected[name]) for name, tensor in tensors.items())


def refusal(path: Path) -> str:
    """How loading is refused; "" if it is not."""
    try:
        is_whole(path)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("given", ["checkpoints", ".", "checkpoints/step-00000004"])
def test_a_saved_checkpoint_loads_unchanged(tmp_path: Path, given: str) -> None:
    path = save(tmp_path / "checkpoints", 4)
    found = find_checkpoint(tmp_path / given)
    assert found.path.resolve() == path.resolve()
    check_layout(found, LAYOUT)
    assert is_whole(tmp_path / given, 4)
    with pytest.raises(CheckpointLayoutError, match=r"stages is 2 there and 3 here; width is None there and 8 here"):
        check_layout(found, {**LAYOUT, "stages": 3, "width": 8})
    with pytest.raises(CheckpointError, match=r"cannot be loaded: there is no model.unknown"):
        load_tensors(found, {"model.unknown": torch.zeros(1)})


def test_the_newest_are_kept_and_a_step_saved_again_leaves_the_first_whole(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST, "step-00000004", "step-00000005"]
    assert is_whole(tmp_path, 5)
    assert is_whole(tmp_path / "step-00000004", 4)
    again = save(tmp_path, 5, keep=2)
    assert again != tmp_path / "step-00000005"
    assert find_checkpoint(tmp_path).path == again
    assert is_whole(tmp_path / "step-00000005", 5)


# -- what somebody has made, or a disk has damaged ---


def forge(path: Path, **fields: Any) -> None:
    """Change fields of the description, with a right CRC-32; those of a tensor as ``tensor={...}``."""
    content = json.loads((path / DESCRIPTION).read_text())
    del content["crc32"]
    content["tensors"]["w"].update(fields.pop("tensor", {}))
    (path / DESCRIPTION).write_bytes(sealed(json.dumps({**content, **fields})))


def forge_tensors(path: Path, content: bytes) -> None:
    """Let the file of tensors be ``content``, with a right CRC-32, and all of it the tensor ``w``."""
    (path / TENSORS_FILE).write_bytes(content)
    forge(path, tensor={"offset": 0, "length": len(content)}, files={TENSORS_FILE: zlib.crc32(content)})


def archive(method: int = zipfile.ZIP_STORED, pickled: bytes | None = None) -> bytes:
    """The tensor of ``w``'s shape as ``torch.save`` writes it, with another compression or another pickle."""
    saved, made = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(40), saved)
    with zipfile.ZipFile(saved) as original, zipfile.ZipFile(made, "w", method) as other:
        for entry in original.infolist():
            is_pickle = pickled is not None and entry.filename.endswith(".pkl")
            other.writestr(entry.filename, pickled if is_pickle else original.read(entry))  # type: ignore[arg-type]
    return made.getvalue()


class Bomb:
    """Its pickle makes a folder where it is read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("was-run",)


BOMB = pickle.dumps(Bomb())
# Sets Path.parent, as a state with slots, in the whole process.
SETS_AN_ATTRIBUTE = b"cpathlib\nPosixPath\nN}X\x06\x00\x00\x00parentcpathlib\nPosixPath\n(X\x01\x00\x00\x00/tRs\x86b."
BYTEARRAY = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x40\x85R."  # a GiB, of 40 bytes
WHOLE = "it must be a whole number from 0"

REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"step": -5}, f"description.step is -5; {WHOLE}"),
    ({"step": True}, f"description.step is True; {WHOLE}"),
    ({"step": "4"}, f"description.step is '4'; {WHOLE}"),
    ({"layout": []}, "description.layout is []; it must be a dict"),
    ({"more": 1}, "['more'] is missing or unknown"),
    ({"format": 1}, "format is 1; this version reads 3"),
    ({"tensor": {"offset": 2**62}}, "cannot be loaded: "),
    ({"tensor": {"length": 8}}, "cannot be loaded: "),
    ({"tensor": {"shape": [8]}}, "cannot be loaded: w has shape [8] there and [40] here"),
    ({"tensor": {"shape": [-1]}}, f"description.tensors.w.shape[] is -1; {WHOLE}"),
    ({"tensor": {"path": "/etc/passwd"}}, "description.tensors.w: ['path'] is missing or unknown"),
    ({"tensor": {"relative_path": "../../x"}}, "its file '../../x' is not among files"),
    ({"tensor": {"relative_path": None}}, "relative_path is None; it must be a str"),
    ({"tensor": {"relative_path": "../x"}, "files": {"../x": 0}}, "'../x' is not a name of a tensor file"),
    ({"files": {TENSORS_FILE: 1}}, "__0_0.distcp is damaged: it does not have the CRC-32"),
]
REFUSED_TENSORS = {
    "runs code": (BOMB, "cannot be loaded"),
    "sets an attribute": (SETS_AN_ATTRIBUTE, "cannot be loaded"),
    "deflated": (archive(zipfile.ZIP_DEFLATED), "is compressed"),
    "of bzip2": (archive(zipfile.ZIP_BZIP2), "is compressed"),
    "makes a large object": (archive(pickled=BYTEARRAY), "uses '__builtin__ bytearray'"),
    "a large pickle": (archive(pickled=bytes(1 << 17)), "more than a tensor's description"),
    "too long": (archive() + bytes(1 << 21), "is said to have"),
    "no archive": (b"no archive", "not a zip file"),
}
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {}
for fields, words in REFUSED_FIELDS:
    REFUSED[f"description: {fields}"] = (lambda path, fields=fields: forge(path, **fields), words)
for name, (content, words) in REFUSED_TENSORS.items():
    REFUSED[f"tensors: {name}"] = (lambda path, content=content: forge_tensors(path, content), words)
for content in (b"", b"{", b"[]", b'{"format": 1}', BOMB):
    REFUSED[f"description: {content[:9]!r}"] = (
        lambda path, content=content: (path / DESCRIPTION).write_bytes(content),
        "description.json cannot be used: ",
    )
REFUSED["latest names no checkpoint"] = (lambda path: shutil.rmtree(path), "step-00000001/description.json cannot be")
REFUSED["no checkpoint"] = (lambda path: shutil.rmtree(path.parent), "there is no checkpoint at")


@pytest.mark.parametrize(("damage", "words"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_or_hostile_checkpoint_is_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], words: str
) -> None:
    """Nothing in it is run, and it takes no more memory than its tensors."""
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "checkpoints", 1)
    damage(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert words in refusal(path.parent)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert not (tmp_path / "was-run").exists()
    assert "parent" not in vars(type(path))


def test_the_pickle_of_torchs_tools_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1)
    (path / ".metadata").write_bytes(BOMB)
    assert is_whole(path)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("name", [LATEST, DESCRIPTION, TENSORS_FILE])
def test_a_flipped_bit_is_found_and_only_plain_files_are_opened(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoints"
    path = save(folder, 2)
    file = folder / LATEST if name == LATEST else path / name
    content = file.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 40)):
        for bit in (0, 4, 7):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            file.write_bytes(flipped)
            said = refusal(folder)
            if not said:  # for example a blank in the description
                assert name != TENSORS_FILE
                assert is_whole(folder), (position, bit)
            elif name != LATEST:
                assert name in said
                assert "give --resume an older checkpoint" in said
    file.unlink()
    os.mkfifo(file)  # a reader would wait for ever
    assert name in refusal(folder)
    file.unlink()
    (tmp_path / "moved").write_bytes(content)
    file.symlink_to(tmp_path / "moved")
    assert name in refusal(folder)


@pytest.mark.parametrize("operation", ["fsync", "rename", "replace", "mkdir"])
@pytest.mark.parametrize("number", range(1, 6))
def test_a_failed_save_leaves_nothing_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    save(tmp_path, 1)
    original, calls = getattr(os, operation), iter(range(1, 100))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, failing)
        with suppress(CheckpointWriteError):
            save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert all(is_whole(path) for path in tmp_path.glob("step-*"))
    assert is_whole(tmp_path)


# -- what is the user's ---


def test_saving_removes_and_overwrites_only_what_it_has_written(tmp_path: Path) -> None:
    folder, victim = tmp_path / "checkpoints", tmp_path / "victim"
    victim.write_text("precious")
    copied = save(folder, 1)
    for name in ("step-my-best", "step-00000099"):  # the second has a name like the program's own
        shutil.copytree(copied, folder / name)
    (folder / "step-00000003").mkdir()
    (folder / "step-00000003" / "notes").write_text("mine")
    (folder / "step-00000004").symlink_to(tmp_path)
    (folder / "step-00000007").write_text("mine")
    (folder / ".step-00000008.unfinished").symlink_to(tmp_path)
    forge(save(folder, 1, keep=9), name="../victim")
    theirs = {path.name for path in folder.iterdir()} - {"step-00000001", LATEST}
    (folder / f".{LATEST}.new").symlink_to(victim)  # a name under which the program writes
    for step in range(2, 10):
        last = save(folder, step)
        assert is_whole(folder)
    assert last.name == "step-00000009"
    assert {path.name for path in folder.iterdir()} == theirs | {LATEST, "step-00000009"}
    assert (folder / "step-00000003" / "notes").read_text() == "mine"
    assert is_whole(folder / "step-my-best")
    assert victim.read_text() == "precious"
