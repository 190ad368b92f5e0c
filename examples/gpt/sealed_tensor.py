"""A tensor of a checkpoint, read in no more memory than its shape says, whatever its bytes are.

torch's files are ZIP archives. An entry that is deflated expands to a thousand times its size, and a pickle may make
objects of any size; so both are looked at before torch reads them.
"""

import io
import pickletools
import zipfile
from collections.abc import Iterator

import torch

_LARGEST_ITEM = 16  # bytes of one element
_AROUND = 1 << 20  # bytes of an archive besides its tensor
_LARGEST_PICKLE = 1 << 16  # bytes
_MADE_OF = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "collections OrderedDict"}


def largest_length(shape: list[int]) -> int:
    """Bytes that the archive of a tensor of ``shape`` may have."""
    return _LARGEST_ITEM * torch.Size(shape).numel() + _AROUND


def tensor_in(content: bytes) -> torch.Tensor:
    """The tensor that ``torch.save`` has written. Raises ValueError for anything else, and what torch raises."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{entry.filename:.80} is compressed, as nothing that torch has saved")
            if entry.filename.endswith(".pkl"):
                _check_pickle(entry, archive)
    saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(saved, torch.Tensor):
        raise ValueError(f"a {type(saved).__name__} is in the place of a tensor")
    return saved


def _check_pickle(entry: zipfile.ZipInfo, archive: zipfile.ZipFile) -> None:
    if entry.file_size > _LARGEST_PICKLE:
        raise ValueError(f"{entry.filename:.80} has {entry.file_size} bytes, more than a tensor's description")
    for name in _names_in(archive.read(entry)):
        if name not in _MADE_OF and not (name.startswith("torch ") and name.endswith("Storage")):
            raise ValueError(f"{entry.filename:.80} makes use of {name!r:.60}, as no tensor does")


def _names_in(pickled: bytes) -> Iterator[str]:
    """The functions and classes that it names; of one whose name is put together, that."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in ("GLOBAL", "INST"):
            yield str(argument)
        elif operation.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            yield operation.name
