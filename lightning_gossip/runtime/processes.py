"""Whether a process of the same machine has ended, told by the kernel: sooner and surer than by its silence."""

from __future__ import annotations

import os
from pathlib import Path

_ENDED = {"Z", "X"}  # states of /proc/<pid>/stat: a zombie's parent has not asked for it yet


def identity() -> str | None:
    """What names this process among all: kernel, name space, number and start time; None where /proc does not tell."""
    place = _place()
    started = None if place is None else _state(os.getpid())
    return None if place is None or started is None else f"{place} {os.getpid()} {started[1]}"


def has_ended(name: str | None) -> bool:
    """Whether the process of an :func:`identity` has ended; False for one that cannot be seen from here."""
    place = _place()
    if name is None or place is None or not name.startswith(f"{place} "):
        return False
    pid, started = name.split(" ")[-2:]
    found = _state(int(pid))
    return found is None or found[0] in _ENDED or found[1] != started


def _place() -> str | None:
    """The running kernel and the name space of process numbers: where both are equal, a number means the same process."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _state(pid: int) -> tuple[str, str] | None:
    """State and start time; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()  # the name before may hold anything
    except OSError:
        return None
    return fields[0], fields[19]
