"""Whether a process of the same machine has ended, told by the kernel: sooner and surer than by late heartbeats.

Only the kernel's word counts that there is no such process. Any other trouble with its file (no descriptor left, for example)
says nothing about it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

_ENDED = {"Z", "X"}  # states of /proc/<pid>/stat: a zombie's parent has not asked for it yet


def identity() -> str | None:
    """What names this process among all: kernel, name space, number and start time; None where /proc does not tell."""
    place = _place()
    if place is None:
        return None
    try:
        found = _state(os.getpid())
    except OSError:
        return None
    return None if found is None else f"{place} {os.getpid()} {found[1]}"


def has_ended(name: str | None) -> bool:
    """Whether the process of an :func:`identity` has ended; False for one that cannot be seen from here."""
    place = _place()
    if name is None or place is None or not name.startswith(f"{place} "):
        return False
    pid, started = name.split(" ")[-2:]
    try:
        found = _state(int(pid))
    except OSError:
        return False  # it cannot be seen at present
    return found is None or found[0] in _ENDED or found[1] != started


def _place() -> str | None:
    """The running kernel and the name space of process numbers: where both are equal, a number means the same process."""
    return _place_of(os.getpid())


@lru_cache(maxsize=1)
def _place_of(_: int) -> str | None:
    """Read once in the life of a process: neither changes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _state(pid: int) -> tuple[str, str] | None:
    """State and start time; None if there is no such process.

    Raises:
        OSError: if that cannot be seen.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()  # the name before may hold anything
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends while its file is read
        return None
    return fields[0], fields[19]
