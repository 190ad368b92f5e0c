"""Reads a tensor of a checkpoint. Whatever its bytes are, this needs no more memory than the tensor's shape.

torch's files are ZIP archives. A deflated entry may expand to a thousand times its size, and a pickle may make objects
of any size. So both are checked before torch reads them.
"""

import io
import pickletools
import zipfile
from collections.abc import Iterator

import torch

_LARGEST_ITEM = 16  # bytes of one element
_AROUND = 1 << 20  # bytes of an archive without its tensor
_LARGEST_PICKLE = 1 << 16  # bytes
_MADE_OF = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "collections OrderedDict"}


def largest_length(shape: list[int]) -> int:
    """Bytes that the archive of a tensor of ``shape`` may have."""
    return _LARGEST_ITEM * torch.Size(shape).numel() + _AROUND


def tensor_in(content: bytes) -> torch.Tensor:
    """The tensor that ``torch.save`` has written as ``content``. Raises ValueError for other content, or torch's
    error."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{entry.filename:.80} is compressed, which torch never does")
            if entry.filename.endswith(".pkl"):
                _check_pickle(entry, archive)
    saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(saved, torch.Tensor):
        raise ValueError(f"it holds a {type(saved).__name__}, not a tensor")
    return saved


def _check_pickle(entry: zipfile.ZipInfo, archive: zipfile.ZipFile) -> None:
    if entry.file_size > _LARGEST_PICKLE:
        raise ValueError(f"{entry.filename:.80} has {entry.file_size} bytes, more than a tensor's description")
    for name in _names_in(archive.read(entry)):
        if name not in _MADE_OF and not (name.startswith("torch ") and name.endswith("Storage")):
            raise ValueError(f"{entry.filename:.80} uses {name!r:.60}, which no tensor does")


def _names_in(pickled: bytes) -> Iterator[str]:
    """The functions and classes that a pickle names. For a computed name: the opcode."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in ("GLOBAL", "INST"):
            yield str(argument)
        elif operation.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            yield operation.name
