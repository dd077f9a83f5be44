"""Checkpoints that are there as a whole or not at all, whatever happens while they are written.

Lightning's own writer makes its temporary file in the system's folder for those and moves it over the old checkpoint. Where
the two are on different file systems that is a copy over the old one, and a full disk leaves neither. It also does not wait
for the disk, so that a crash of the machine may leave an empty file under the new name.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class WholeFiles(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside the old one and put in its place; remote ones as Lightning does."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        files, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(files, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_checkpoint(checkpoint, Path(local))


def whole_files_unless(chosen: CheckpointIO | None) -> CheckpointIO:
    """What writes a strategy's checkpoints.

    Args:
        chosen: by the user; one that hands on to another, as AsyncCheckpointIO does, gets whole files where it has no other.
    """
    if chosen is None:
        return WholeFiles()
    if isinstance(chosen, _WrappingCheckpointIO):
        chosen.checkpoint_io = WholeFiles()  # does nothing where the user has given one
    return chosen


class WritesWholeFiles:
    """A strategy's ``checkpoint_io``, which writes whole files; before one of Lightning's strategies among the bases."""

    _checkpoint_io: CheckpointIO | None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes checkpoints. Made when it is asked for: a Trainer would take one that is there for the user's choice."""
        self._checkpoint_io = whole_files_unless(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write it as a whole or not at all.

    Raises:
        OSError: if the disk is full, with the bytes that are needed and those that are free.
    """
    try:
        write_whole(path, lambda file: _save(checkpoint, file))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed = sum(leaf.nbytes for leaf in tree_leaves(checkpoint) if isinstance(leaf, torch.Tensor))
        free = shutil.disk_usage(path.parent).free
        room = f"the checkpoint has {needed / 1e6:,.1f} MB of tensors, and {free / 1e6:,.1f} MB are free"
        raise OSError(error.errno, f"{os.strerror(error.errno)}: {room}", str(path)) from error


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    """``torch.save``; trouble with the file is an OSError, and not torch's "unexpected pos"."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file beside, wait until it is on the disk, and put it in the old one's place.

    Args:
        path: of the file; its folder is made if there is none.
        write: writes into the open file.

    Raises:
        OSError: if the disk is full, say; the old file is as it was, and nothing is left of the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too
    finally:
        os.close(folder)
