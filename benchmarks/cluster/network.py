"""Hosts behind one switch; each link is limited in both directions, by a token bucket (tc tbf) at each of its ends.

The switch is a bridge in a network of its own, so nothing of it is seen outside. A partition is a second bridge, to which the
ports of one side move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.cluster.namespaces import Namespaces, unavailable
from lightning_gossip import ConfigurationError
from recipes.slow_network import token_bucket

INTERFACE = "eth0"
_BURST_S = 0.002  # 256 kB at 1 Gb/s, what the kernel's timer needs there
_BURST_BYTES = 16_000
_WHOLE_BURST_BYTES = 80_000
"""The kernel hands a link up to 64 kB at once. A bucket that is smaller splits them into packets of 1,500 bytes, which cost 30
times as much of the processor; on a slow link one that is larger would let a short transfer pass at once."""
_WHOLE_FROM = 10e6  # bit/s
_MOST = 200  # of one /24
_BPF_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM of linux/filter.h
_PASS, _DROP = 0xFFFFFFFF, 2  # TC_ACT_UNSPEC, TC_ACT_SHOT
_FLAGS_AT, _PORT_AT = 47, 36  # of TCP, behind 14 bytes of Ethernet and 20 of IP
_SYN, _ACK = 0x02, 0x10


@dataclass(frozen=True)
class Host:
    """One of the machines.

    Args:
        number: its place among the hosts.
        namespaces: its own.
    """

    number: int
    namespaces: Namespaces = field(repr=False)
    interface: str = INTERFACE

    @property
    def address(self) -> str:
        return f"10.213.0.{self.number + 1}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """What goes before a command that shall run there."""
        return self.namespaces.prefix


class Network:
    """Machines with links of limited rate, until :func:`network` removes them.

    Attributes:
        hosts: the machines.
    """

    def __init__(self, hosts: int, rate_mbit: float) -> None:
        if not 1 <= hosts <= _MOST:
            raise ConfigurationError(f"hosts={hosts}: write a number from 1 to {_MOST}.")
        self.hosts = tuple(Host(number, Namespaces()) for number in range(hosts))
        self._rate_mbit = rate_mbit
        self._switch = Namespaces()

    def open(self) -> None:
        """Make hosts, links and switch.

        Raises:
            ConfigurationError: where this machine cannot.
        """
        if reason := unavailable():
            raise ConfigurationError(f"This machine cannot have a cluster: {reason}.")
        self._switch.open()
        self._switch.configure("ip", *(f"link add {bridge} type bridge" for bridge in ("whole", "apart")))
        self._switch.configure("ip", *(f"link set {bridge} up" for bridge in ("whole", "apart")))
        for host in self.hosts:
            host.namespaces.open()
            port, end = _port(host), f"peer name {INTERFACE} netns {host.namespaces.first}"
            self._switch.configure(
                "ip", f"link add {port} type veth {end}", f"link set {port} master whole", f"link set {port} up"
            )
            # no address of version 6 on the link, which would be one more to choose from
            ups = [f"link set {INTERFACE} addrgenmode none", f"link set {INTERFACE} up", "link set lo up"]
            host.namespaces.configure("ip", f"address add {host.address}/24 dev {INTERFACE}", *ups)
            self._limit(host, self._rate_mbit, "add")

    def set_rate(self, host: Host, rate_mbit: float) -> None:
        """Let a host's link have this rate from now on, in each direction."""
        self._limit(host, rate_mbit, "change")

    def cut(self, host: Host) -> None:
        """Pull a host's cable: its interface knows that, the others do not."""
        self._switch.configure("ip", f"link set {_port(host)} down")

    def part(self, hosts: Sequence[Host]) -> None:
        """Lose all packets between these hosts and the others. Nobody is told."""
        self._switch.configure("ip", *(f"link set {_port(host)} master apart" for host in hosts))

    def lose(self, host: Host, share: float) -> None:
        """Lose a share of the packets of a host's link, at random, in each direction."""
        # classic BPF: a random word, below the threshold or not
        limit = round(share * 0xFFFFFFFF)
        program = f"4,32 0 0 {_BPF_RANDOM},53 0 1 {limit},6 0 0 {_PASS},6 0 0 {_DROP}"
        self._filter(host.namespaces, INTERFACE, program)
        self._filter(self._switch, _port(host), program)

    def set_mtu(self, host: Host, size: int, *, at_switch: bool = False) -> None:
        """Let packets of a host's link have this many bytes at most: at the host, which knows it, or at the switch.

        What the switch is too small for it loses, and tells nobody. All hosts then hand over one packet at a time: a bridge
        of the kernel lets several that it was handed as one pass, whatever their size.
        """
        if at_switch:
            for sender in self.hosts:
                sender.namespaces.configure("ip", f"link set {INTERFACE} gso_max_segs 1")
        namespaces, interface = (self._switch, _port(host)) if at_switch else (host.namespaces, INTERFACE)
        namespaces.configure("ip", f"link set {interface} mtu {size}")

    def close_ports(self, host: Host, *, but: int) -> None:
        """Let a host's firewall drop what asks for a connection with it, at all ports but one, and answer nobody."""
        syn = f"48 0 0 {_FLAGS_AT},84 0 0 {_SYN | _ACK},21 0 3 {_SYN}"
        program = f"7,{syn},40 0 0 {_PORT_AT},21 1 0 {but},6 0 0 {_DROP},6 0 0 {_PASS}"
        self._filter(host.namespaces, INTERFACE, program)

    def heal(self, *hosts: Host) -> None:
        """Undo cuts and partitions, of all hosts if none is named; rates stay."""
        ports = [_port(host) for host in hosts or self.hosts]
        self._switch.configure("ip", *(f"link set {port} master whole" for port in ports), *(f"link set {p} up" for p in ports))

    def close(self) -> None:
        """End everything. May be called twice."""
        for namespaces in (*(host.namespaces for host in self.hosts), self._switch):
            namespaces.close()

    @staticmethod
    def _filter(namespaces: Namespaces, interface: str, program: str) -> None:
        """Let a program of classic BPF look at what comes in at an interface."""
        namespaces.configure(
            "tc",
            f"qdisc add dev {interface} clsact",
            f"filter add dev {interface} ingress bpf direct-action bytecode '{program}'",
        )

    def _limit(self, host: Host, rate_mbit: float, verb: str) -> None:
        if rate_mbit <= 0:
            raise ConfigurationError(f"rate_mbit={rate_mbit}: write a rate above 0, or cut the link.")
        rate = rate_mbit * 1e6
        burst = max(_WHOLE_BURST_BYTES if rate >= _WHOLE_FROM else _BURST_BYTES, round(rate / 8 * _BURST_S))
        bucket = token_bucket(f"{round(rate)}bit", f"{burst}b")
        host.namespaces.configure("tc", f"qdisc {verb} dev {INTERFACE} {bucket}")
        self._switch.configure("tc", f"qdisc {verb} dev {_port(host)} {bucket}")


@contextmanager
def network(hosts: int, *, rate_mbit: float) -> Iterator[Network]:
    """A network of hosts, all links of one rate at first; gone at the end, with all that runs in it.

    Args:
        hosts: how many, at most 200.
        rate_mbit: of each link in each direction, in Mb/s.

    Raises:
        ConfigurationError: where this machine cannot have one; the message says why.
    """
    made = Network(hosts, rate_mbit)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _port(host: Host) -> str:
    return f"port{host.number}"
