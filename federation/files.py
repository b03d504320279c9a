"""Files that are whole or not there: write beside, flush to the disk, rename."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:  # the deployment's long-lived watchers write files too, and torch would be most of their memory
    import torch


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process at a time into the block; the others wait. ``path`` is the lock's own file, which stays.

    Without locks (Windows, some network file systems, a folder that is not there) all go in side by side: what they
    write must be whole anyway.
    """
    if fcntl is None or not path.parent.is_dir():
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[Path]:
    """Gives a temporary path to write to and moves it to ``path`` at the end of the block.

    A crash at any moment leaves the old content or the new, never a part: the bytes are on the disk before the name
    points to them, and the folder's entry after it. An error inside the block leaves the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, mode)
        _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush(path.parent)


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a file whole; see `replacing`."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(data)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, str] | None = None) -> None:
    """Writes CPU tensors as a safetensors file, whole and without a copy in memory; ``header`` is text about them.

    Raises OSError where it cannot be written; the old file is left then.
    """
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        content = {name: value.detach().contiguous() for name, value in tensors.items()}
        try:
            save_file(content, temporary, dict(header or {}))
        except SafetensorError as error:
            raise OSError(f"{path} could not be written: {error}") from error


def load_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The CPU tensors and the header of a file of `save_tensors`. Raises OSError where it is absent or not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return tensors, dict(file.metadata() or {})
    except SafetensorError as error:
        raise OSError(f"{path} is no whole safetensors file: {error}") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
