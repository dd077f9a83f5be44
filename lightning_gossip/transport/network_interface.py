"""Which network interface a job's sockets listen on (docs/security.md)."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct

from lightning_gossip.errors import ConfigurationError

log = logging.getLogger(__name__)

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IFREQ_BYTES = 40
_BACKLOG = 2048  # as torch's store


def address_of(interface: str) -> str:
    """The IPv4 address of an interface of this machine.

    Raises:
        ConfigurationError: if there is no such interface, or it has none.

    >>> address_of("lo")
    '127.0.0.1'
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConfigurationError(f"interface={interface!r} is not one of this machine's: {', '.join(names)}.")
    request = struct.pack(f"{_IFREQ_BYTES}s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            raise ConfigurationError(f"interface={interface!r} has no IPv4 address. Give one that is up and has.") from error
    return socket.inet_ntoa(answer[20:24])


def bind(interface: str) -> dict[str, str | None]:
    """Make Gloo and NCCL listen on one interface; what they read, until :func:`restore`.

    Returns:
        The environment variables as they were.
    """
    address_of(interface)
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, interface))
    return before


def restore(before: dict[str, str | None]) -> None:
    """Put the environment back."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def listen(interface: str | None, host: str, port: int) -> int | None:
    """A listening socket for the job's store, on one interface only, or of one family only; torch's own listens on all of both.

    To a listener of both families a client of IPv4 has an address like ``::ffff:10.0.0.1``. Torch looks the name of each client
    up on the thread that serves, and asks a name server for such an address even where /etc/hosts has it without the prefix.

    Args:
        interface: on which; all if None.
        host: the address at which the other workers look for the store.
        port: the same.

    Returns:
        A file descriptor, for the store to own; None if something listens there already, as this process does when it has
        trained before, and where torch's own does: on all interfaces for a host that is named, or has an address of IPv6.

    Raises:
        ConfigurationError: if the host is not the address of the interface.
    """
    if interface is None:
        return _listen("", port) if _is_ipv4(host) else None
    address = address_of(interface)
    if address not in {info[4][0] for info in socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)}:
        raise ConfigurationError(
            f"interface={interface!r} has the address {address}, and the other workers look for the store at {host}"
            f" (MASTER_ADDR). Set MASTER_ADDR={address}."
        )
    return _listen(address, port)


def _is_ipv4(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return False
    return True


def _listen(address: str, port: int) -> int | None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        log.info(
            "Something listens on %s:%d already; the store of the job is taken to be there: %s", address or "*", port, error
        )
        return None
    listener.listen(_BACKLOG)
    return listener.detach()
