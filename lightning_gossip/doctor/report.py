"""What a doctor's visit has measured, as it is written down. Seconds, bytes and bytes a second throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of a host.

    Args:
        name: as GLOO_SOCKET_IFNAME takes it.
        address: IPv4; None where it has none.
        mtu: largest packet, in bytes.
        mbit: its speed in Mb/s as the driver tells it; None where it does not.
        up: whether it is.
    """

    name: str
    address: str | None
    mtu: int
    mbit: int | None
    up: bool


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where Gloo listens in a process, and why there.

    Args:
        address: that other workers connect with.
        interface: that has it; None if it is not known.
        because: how it was chosen, in words.
        towards_store: the interface that leads to the store of the job.
        lookup_s: how long this host took to look its own name up, in seconds; 0 if it was not looked up.
    """

    address: str
    interface: str | None
    because: str
    towards_store: str | None
    lookup_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a process is, before anything is measured.

    Args:
        host: the same for processes that share a network and a kernel.
        hostname: what the host calls itself.
        versions: by package.
        port: on which it answers other workers of this visit.
        files: how many files and sockets it may have open; None for no limit.
        agent_files: the same of torchrun's agent, where that holds the store.
        cores: of the CPU that it may use.
        gpu: kind of its device.
    """

    rank: int
    host: str
    hostname: str
    versions: Mapping[str, str]
    interfaces: Sequence[Interface]
    listening: Listening
    port: int
    files: int | None
    agent_files: int | None
    cores: int
    gpu: str | None = None

    @property
    def interface(self) -> Interface | None:
        """The one that Gloo uses."""
        return next((one for one in self.interfaces if one.name == self.listening.interface), None)

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Worker:
        """A worker from what :func:`dataclasses.asdict` has made of one, as JSON has it."""
        interfaces = tuple(Interface(**one) for one in written["interfaces"])
        return cls(**{**written, "interfaces": interfaces, "listening": Listening(**written["listening"])})


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a pair of workers, i below j, has measured with each other.

    Args:
        latency_s: of a message, half the median round trip.
        worst_s: half the longest round trip.
        there, back: bytes a second from i to j, and from j to i, one after the other.
        resent: packets that had to be sent again, over all packets with data; the worse end's. A full link loses some.
        resent_idle: the same, in packets, while only small messages were on the way: none is lost there for lack of room.
        clock_s: how far j's clock is ahead of i's.
        clock_error_s: bound of the error of that.
        path_mtu: largest packet of the connection, in bytes, as the kernel knows it.
        failed: what came in between, in words; what was measured before that counts.
        phase: what failed: ``"connect"``, ``"latency"`` or ``"bandwidth"``.
    """

    i: int
    j: int
    latency_s: float | None = None
    worst_s: float | None = None
    there: float | None = None
    back: float | None = None
    resent: float | None = None
    resent_idle: int | None = None
    clock_s: float | None = None
    clock_error_s: float | None = None
    path_mtu: int | None = None
    failed: str | None = None
    phase: str | None = None

    def turned(self) -> Link:
        """This link as i sees it, of what j has measured: rates there and back change places, and clocks their sign."""
        clock_s = None if self.clock_s is None else -self.clock_s
        return replace(self, there=self.back, back=self.there, clock_s=clock_s)

    @property
    def slower(self) -> float | None:
        """Bytes a second of the slower direction."""
        known = [rate for rate in (self.there, self.back) if rate is not None]
        return min(known) if known else None


@dataclass(frozen=True, kw_only=True)
class Store:
    """Calls of one worker to the store of the job, while all others call it too."""

    median_s: float
    p95_s: float
    calls: int


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """The time of an all-reduce of one size, over Gloo in host memory: the median of a few, of the slowest worker."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Rates of a GPU's copies, in bytes a second.

    Args:
        pin_s: seconds to pin :attr:`nbytes` of host memory.
        to_device, from_device: pinned.
        pageable: to the device from memory that is not pinned.
        on_device: from device memory to device memory, bytes copied.
    """

    nbytes: int
    pin_s: float
    to_device: float
    from_device: float
    pageable: float
    on_device: float


@dataclass(frozen=True, kw_only=True)
class Training:
    """What was measured of training the user's model on one worker.

    Args:
        step_s: seconds of each training step that was timed.
        parameters_bytes: of a model on its way.
        batch_size: samples of a batch; None if it cannot be told.
        optimizer: class of the optimizer.
        lr: of its first group, where its schedule has it highest; None where it has none.
        momentum: of its first group there; None where it has none.
        backward_share: of a step.
    """

    step_s: Sequence[float]
    parameters_bytes: int
    batch_size: int | None
    samples: int | None
    optimizer: str
    lr: float | None
    momentum: float | None
    backward_share: float


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """Curvature and noise of the loss where the user's model is now; measured by rank 0.

    Args:
        eigenvalues: the largest ones of the Hessian, descending.
        noise_variance: trace of the covariance of one batch's gradient; None where it could not be measured.
        loss: where that was measured.
        noise_curvature: that this noise sees.
        along_loss: mean curvature of the directions that the loss is in; None where noise hides it.
    """

    eigenvalues: Sequence[float]
    noise_variance: float | None = None
    loss: float | None = None
    noise_curvature: float | None = None
    along_loss: float | None = None


@dataclass(kw_only=True)
class Report:
    """All of a visit.

    Args:
        world_size: workers that the launcher has started.
        workers: those that came, by rank.
        links: of the pairs that were measured.
        pairs: that were to be measured.
        store, copies, training: by rank.
        all_reduce: by size, ascending; empty where there was none.
        all_reduce_failed: why, if one was tried and failed.
        failed: why the user's model could not be trained, by rank.
        left_out: what was not measured, and why, in sentences.
        seconds: that it took.
    """

    world_size: int
    workers: list[Worker]
    links: list[Link] = field(default_factory=list)
    pairs: int = 0
    store: dict[int, Store] = field(default_factory=dict)
    all_reduce: list[AllReduce] = field(default_factory=list)
    all_reduce_failed: str | None = None
    copies: dict[int, Copies] = field(default_factory=dict)
    training: dict[int, Training] = field(default_factory=dict)
    landscape: Landscape | None = None
    failed: dict[int, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks of each host, in the order of their first ones."""
        return hosts_of(self.workers)

    @property
    def host_of(self) -> dict[int, int]:
        """The place in :attr:`hosts` of each rank's host."""
        return {rank: place for place, ranks in enumerate(self.hosts) for rank in ranks}

    @property
    def between(self) -> list[Link]:
        """Links between workers of two hosts."""
        host = {worker.rank: worker.host for worker in self.workers}
        return [link for link in self.links if host[link.i] != host[link.j]]

    @property
    def inside(self) -> list[Link]:
        """Links between workers of one host."""
        host = {worker.rank: worker.host for worker in self.workers}
        return [link for link in self.links if host[link.i] == host[link.j]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "hosts": self.hosts}


def hosts_of(workers: Sequence[Worker]) -> list[list[int]]:
    """Ranks of each host, in the order of their first ones."""
    hosts: dict[str, list[int]] = {}
    for worker in sorted(workers, key=lambda worker: worker.rank):
        hosts.setdefault(worker.host, []).append(worker.rank)
    return list(hosts.values())
