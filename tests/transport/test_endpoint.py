"""Where sockets listen: what is told when other hosts cannot reach that, or when there is no such interface."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.transport.endpoint import Endpoint, endpoint, unreachable

GOOD = Endpoint("kernel a", "a", "10.0.0.1", "its host name 'a' resolves to that", ("eth0 10.0.0.1",))
BAD = Endpoint("kernel b", "b", "127.0.1.1", "its host name 'b' resolves to that", ("eth1 10.0.0.2",))


def test_a_loopback_address_among_two_hosts_is_named_with_what_to_set() -> None:
    said = unreachable({0: GOOD, 3: BAD})
    assert said is not None
    for words in ("Rank 3 on host 'b'", "127.0.1.1", "interface='eth1'", "GLOO_SOCKET_IFNAME=eth1", "eth1 10.0.0.2"):
        assert words in said


@pytest.mark.parametrize(
    "endpoints",
    [
        {0: GOOD, 1: GOOD._replace(network="kernel b")},
        {0: BAD, 1: BAD},  # one machine
        {0: GOOD, 1: BAD._replace(network=None)},  # one that may be the same machine
        {},
    ],
)
def test_what_may_work_is_not_refused(endpoints: dict[int, Endpoint]) -> None:
    assert unreachable(endpoints) is None


@dataclass
class Names:
    """What a host's name resolves to."""

    addresses: list[str]

    def __call__(self, host: str, *_: Any, **__: Any) -> list[Any]:
        if not self.addresses:
            raise socket.gaierror("Name or service not known")
        return [(None, None, None, "", (address, 0)) for address in self.addresses]


@pytest.mark.parametrize(
    ("resolves_to", "listens_at"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["203.0.113.7", "127.0.0.2"], "127.0.0.2"),  # the first is no address of this machine
        (["203.0.113.7"], "127.0.0.1"),  # as Gloo does
        ([], "127.0.0.1"),
    ],
)
def test_without_an_interface_the_hosts_own_name_decides(
    resolves_to: list[str], listens_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", Names(resolves_to))
    found = endpoint()
    assert found.address == listens_at
    assert found.is_loopback
    assert repr(socket.gethostname()) in found.reason


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nosuch0")
    with pytest.raises(ConfigurationError, match=r"GLOO_SOCKET_IFNAME=lo,nosuch0: .* no interface 'nosuch0', but .*lo"):
        endpoint()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert (endpoint().address, endpoint().reason) == ("127.0.0.1", "GLOO_SOCKET_IFNAME=lo")
