"""Checkpoints: exact, whole or not there; made to do harm, damaged, and what users keep beside theirs."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import signal
import zipfile
import zlib
from collections.abc import Iterator
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
    """How loading is refused, in bounded time; "" if it is not."""
    try:
        with deadline():
            is_whole(path)
    except CheckpointError as error:
        return str(error)
    return ""


@contextmanager
def deadline() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it hangs")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def forge(path: Path, **fields: Any) -> None:
    """Change fields of the description, with a right CRC-32; those of a tensor as ``tensor={...}``."""
    content = json.loads((path / DESCRIPTION).read_text())
    del content["crc32"]
    content["tensors"]["w"].update(fields.pop("tensor", {}))
    (path / DESCRIPTION).write_bytes(sealed(json.dumps({**content, **fields})))


@pytest.mark.parametrize("given", ["checkpoints", ".", "checkpoints/step-00000004"])
def test_a_saved_checkpoint_loads_unchanged(tmp_path: Path, given: str) -> None:
    path = save(tmp_path / "checkpoints", 4)
    found = find_checkpoint(tmp_path / given)
    assert found.path.resolve() == path.resolve()
    check_layout(found, LAYOUT)
    assert is_whole(tmp_path / given, 4)
    with pytest.raises(CheckpointLayoutError, match=r"stages is 2 there and 3 here; width is None there and 8 here"):
        check_layout(found, {**LAYOUT, "stages": 3, "width": 8})


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


def test_missing_checkpoints_and_unwritable_folders_raise_errors(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match=f"{tmp_path}/checkpoints cannot be written"):
        save(tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / LATEST).write_text("step-00000009\n")
    with pytest.raises(CheckpointError, match=r"step-00000009.* cannot be used"):
        find_checkpoint(tmp_path)


# -- what somebody has made ---

# Sets Path.parent, as a state with slots, in the whole process.
_VICTIM = b"cpathlib\nPosixPath\n(X\x07\x00\x00\x00/victimtR"
SETS_AN_ATTRIBUTE = b"cpathlib\nPosixPath\nN}X\x06\x00\x00\x00parent" + _VICTIM + b"s\x86b."


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", [".metadata", DESCRIPTION, TENSORS_FILE, "a forged file"])
@pytest.mark.parametrize("kind", ["runs", "sets an attribute"])
def test_a_checkpoint_never_runs_pickled_code(tmp_path: Path, name: str, kind: str) -> None:
    path, proof = save(tmp_path / "checkpoints", 1), tmp_path / "was-run"
    content = pickle.dumps(_Bomb(proof)) if kind == "runs" else SETS_AN_ATTRIBUTE
    (path / (TENSORS_FILE if name == "a forged file" else name)).write_bytes(content)
    if name == "a forged file":
        forge(path, tensor={"offset": 0, "length": len(content)}, files={TENSORS_FILE: zlib.crc32(content)})
    try:
        if name == ".metadata":
            assert is_whole(path)  # for torch's own tools: never opened here
        else:
            assert ("cannot be loaded" if name == "a forged file" else name) in refusal(path)
        assert not proof.exists()
        assert Path("/some/file").parent == Path("/some")
    finally:
        if "parent" in vars(type(path)):
            del type(path).parent


@pytest.mark.parametrize("file", ["../../x", "/etc/passwd", DESCRIPTION, "", 0, None, [TENSORS_FILE], {}])
def test_a_description_that_names_another_place_is_refused(tmp_path: Path, file: object) -> None:
    path = save(tmp_path, 1)
    forge(path, tensor={"relative_path": file})
    assert f"{file!r}" in refusal(path)
    if isinstance(file, str):
        forge(path, tensor={"relative_path": file}, files={file: 0})
        assert f"{file!r} is not a name of a tensor file" in refusal(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step": -5}, "description.step is -5; it must be a whole number from 0"),
        ({"step": 1.9}, "description.step is 1.9; it must be a whole number from 0"),
        ({"step": True}, "description.step is True; it must be a whole number from 0"),
        ({"step": "4"}, "description.step is '4'; it must be a whole number from 0"),
        ({"layout": []}, "description.layout is []; it must be a dict"),
        ({"more": 1}, "['more'] is missing or unknown"),
        ({"format": 1}, "format is 1; this version reads 3"),
        ({"format": True}, "format is True; this version reads 3"),
        (b"", "description.json cannot be used: "),
        (b"{", "description.json cannot be used: "),
        (b"[]", "description.json cannot be used: "),
        (b'{"format": 1}', "description.json cannot be used: "),
        (b'{"format": 2, "step": 1}', "description.json cannot be used: "),
        (b"\xc3\xbf", "description.json cannot be used: "),
        ({"tensor": {"offset": 2**62}}, "cannot be loaded: "),
        ({"tensor": {"offset": 4}}, "cannot be loaded: "),
        ({"tensor": {"length": 8}}, "cannot be loaded: "),
        ({"tensor": {"shape": [8]}}, "cannot be loaded: w has shape [8] there and [40] here"),
        ({"files": {TENSORS_FILE: 1}}, "__0_0.distcp is damaged: it does not have the CRC-32"),
        ({"files": {TENSORS_FILE: "1"}}, "description.files.__0_0.distcp is '1'; it must be a whole number from 0"),
        ({"tensor": {"shape": [-1]}}, "description.tensors.w.shape[] is -1; it must be a whole number from 0"),
        ({"tensor": {"path": "/etc/passwd"}}, "description.tensors.w: ['path'] is missing or unknown"),
    ],
)
def test_an_impossible_checkpoint_description_is_refused_with_a_reason(
    tmp_path: Path, fields: dict[str, Any] | bytes, words: str
) -> None:
    path = save(tmp_path, 1)
    if isinstance(fields, bytes):
        (path / DESCRIPTION).write_bytes(fields)
        assert "give --resume an older" in refusal(path)
    else:
        forge(path, **fields)
    assert words in refusal(path)


def rezipped(content: bytes, method: int, pickled: bytes | None = None) -> bytes:
    """An archive of torch's, with other entries."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(made, "w", method) as other:
        for entry in archive.infolist():
            data = archive.read(entry)
            other.writestr(entry.filename, pickled if pickled and entry.filename.endswith(".pkl") else data)
    return made.getvalue()


