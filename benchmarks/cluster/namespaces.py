"""The namespaces of one host, made by util-linux, held open by a process of ours, and entered by others.

A host has its own network, its own process numbers (so nobody learns from the kernel that a process of another host has ended,
as on one machine) and its own mounts, only so that /proc shows the right numbers. Files are everybody's, as on one
that is shared.

The first process of the host is a ``cat`` that reads a pipe from here. When this process ends, however that happens, the pipe
closes, ``cat`` ends, and the kernel kills whatever runs in the host and takes its network away.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from lightning_gossip import ConfigurationError

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
_HOLD = "echo ready && exec cat"
_KINDS = ("pid", "net", "mnt")  # the mounts last: the names of the others are looked up through them
_END_S = 30.0


def unavailable() -> str | None:
    """Why this machine cannot have a cluster; None if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "hosts as network namespaces need root on Linux"
    if missing := sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None}):
        return f"hosts as network namespaces need {' and '.join(missing)}"
    probe = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, timeout=_END_S, check=False)
    return None if probe.returncode == 0 else f"this machine lets nobody make namespaces ({probe.stderr.strip()})"


class Namespaces:
    """Of one host.

    Attributes:
        first: number, out here, of the host's first process; it keeps the namespaces.
    """

    def __init__(self) -> None:
        self.first = 0
        self._holder: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Make them.

        Raises:
            ConfigurationError: if this machine does not.
        """
        pipe = subprocess.PIPE
        command = [*_unshare(), "sh", "-c", _HOLD]
        # a session of its own: Ctrl-C reaches the one who cleans up, and not what it has to clean up
        self._holder = holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise ConfigurationError(f"A host could not be made: {unavailable() or 'see the message above'}.")
        self.first = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])

    @property
    def prefix(self) -> tuple[str, ...]:
        """What goes before a command so that it runs in there."""
        return ("nsenter", "--target", str(self.first), "--net", "--pid", "--mount", "--")

    @property
    def name(self) -> str:
        """The kernel's, for :func:`remains`."""
        return os.readlink(f"/proc/{self.first}/ns/net")

    def configure(self, tool: str, *lines: str) -> None:
        """Let ``ip`` or ``tc`` do these lines in the network of the host.

        Raises:
            ConfigurationError: with the tool's words.
        """
        command = ["nsenter", "--target", str(self.first), "--net", "--", tool, "-batch", "-"]
        text = "\n".join(lines) + "\n"
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_END_S, check=False)
        if done.returncode != 0:
            raise ConfigurationError(f"{tool} refused one of {list(lines)}: {done.stderr.strip()}. Is it an old iproute2?")

    def processes(self) -> list[int]:
        """Numbers, out here, of what runs in the host, without its first process; zombies do not run."""
        mine = _namespace(self.first)
        found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        return [pid for pid in found if mine and pid != self.first and _namespace(pid) == mine]

    def close(self) -> None:
        """End the host and all that runs in it. May be called twice."""
        holder, self._holder = self._holder, None
        if holder is not None:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.close()
            holder.stdout.close()
            holder.wait(_END_S)


def remains(name: str) -> bool:
    """Whether a process is in the network of this name; afterwards it should be none."""
    return any(_link(path / "ns/net") == name for path in Path("/proc").iterdir() if path.name.isdigit())


def enter(first: int) -> None:
    """Let this process, which must have one thread, be in the host that the first process keeps, and its children too.

    As always with process numbers, only the children get new ones.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{first}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _KINDS]
    for file in files:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def _unshare() -> list[str]:
    return ["unshare", "--net", "--pid", "--mount", "--mount-proc", "--fork"]


def _namespace(pid: int) -> str | None:
    return _link(Path(f"/proc/{pid}/ns/pid"))


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None  # ended, or a zombie
