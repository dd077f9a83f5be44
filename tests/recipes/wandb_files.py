"""Reads what wandb writes offline: protocol buffers in LevelDB's log format, after seven bytes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _MAGIC = 32768, 7, b":W&B"
_FULL, _LAST = 1, 4  # kinds of a piece: all of a record, or its end


def records(folder: Path) -> list[Any]:
    """The records of the one offline run below a folder, in order."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = []
    for encoded in _pieces(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(encoded)
        found.append(record)
    return found


def _pieces(content: bytes) -> Iterator[bytes]:
    assert content.startswith(_MAGIC)
    at, record = _HEADER, b""
    while at + _HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            yield record
            record = b""