BYTEARRAY = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x40\x85R."  # a GiB, of 40 bytes


@pytest.mark.parametrize(
    ("forged", "words"),
    [
        (lambda saved: rezipped(saved, zipfile.ZIP_DEFLATED), "is compressed"),
        (lambda saved: rezipped(saved, zipfile.ZIP_BZIP2), "is compressed"),
        (lambda saved: rezipped(saved, zipfile.ZIP_STORED, BYTEARRAY), "uses '__builtin__ bytearray'"),
        (lambda saved: rezipped(saved, zipfile.ZIP_STORED, bytes(1 << 17)), "more than a tensor's description"),
        (lambda saved: saved + bytes(1 << 21), "is said to have"),
        (lambda saved: b"no archive", "not a zip file"),
    ],
)
def test_a_compressed_checkpoint_is_refused_before_it_expands(tmp_path: Path, forged: Any, words: str) -> None:
    path = save(tmp_path, 1)
    saved = io.BytesIO()
    torch.save(torch.zeros(40), saved)
    content = forged(saved.getvalue())
    (path / TENSORS_FILE).write_bytes(content)
    forge(path, tensor={"offset": 0, "length": len(content)}, files={TENSORS_FILE: zlib.crc32(content)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert words in refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: there is no model.unknown"):
        load_tensors(find_checkpoint(tmp_path), {"model.unknown": torch.zeros(1)})


@pytest.mark.parametrize("name", [LATEST, DESCRIPTION, TENSORS_FILE])
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "device"])
def test_only_plain_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "checkpoints"
    path = save(folder, 1)
    file = folder / LATEST if name == LATEST else path / name
    file.rename(tmp_path / "moved")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else tmp_path / "moved")
    assert name in refusal(folder)


def test_a_link_that_waits_for_a_write_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / f".{LATEST}.new").symlink_to(tmp_path / "mine")
    assert is_whole(save(folder, 1))
    assert (tmp_path / "mine").read_text() == "precious"


# -- damage ---


@pytest.mark.parametrize("name", [LATEST, DESCRIPTION, TENSORS_FILE])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoints"
    path = save(folder, 2)
    file = folder / LATEST if name == LATEST else path / name
    content = file.read_bytes()
    for position in {*range(0, len(content), max(1, len(content) // 40)), len(content) - 1}:
        for bit in (0, 4, 7):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            file.write_bytes(flipped)
            told = refusal(folder)
            if not told:
                assert name != TENSORS_FILE
                assert is_whole(folder), (position, bit)
            elif name != LATEST:
                assert name in told
                assert "give --resume an older checkpoint" in told
            assert "weights_only" not in told
    if name == TENSORS_FILE:
        file.write_bytes(content[:50])
        assert "__0_0.distcp is damaged" in refusal(folder)


@pytest.mark.parametrize("operation", ["fsync", "rename", "replace"])
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


def test_saving_removes_only_what_it_has_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    copied = save(folder, 1)
    shutil.copytree(copied, folder / "step-my-best")
    shutil.copytree(copied, folder / "step-00000099")  # a copy under a name like ours
    (folder / "step-00000002").mkdir()
    (folder / "step-00000003").mkdir()
    (folder / "step-00000003" / "notes").write_text("mine")
    (folder / "step-00000004").symlink_to(tmp_path)
    (folder / "step-00000005").symlink_to(tmp_path / "nowhere")
    (folder / "step-7").write_text("mine")
    (folder / "step-00000007").write_text("mine")
    (folder / ".step-00000008.unfinished").symlink_to(tmp_path)
    theirs = {path.name for path in folder.iterdir()} - {"step-00000001", LATEST}
    for step in range(2, 10):
        last = save(folder, step)
        assert is_whole(folder)
    assert last.name == "step-00000009"
    assert {path.name for path in folder.iterdir()} == theirs | {LATEST, "step-00000009"}
    assert (folder / "step-00000003" / "notes").read_text() == "mine"
    assert is_whole(folder / "step-my-best")


def test_a_forged_description_has_nothing_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    folder = tmp_path / "checkpoints"
    for name in ("../victim", str(victim), "../../victim"):
        forge(save(folder, 1), name=name)
    save(folder, 2)
    assert victim.exists()
    assert len(list(folder.glob("step-*"))) == 4  # nor the forged ones themselves
