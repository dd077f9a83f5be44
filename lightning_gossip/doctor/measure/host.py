"""What one process can tell of itself and of its host: versions, interfaces, limits."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from lightning_gossip.doctor.report import Interface, Listening, Worker
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.open_files import raise_limit
from lightning_gossip.runtime.store_client import uses_agent_store
from lightning_gossip.transport.network_interface import VARIABLES, address_of

if sys.platform != "win32":
    import resource

_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921  # linux/sockios.h
_UP = 1  # linux/if.h
_PACKAGES = ("torch", "lightning", "lightning-gossip", "torchmetrics", "numpy")


def this_worker(rank: int, listener: socket.socket, store: tuple[str, int]) -> Worker:
    """What this process is.

    Args:
        rank: of it.
        listener: on which it answers other workers.
        store: host and port of the job's.
    """
    found = interfaces()
    return Worker(
        rank=rank,
        host=host(),
        hostname=socket.gethostname(),
        versions=versions(),
        interfaces=found,
        listening=listening(found, store),
        port=listener.getsockname()[1],
        files=raise_limit(),
        agent_files=_agent_files(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )


def host() -> str:
    """A name of this host, equal for processes with one kernel and one network: a container with its own network is a host."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def versions() -> dict[str, str]:
    """Versions of what has to be the same on all workers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        with suppress(RuntimeError, AttributeError):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def interfaces() -> tuple[Interface, ...]:
    """The network interfaces that this process sees."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                address: str | None = address_of(name)
            except ConfigurationError:
                address = None
            flags, mtu = _asked(probe, _SIOCGIFFLAGS, name, "h"), _asked(probe, _SIOCGIFMTU, name, "i")
            found.append(Interface(name=name, address=address, mtu=mtu, mbit=_mbit(name), up=bool(flags & _UP)))
    return tuple(found)


def listening(found: Sequence[Interface], store: tuple[str, int]) -> Listening:
    """Where Gloo listens: at GLOO_SOCKET_IFNAME, else at the address that this host's name leads to, else at the loopback.

    Args:
        found: this process's interfaces.
        store: host and port of the job's.

    Raises:
        ConfigurationError: for a GLOO_SOCKET_IFNAME that is none of them.
    """
    wanted, lookup_s = os.environ.get(VARIABLES[0], "").split(",")[0], 0.0
    if wanted:
        address, because = address_of(wanted), f"{VARIABLES[0]}={wanted}"
    else:
        name = socket.gethostname()
        began_s = now_s()
        own = _usable_address(name)
        lookup_s = now_s() - began_s
        address = own or "127.0.0.1"
        because = f"the host's name {name!r} leads there" if own else f"the host's name {name!r} leads to no address of it"
    return Listening(
        address=address,
        interface=_with_address(found, address),
        because=because,
        towards_store=_with_address(found, _source_towards(store)),
        lookup_s=lookup_s,
    )


def listen(address: str) -> socket.socket:
    """A listening socket at a free port of an address, for other workers of the visit."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.bind((address, 0))
    made.listen(64)
    return made


def _asked(probe: socket.socket, request: int, name: str, kind: str) -> int:
    answer = fcntl.ioctl(probe, request, struct.pack("16s24x", name.encode()))
    return int(struct.unpack_from(kind, answer, 16)[0])


def _mbit(name: str) -> int | None:
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):  # the driver does not tell
        return None
    return speed if speed > 0 else None


def _usable_address(name: str) -> str | None:
    """The first address of a name at which this host can listen, as Gloo looks for it."""
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in infos:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0))
            return str(address[0])
    return None


def _with_address(found: Sequence[Interface], address: str | None) -> str | None:
    if address is not None and address.startswith("127."):
        return "lo"
    return next((one.name for one in found if one.address == address), None)


def _source_towards(store: tuple[str, int]) -> str | None:
    """The address from which this host would reach the store; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(store)
        return str(probe.getsockname()[0])
    return None


def _agent_files() -> int | None:
    """How many files torchrun's agent may have open; None where it holds no store, has no limit, or nobody tells."""
    if not uses_agent_store() or sys.platform != "linux":
        return None
    with suppress(OSError):
        limit, _ = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
        return None if limit == resource.RLIM_INFINITY else limit
    return None
