"""What is wrong with a cluster, in words, and what to do; from measurements alone.

A host is compared with the others: by its better links, so that one slow host does not make the others look slow. What each
verdict means is in docs/doctor.md.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_gossip.doctor.clocks import offsets
from lightning_gossip.doctor.report import Link, Report, Worker
from lightning_gossip.doctor.words import at_rate, duration, many_times, ranks_of
from lightning_gossip.runtime.open_files import STORE_CONNECTIONS, needed

SLOW = 3.0  # times slower than the others
SLOW_LATENCY, LEAST_LATENCY_S = 5.0, 1e-3  # times longer than the others', and not below
LOSS = 0.01  # packets sent again, of all
CLOCK_S = 0.1
STORE_S = 0.01  # of a call
FASTER = 4.0  # an interface than the one that is used
SLOW_LOOKUP_S = 1.0  # of a host's own name: resolvers ask again after five seconds
REACHED = 10.0  # of an interface's speed: a tenth is little
_MUST_AGREE = ("torch", "lightning", "lightning-gossip", "python")
_VIRTUAL = re.compile(r"^(lo$|docker|podman|br-|virbr|lxc|veth|cni|flannel|cali|vxlan|cilium|tun|tap|wg|tailscale|dummy)")
_SHOWN = 6  # pairs that are named one by one


@dataclass(frozen=True)
class Finding:
    """A verdict on the cluster: what is wrong, or to be known, and what to do.

    Args:
        kind: of the table in docs/doctor.md.
        grave: a problem (exit status 1), and not a remark.
        ranks: whom it is about.
        sentence: what is.
        advice: what to do.
    """

    kind: str
    grave: bool
    ranks: Sequence[int]
    sentence: str
    advice: str


def findings(report: Report) -> list[Finding]:
    """All that can be said, problems first."""
    slow = _bandwidth(report)
    lossy = _loss(report, slow)
    found = [
        *_missing(report),
        *_closed(report),
        *_broken(report),
        *_all_reduce(report),
        *_interfaces(report),
        *_name_server(report),
        *_mtu(report),
        *slow,
        *_latency(report),
        *lossy,
        *_versions(report),
        *_files(report),
        *_clocks(report),
        *_store(report),
        *_gpus(report),
        *_model(report),
        *_reached(report, [*slow, *lossy]),
        *_cores(report),
    ]
    return sorted(found, key=lambda finding: not finding.grave)


def status(found: Iterable[Finding]) -> Literal[0, 1]:
    """The exit status: 1 if there is a problem."""
    return 1 if any(finding.grave for finding in found) else 0


def name_of_host(report: Report, host: int) -> str:
    """A host as a reader finds it: by its name where no other has that, and by its ranks."""
    ranks = report.hosts[host]
    names = [next(one.hostname for one in report.workers if one.rank == ranks_[0]) for ranks_ in report.hosts]
    own = names[host]
    return f"host {own} ({ranks_of(ranks)})" if names.count(own) == 1 else f"the host of {ranks_of(ranks)}"


# ---- who is there, and is the same


def _missing(report: Report) -> list[Finding]:
    came = {worker.rank for worker in report.workers}
    missing = [rank for rank in range(report.world_size) if rank not in came]
    if not missing:
        return []
    return [
        Finding(
            "missing",
            True,
            missing,
            f"{ranks_of(missing).capitalize()} of {report.world_size} did not come to the store of the job.",
            "Look at the log of that process: it may have failed. If it waits, its host cannot reach MASTER_ADDR:MASTER_PORT:"
            " open that port on the host of rank 0.",
        )
    ]


def _versions(report: Report) -> list[Finding]:
    found = []
    for package in sorted({name for worker in report.workers for name in worker.versions}):
        by_version: dict[str, list[int]] = {}
        for worker in report.workers:
            by_version.setdefault(worker.versions.get(package, "none"), []).append(worker.rank)
        if len(by_version) > 1:
            common = max(by_version, key=lambda version: len(by_version[version]))
            others = [rank for version, ranks in by_version.items() if version != common for rank in ranks]
            told = ", ".join(f"{version} on {ranks_of(ranks)}" for version, ranks in by_version.items())
            grave = package in _MUST_AGREE
            found.append(
                Finding("versions", grave, others, f"{package} differs: {told}.", f"Install {package} {common} everywhere.")
            )
    return found


def _files(report: Report) -> list[Finding]:
    size = report.world_size
    need = needed(size, connections=STORE_CONNECTIONS, serves=True)
    few = [worker for worker in report.workers if worker.files is not None and worker.files < need]
    found = []
    if few:
        limit = min(worker.files for worker in few if worker.files is not None)
        ranks = [worker.rank for worker in few]
        found.append(
            Finding(
                "open files",
                True,
                ranks,
                f"{ranks_of(ranks).capitalize()} may open {limit:,} files, and a job of {size} workers needs up to {need:,}.",
                f"Raise the hard limit there: `ulimit -Hn {need}` as root, LimitNOFILE= of a service, --ulimit nofile= of a"
                " container.",
            )
        )
    agent = STORE_CONNECTIONS * size + needed(1, connections=0, serves=False)
    lacking = [worker for worker in report.workers if worker.agent_files is not None and worker.agent_files < agent]
    if lacking:
        found.append(
            Finding(
                "open files",
                True,
                [worker.rank for worker in lacking],
                f"torchrun's agent holds the store of {size} workers and may open {lacking[0].agent_files:,} files; it needs up"
                f" to {agent:,}.",
                f"Write `ulimit -n {agent}` before torchrun.",
            )
        )
    return found


def _cores(report: Report) -> list[Finding]:
    found = []
    for place, ranks in enumerate(report.hosts):
        cores = max(worker.cores for worker in report.workers if worker.rank in ranks)
        if cores < len(ranks):
            found.append(
                Finding(
                    "cores",
                    False,
                    ranks,
                    f"{len(ranks)} workers of {name_of_host(report, place)} share {cores} cores of the CPU.",
                    "What was measured there is slower than it would be with a core for each.",
                )
            )
    return found


# ---- interfaces


def _interfaces(report: Report) -> list[Finding]:
    if len(report.hosts) < 2:
        return []
    found: dict[tuple[str, str], list[int]] = {}
    for ranks in report.hosts:
        worker = _worker(report, ranks[0])
        used, why, better = worker.interface, worker.listening.because, worker.listening.towards_store or "INTERFACE"
        told: tuple[str, str] | None = None
        if _on_loopback(worker):
            told = (
                f"Gloo listens on the loopback, where no other host reaches it: {why}.",
                f"Set GLOO_SOCKET_IFNAME={better} there, or put the host's name and address into /etc/hosts.",
            )
        elif used is not None and _VIRTUAL.match(used.name):
            told = (
                f"Gloo uses {used.name}, a network inside the host: {why}.",
                f"Set GLOO_SOCKET_IFNAME={better} there.",
            )
        elif used is not None and used.mbit:
            up = [one for one in worker.interfaces if one.up and one.address and not _VIRTUAL.match(one.name)]
            best = max(up, key=lambda one: one.mbit or 0, default=used)
            if best.mbit and best.mbit >= FASTER * used.mbit:
                told = (
                    f"Gloo uses {used.name} ({used.mbit:,} Mb/s), and {best.name} ({best.mbit:,} Mb/s) is up: {why}.",
                    f"Set GLOO_SOCKET_IFNAME={best.name} there.",
                )
        if told is not None:
            found.setdefault(told, []).extend(ranks)
    return [
        Finding("interface", True, ranks, f"On the hosts of {ranks_of(ranks)} {sentence}", advice)
        for (sentence, advice), ranks in found.items()
    ]


def _name_server(report: Report) -> list[Finding]:
    slow = [worker for worker in report.workers if worker.listening.lookup_s > SLOW_LOOKUP_S]
    if not slow:
        return []
    longest = max(slow, key=lambda worker: worker.listening.lookup_s)
    ranks = [worker.rank for worker in slow]
    return [
        Finding(
            "name server",
            False,
            ranks,
            f"On the hosts of {ranks_of(ranks)} it took up to {longest.listening.lookup_s:.3g} s to look the host's own name"
            f" {longest.hostname!r} up: its name server is slow, or does not answer. Each start waits as long.",
            "Put the host's name and address into /etc/hosts, or set GLOO_SOCKET_IFNAME there: then nobody looks it up.",
        )
    ]


def _on_loopback(worker: Worker) -> bool:
    return worker.listening.address.startswith("127.") or worker.listening.address == "::1"


def _mtu(report: Report) -> list[Finding]:
    between = {rank for link in report.between for rank in (link.i, link.j)}
    by_mtu: dict[int, list[int]] = {}
    for worker in report.workers:
        if worker.rank in between and worker.interface is not None and worker.interface.name != "lo":
            by_mtu.setdefault(worker.interface.mtu, []).append(worker.rank)
    stalled, found = _stalled(report), []
    if stalled:
        pairs = _pairs(stalled)
        differ = f" The hosts' interfaces have MTUs of {_listed(by_mtu)}." if len(by_mtu) > 1 else ""
        found.append(
            Finding(
                "MTU",
                True,
                sorted({rank for link in stalled for rank in (link.i, link.j)}),
                f"Small messages pass between {pairs}, and 16 kB do not: something on the way loses large packets.{differ}",
                "Set one MTU on all interfaces and switches (`ip link set INTERFACE mtu 1500`); `ping -M do -s 1472 HOST` shows"
                " what passes.",
            )
        )
    elif len(by_mtu) > 1:
        common = max(by_mtu, key=lambda mtu: len(by_mtu[mtu]))
        others = [rank for mtu, ranks in by_mtu.items() if mtu != common for rank in ranks]
        sentence = f"The MTUs of the interfaces differ: {_listed(by_mtu)}. Large packets may be lost on the way."
        found.append(
            Finding("MTU", False, others, sentence, f"Set {common} bytes everywhere: `ip link set INTERFACE mtu {common}`.")
        )
    return found


def _stalled(report: Report) -> list[Link]:
    """Links that small messages pass, and large packets do not."""
    return [link for link in report.between if link.failed and link.phase == "bandwidth" and link.slower is None]


def _listed(by_mtu: Mapping[int, Sequence[int]]) -> str:
    return ", ".join(f"{mtu} bytes on {ranks_of(ranks)}" for mtu, ranks in sorted(by_mtu.items()))


# ---- links


def _closed(report: Report) -> list[Finding]:
    hidden = {worker.rank for worker in report.workers if len(report.hosts) > 1 and _on_loopback(worker)}  # told by _interfaces
    closed = [link for link in report.links if link.phase == "connect" and not {link.i, link.j} & hidden]
    found = []
    links = _of_hosts(report)
    for place, ranks in enumerate(report.hosts):
        own = [link for link in links[place] if not {link.i, link.j} & hidden]
        shut = [link for link in own if link.phase == "connect"]
        alone = len(report.hosts) == 2 and place == 0  # said once
        if len(own) > 1 and len(shut) == len(own) and not alone:
            whose = name_of_host(report, place)
            sentence = f"No other host can connect with {whose}: {_reasons(shut)}."
            found.append(Finding("closed", True, ranks, sentence, _OPEN))
            closed = [link for link in closed if link not in shut]
    if closed:
        ranks = sorted({rank for link in closed for rank in (link.i, link.j)})
        found.append(Finding("closed", True, ranks, f"No connection between {_pairs(closed)}: {_reasons(closed)}.", _OPEN))
    return found


_OPEN = (
    "Gloo listens at a free port for each connection: open all ports between the workers, at least those of"
    " /proc/sys/net/ipv4/ip_local_port_range, at the address that the table of workers shows."
)


def _reasons(links: Iterable[Link]) -> str:
    return "; ".join(sorted({str(link.failed) for link in links}))


def _broken(report: Report) -> list[Finding]:
    broken = [link for link in report.links if link.failed and link.phase == "latency"]
    if not broken:
        return []
    ranks = sorted({rank for link in broken for rank in (link.i, link.j)})
    sentence = f"A connection between {_pairs(broken)} was made and carried nothing: {_reasons(broken)}."
    return [Finding("closed", True, ranks, sentence, "Look at the other worker's log, and at firewalls that inspect traffic.")]


def _all_reduce(report: Report) -> list[Finding]:
    if report.all_reduce_failed is None:
        return []
    ranks = [worker.rank for worker in report.workers]
    sentence = f"All pairs could connect, and an all-reduce of Gloo's failed: {report.all_reduce_failed}"
    advice = f"Look at the workers' logs: one may have ended. Else a firewall lets the doctor through and not Gloo. {_OPEN}"
    return [Finding("all-reduce", True, ranks, sentence, advice)]


def _bandwidth(report: Report) -> list[Finding]:
    sends = _by_host(report, lambda link, first: link.there if first else link.back)
    receives = _by_host(report, lambda link, first: link.back if first else link.there)
    found, slow, host_of, links = [], set(), report.host_of, _of_hosts(report)
    if len(sends) > 2:
        typical = {
            "sends": statistics.median(_better(rates) for rates in sends.values()),
            "receives": statistics.median(_better(rates) for rates in receives.values()),
        }
        for host, ranks in enumerate(report.hosts):
            rates = {"sends": _better(sends.get(host, ())), "receives": _better(receives.get(host, ()))}
            bad = [way for way, rate in rates.items() if 0.0 < rate <= typical[way] / SLOW]
            if bad:
                slow.add(host)
            if bad and not all(_loses(link) for link in links[host]):  # else that is why
                worst = max(bad, key=lambda way: typical[way] / rates[way])
                what = "link is" if len(bad) == 2 else f"link {bad[0]}"
                sentence = (
                    f"{name_of_host(report, host)}: its {what} {many_times(typical[worst] / rates[worst])} slower than the"
                    f" others': {at_rate(rates[worst])} beside {at_rate(typical[worst])}."
                )
                found.append(Finding("slow host", True, ranks, _begun(sentence), _SLOW_HOST))
    usual = _usual(report, slow)
    odd = [
        link
        for link in report.between
        if not {host_of[link.i], host_of[link.j]} & slow and not _loses(link) and link.slower and link.slower <= usual / SLOW
    ]
    if odd:
        worst_s = min(rate for link in odd if (rate := link.slower))
        sentence = (
            f"The link between {_pairs(odd)} is {many_times(usual / worst_s)} slower than the others: {at_rate(worst_s)} beside"
            f" {at_rate(usual)}."
        )
        ranks = sorted({rank for link in odd for rank in (link.i, link.j)})
        found.append(Finding("slow link", True, ranks, sentence, _SLOW_LINK))
    return found


_SLOW_HOST = (
    "Look at its cable, its port of the switch and `ethtool INTERFACE` (a link that came up at a lower speed, half duplex), and"
    ' at what else uses it. Until then: strategy="adpsgd" with partner_choice="fast_links" waits for it least.'
)
_SLOW_LINK = (
    "Both ends are fast with others: look at the switches between the two hosts. Until then: a topology without that edge, or"
    ' partner_choice="fast_links".'
)


def _loses(link: Link) -> bool:
    """Whether packets are lost there that no full buffer has dropped."""
    return bool(link.resent_idle) and (link.resent or 0.0) >= LOSS


def _usual(report: Report, without: set[int]) -> float:
    """Median rate of the links between the other hosts; 0 if there are fewer than three, of which none is odd."""
    host_of = report.host_of
    rates = [rate for link in report.between if not {host_of[link.i], host_of[link.j]} & without and (rate := link.slower)]
    return statistics.median(rates) if len(rates) > 2 else 0.0


def _latency(report: Report) -> list[Finding]:
    by_host = _by_host(report, lambda link, _: link.latency_s)
    if len(by_host) < 3:
        return []
    typical_s = statistics.median(min(values) for values in by_host.values())
    found = []
    for host, values in by_host.items():
        own_s = min(values)
        if own_s > max(LEAST_LATENCY_S, SLOW_LATENCY * typical_s):
            sentence = (
                f"{name_of_host(report, host)}: a message takes {duration(own_s)} to the nearest other host, and"
                f" {duration(typical_s)} among the others."
            )
            advice = "Is it in another room, or behind a VPN? A router or a busy CPU between does this too."
            found.append(Finding("latency", True, report.hosts[host], _begun(sentence), advice))
    return found


def _loss(report: Report, slow: Sequence[Finding]) -> list[Finding]:
    """Packets that are lost, though not those that a slow link drops when it is filled.

    Args:
        report: the measurements.
        slow: hosts and links.
    """
    ranks_of_slow = {rank for finding in slow for rank in finding.ranks}
    full = {rank for rank in ranks_of_slow if not any(link.resent_idle for link in report.links if rank in (link.i, link.j))}
    stalled = _stalled(report)  # whose large packets are all sent again, for another reason
    by_host = _by_host(report, lambda link, _: 0.0 if {link.i, link.j} & full or link in stalled else link.resent)
    least = {host: min(values) for host, values in by_host.items() if len(values) > 1}
    bad = [host for host, share in least.items() if share >= LOSS]
    found = []
    if len(bad) < len(by_host):
        for host in bad:
            share = statistics.median(by_host[host])
            whose = name_of_host(report, host)
            sentence = f"{whose}: its link loses packets; {share:.1%} of those to and from it had to be sent again."
            found.append(Finding("lossy host", True, report.hosts[host], _begun(sentence), _LOSSY))
    told, host_of = set(bad) if found else set(), report.host_of
    links = [
        link
        for link in report.between
        if (link.resent or 0.0) >= LOSS
        and link not in stalled
        and not {link.i, link.j} & full
        and not {host_of[link.i], host_of[link.j]} & told
    ]
    if links:
        most = max(link.resent or 0.0 for link in links)
        ranks = sorted({rank for link in links for rank in (link.i, link.j)})
        sentence = f"Packets between {_pairs(links)} are lost: up to {most:.1%} had to be sent again."
        found.append(Finding("lossy link", True, ranks, sentence, _LOSSY))
    return found


_LOSSY = (
    "TCP waits 0.2 s and more for some of them, and sends slower. Look at `ip -s link` and `ethtool -S INTERFACE` for errors"
    " and drops: a cable, a duplex mismatch, a switch whose buffer is full."
)


def _reached(report: Report, explained: Sequence[Finding]) -> list[Finding]:
    """Hosts whose interface promises much more than was measured, but for those where that is explained."""
    found = []
    told = {rank for finding in explained for rank in finding.ranks}
    for host, rates in _by_host(report, lambda link, _: link.slower).items():
        used = _worker(report, report.hosts[host][0]).interface
        if told & set(report.hosts[host]):
            continue
        if used is not None and used.mbit and max(rates) * 8e-6 < used.mbit / REACHED:
            sentence = (
                f"{name_of_host(report, host)}: {at_rate(max(rates))} at best, and {used.name} says that it has"
                f" {used.mbit:,} Mb/s."
            )
            advice = (
                "One connection fills no 100 Gb/s; of less than a tenth something else is the reason: a limit, a slow core."
            )
            found.append(Finding("below speed", False, report.hosts[host], _begun(sentence), advice))
    return found


# ---- clocks, store, GPUs


def _clocks(report: Report) -> list[Finding]:
    apart = {}
    for rank, known in enumerate(offsets(report.world_size, report.links)):
        if known is not None and abs(known[0]) > CLOCK_S + known[1]:
            apart[rank] = known[0]
    found = []
    for place, ranks in enumerate(report.hosts):
        own = {rank: apart[rank] for rank in ranks if rank in apart}
        if own:
            ahead_s = statistics.median(own.values())
            side = "ahead of" if ahead_s > 0 else "behind"
            sentence = f"The clock of {name_of_host(report, place)} is {duration(abs(ahead_s))} {side} that of rank 0."
            advice = (
                "Training does not mind; log lines and the time lines of several hosts cannot be compared. Set the clocks by"
                " NTP (`chronyc tracking`)."
            )
            found.append(Finding("clock", True, list(own), sentence, advice))
    return found


def _store(report: Report) -> list[Finding]:
    slow = {rank: calls for rank, calls in report.store.items() if calls.median_s > STORE_S}
    if not slow:
        return []
    worst = max(slow, key=lambda rank: slow[rank].median_s)
    sentence = (
        f"A call to the store takes {duration(slow[worst].median_s)} on rank {worst}"
        + (f" (above {duration(STORE_S)} on {ranks_of(list(slow))})" if len(slow) > 1 else "")
        + ", and each batch is claimed there."
    )
    advice = (
        "Batches are claimed ahead where the store is slow (docs/decisions/008); hold it on a host near the workers, which has"
        " a core for it."
    )
    return [Finding("store", True, sorted(slow), sentence, advice)]


def _gpus(report: Report) -> list[Finding]:
    kinds: dict[str, list[int]] = {}
    for worker in report.workers:
        kinds.setdefault(worker.gpu or "no GPU", []).append(worker.rank)
    found = []
    if len(kinds) > 1:
        told = ", ".join(f"{kind} on {ranks_of(ranks)}" for kind, ranks in kinds.items())
        advice = "Gossip lets the faster ones take more of the epoch; an all-reduce waits for the slowest."
        found.append(
            Finding("GPUs", False, sorted(worker.rank for worker in report.workers), f"The devices differ: {told}.", advice)
        )
    if len(report.copies) > 2:
        typical = statistics.median(min(one.to_device, one.from_device) for one in report.copies.values())
        for rank, one in report.copies.items():
            rate = min(one.to_device, one.from_device)
            if rate <= typical / SLOW:
                sentence = (
                    f"Rank {rank} copies between pinned memory and its GPU {many_times(typical / rate)} slower than the others:"
                    f" {at_rate(rate)} beside {at_rate(typical)}."
                )
                advice = "Look at `nvidia-smi topo -m` and at the PCIe width; bind the process to the near socket."
                found.append(Finding("GPU copies", True, [rank], sentence, advice))
    return found


def _model(report: Report) -> list[Finding]:
    if not report.failed:
        return []
    ranks = sorted(report.failed)
    sentence = f"The model could not be trained on {ranks_of(ranks)}: {report.failed[ranks[0]]}"
    return [Finding("model", True, ranks, sentence, "The stack trace is in the log of that rank.")]


# ---- helpers


def _by_host(report: Report, value: Callable[[Link, bool], float | None]) -> dict[int, list[float]]:
    """Values of the links to other hosts; ``value`` is told whether the host's worker is the first of the pair."""
    found: dict[int, list[float]] = {}
    host_of = report.host_of
    for link in report.between:
        for rank, first in ((link.i, True), (link.j, False)):
            known = value(link, first)
            if known is not None:
                found.setdefault(host_of[rank], []).append(known)
    return found


def _of_hosts(report: Report) -> dict[int, list[Link]]:
    """Links of each host to others."""
    found: dict[int, list[Link]] = {place: [] for place in range(len(report.hosts))}
    host_of = report.host_of
    for link in report.between:
        for rank in (link.i, link.j):
            found[host_of[rank]].append(link)
    return found


def _better(rates: Sequence[float]) -> float:
    """The upper quartile: what a host can, where some of its links lead to slow ones; 0 if none is known."""
    ordered = sorted(rates)
    return ordered[math.ceil(0.75 * (len(ordered) - 1))] if ordered else 0.0


def _worker(report: Report, rank: int) -> Worker:
    return next(worker for worker in report.workers if worker.rank == rank)


def _pairs(links: Sequence[Link]) -> str:
    told = [f"ranks {link.i} and {link.j}" for link in links[:_SHOWN]]
    more = len(links) - len(told)
    return ", ".join(told) + (f" and {more} more pairs" if more else "")


def _begun(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
