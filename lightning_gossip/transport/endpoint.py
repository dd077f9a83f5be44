"""Where a worker's sockets listen, and whether the other hosts of its job can reach that.

Gloo listens on the interface of ``GLOO_SOCKET_IFNAME``, and without it at the address that the host's own name resolves to.
That is often a loopback address (Debian writes 127.0.1.1 into /etc/hosts): right on one machine, and of no use to another one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.transport.network_interface import address_of

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY = "0.0.0.0"
_LOOPBACK = "127.0.0.1"  # what Gloo takes where the host's name resolves to nothing that it can listen at


class Endpoint(NamedTuple):
    """What a worker tells the others of it.

    Args:
        network: what the workers have in common that reach each other's loopback addresses; None where that cannot be told.
        host: the name of the machine.
        address: at which its sockets listen.
        reason: why there.
        interfaces: those of the machine that others may reach, with their addresses.
    """

    network: str | None
    host: str
    address: str
    reason: str
    interfaces: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback


def endpoint() -> Endpoint:
    """Endpoint of this process, as the environment has it now.

    Raises:
        ConfigurationError: if ``GLOO_SOCKET_IFNAME`` names no interface of this machine.
    """
    host, named = socket.gethostname(), os.environ.get(_VARIABLE)
    if named:
        address, reason = _of_interfaces(named), f"{_VARIABLE}={named}"
    else:
        address, reason = _of_host(host), f"its host name {host!r} resolves to that"
    return Endpoint(_network(), host, address, reason, tuple(_reachable()))


def unreachable(endpoints: Mapping[int, Endpoint]) -> str | None:
    """What is wrong with the endpoints of a job, and what to set; None if nothing can be seen to be.

    Args:
        endpoints: by rank.
    """
    networks = {each.network for each in endpoints.values()}
    if len(networks) < 2 or None in networks:
        return None
    return next((advice(rank, each) for rank, each in endpoints.items() if each.is_loopback), None)


def advice(rank: int, found: Endpoint) -> str:
    """What to set where a worker listens at an address that other hosts do not reach."""
    example = found.interfaces[0].split()[0] if found.interfaces else "eth0"
    there = ", ".join(found.interfaces) or "none with an address but the loopback"
    return (
        f"Rank {rank} on host {found.host!r} listens at {found.address} ({found.reason}), which no other host reaches. Pass"
        f" interface={example!r} to the strategy, or set {_VARIABLE}={example} on that host (its interfaces: {there}), or let"
        " its host name resolve to the address that the others reach."
    )


def _of_interfaces(named: str) -> str:
    known, names = [name for _, name in socket.if_nameindex()], named.split(",")  # torch takes several, and uses them in turn
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{_VARIABLE}={named}: this machine has no interface {name!r}, but {', '.join(known)}.")
    return next((address for name in names if (address := _address(name)) is not None), _ANY)


def _of_host(host: str) -> str:
    try:
        found = [info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return _LOOPBACK
    return next((str(address) for address in found if _can_listen(str(address))), _LOOPBACK)


def _can_listen(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _reachable() -> list[str]:
    found = {name: _address(name) for _, name in socket.if_nameindex()}
    return [f"{name} {at}" for name, at in found.items() if at is not None and not ipaddress.ip_address(at).is_loopback]


def _address(name: str) -> str | None:
    """The IPv4 address of an interface; None if it has none."""
    try:
        return address_of(name)
    except ConfigurationError:
        return None


def _network() -> str | None:
    """The running kernel and its name space of networks."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return None
