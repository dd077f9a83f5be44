"""What the ranks do together: meet at the store, measure pair by pair in rounds, then all together, and tell rank 0.

Whatever a rank does has a deadline, and who does not come to a meeting is gone on without: a host that is cut off is what is
looked for.
"""

from __future__ import annotations

import os
import secrets
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_gossip.doctor import notes
from lightning_gossip.doctor import report as written
from lightning_gossip.doctor.launch import Place
from lightning_gossip.doctor.measure import gpu, host, pair, together
from lightning_gossip.doctor.measure.training import Trained
from lightning_gossip.doctor.report import Link, Report, Worker, hosts_of
from lightning_gossip.doctor.rounds import rounds
from lightning_gossip.doctor.words import ranks_of
from lightning_gossip.errors import PeerError, reason_of
from lightning_gossip.runtime.clock import Deadline, now_s
from lightning_gossip.runtime.store_client import connect, uses_agent_store

_TELL_S = 5.0  # for the others to tell rank 0 what they have found, when they are together
_LEAST_PAIR_S, _MOST_PAIR_S = 0.25, 3.0
_LEAST_CONNECT_S, _MOST_CONNECT_S = 1.2, 3.5  # the kernel asks again after 1 s and after 3 s
_TOKEN_BYTES = 32
News = Callable[[str, float], None]


@dataclass(frozen=True)
class Times:
    """How long each part may take, in seconds.

    Args:
        total: of what is measured, when all have come.
        join: to wait for the others to come.
    """

    total: float = 100.0
    join: float = 60.0

    @property
    def links(self) -> float:
        """For all pairs."""
        return 0.6 * self.total

    @property
    def together(self) -> float:
        """For all-reduces."""
        return 0.15 * self.total

    @property
    def alone(self) -> float:
        """For a GPU, and for each part of a model."""
        return 0.05 * self.total


class Session:
    """The part of one process in the doctor's visit.

    Args:
        place: its rank.
        times: how long all may take.
        on_progress: told what is done, and which share of it.
    """

    def __init__(self, place: Place, times: Times, on_progress: News) -> None:
        self._place = place
        self._times = times
        self._news = on_progress
        self._came: list[int] = []

    def run(self, trained: Trained | None = None) -> Report | None:
        """Measure.

        Args:
            trained: the user's model; None if there is none.

        Returns:
            On rank 0 what all have found; None elsewhere.

        Raises:
            PeerError: if the store cannot be reached, or this rank came too late.
        """
        began_s, place = now_s(), self._place
        os.environ.update({"MASTER_ADDR": place.host, "MASTER_PORT": str(place.port)})
        where = host.listening(host.interfaces(), (place.host, place.port))  # refused on each rank, before any waits
        reached = connect(None, rank=place.rank, timeout_s=self._times.join)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if uses_agent_store() else "0"
        self._store: Store = PrefixStore(f"doctor/{restart}", reached)
        with host.listen(where.address) as listener:
            report, token = self._meet_all(host.this_worker(place.rank, listener, (place.host, place.port)))
            own: dict[str, Any] = {"store": asdict(together.store_calls(self._store, place.rank, seconds=1.0))}
            self._news("store", 1.0)
            links, pairs = self._links(report, listener, token)
        own["links"] = [asdict(link) for link in links]
        left_out = self._decide(report, links, pairs)
        report.left_out += left_out
        if not left_out:
            self._all_reduces(report)
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count()) if torch.cuda.is_available() else None
        if device is not None:
            torch.cuda.set_device(device)
            own["copies"] = asdict(gpu.copies(device, seconds=self._times.alone / 4))
            self._news("GPU", 1.0)
        if trained is not None:
            self._news("the model", 0.0)
            try:
                training, report.landscape, left_out = trained.measure(device or torch.device("cpu"), landscape=place.rank == 0)
                own["training"] = asdict(training)
                report.left_out += left_out
            except Exception as error:  # noqa: BLE001 - the user's code; what was measured before is worth telling
                traceback.print_exc()
                own["failed"] = reason_of(error)
        notes.write(self._store, f"found/{place.rank}", own)
        if place.rank != 0:
            return None
        self._collect(report)
        report.seconds = now_s() - began_s
        return report

    def _meet_all(self, me: Worker) -> tuple[Report, bytes]:
        """Who has come: rank 0 waits for all, and tells the others."""
        store, size, join = self._store, self._place.world_size, Deadline.after(self._times.join)
        notes.write(store, f"worker/{me.rank}", asdict(me))
        if me.rank == 0:
            workers = {}
            for rank in range(size):
                if self._awaited(f"worker/{rank}", join.left_s):
                    workers[rank] = notes.read(store, f"worker/{rank}")
                self._news("waiting for all ranks", len(workers) / size)
            said = {"workers": list(workers.values()), "token": secrets.token_hex(_TOKEN_BYTES)}
            notes.write(store, "workers", said)
        elif not self._awaited("workers", self._times.join + _TELL_S):
            raise PeerError("Rank 0 has not said who takes part; its own log says why.", rank=0, phase="store")
        said = notes.read(store, "workers")
        report = Report(world_size=size, workers=[Worker.of(one) for one in said["workers"]])
        self._came = [worker.rank for worker in report.workers]
        if me.rank not in self._came:
            raise PeerError(f"Rank {me.rank} came when the others had begun. Give them longer: --join 120.", phase="store")
        return report, bytes.fromhex(said["token"])

    def _links(self, report: Report, listener: Any, token: bytes) -> tuple[list[Link], int]:
        """This worker's pairs, those that it connects; and how many pairs of all were planned."""
        rank, seconds = self._place.rank, self._times.links
        planned = rounds(hosts_of(report.workers), most=int(seconds / _LEAST_PAIR_S))
        pair_s = min(_MOST_PAIR_S, max(_LEAST_PAIR_S, seconds / max(1, len(planned))))
        connect_s = min(_MOST_CONNECT_S, max(_LEAST_CONNECT_S, pair_s))
        workers = {worker.rank: worker for worker in report.workers}
        found: list[Link] = []
        deadline = Deadline.after(seconds)
        for number, pairs in enumerate(planned):
            if not self._meet(f"round {number}", deadline, within_s=connect_s + pair_s + 1.0):
                return found, sum(map(len, planned))
            for i, j in pairs:
                asks, answers = (i, j) if pair.connects(workers[i], workers[j]) else (j, i)
                said = pair.hello(token, number, asks)
                if rank == asks:
                    link = pair.measure(workers[answers], Link(i=i, j=j), said, connect_s=connect_s, pair_s=pair_s)
                    found.append(link if asks == i else link.turned())
                elif rank == answers:
                    pair.answer(listener, said, connect_s=connect_s, pair_s=pair_s)
            self._news("links", (number + 1) / len(planned))
        self._meet("after the rounds", deadline, within_s=connect_s + pair_s + 1.0)
        return found, sum(map(len, planned))

    def _meet(self, name: str, deadline: Deadline, *, within_s: float) -> bool:
        """Wait for all, though not for ever; whether there is still time, which the last one to come decides for all."""
        if self._store.add(f"come/{name}", 1) == len(self._came):
            self._store.set(f"met/{name}", "go" if deadline.left_s else "stop")
        if not self._awaited(f"met/{name}", within_s):  # somebody has failed
            return deadline.left_s > 0.0
        return bool(self._store.get(f"met/{name}") == b"go")

    def _decide(self, report: Report, links: list[Link], pairs: int) -> list[str]:
        """Why there is no all-reduce, for all as rank 0 says; empty if there is one."""
        rank, store = self._place.rank, self._store
        notes.write(store, f"links/{rank}", [asdict(link) for link in links])
        if rank == 0:
            until = Deadline.after(_TELL_S)
            silent = [other for other in range(self._place.world_size) if other not in self._came]
            for other in self._came:
                if self._awaited(f"links/{other}", until.left_s):
                    report.links += [Link(**one) for one in notes.read(store, f"links/{other}")]
                else:
                    silent.append(other)
            said = []
            if silent:
                said.append(f"No all-reduce was made: {ranks_of(silent)} did not take part.")
            elif any(link.failed for link in report.links):
                said.append("No all-reduce was made: it needs connections between all workers, and some failed.")
            notes.write(store, "decided", {"left_out": said, "pairs": pairs})
        elif not self._awaited("decided", 2 * _TELL_S):
            return ["rank 0 has not decided"]
        decided = notes.read(store, "decided")
        report.pairs = decided["pairs"]
        return [str(sentence) for sentence in decided["left_out"]]

    def _all_reduces(self, report: Report) -> None:
        place = self._place
        if place.world_size == 1:
            return
        self._news("all-reduce", 0.0)
        try:
            report.all_reduce = together.all_reduces(self._store, place.rank, place.world_size, seconds=self._times.together)
        except PeerError as error:
            report.all_reduce_failed = str(error)
        self._news("all-reduce", 1.0)

    def _collect(self, report: Report) -> None:
        """What the others have found."""
        until = Deadline.after(_TELL_S + 5 * self._times.alone)  # they have no curvature to measure
        for rank in self._came:
            if not self._awaited(f"found/{rank}", until.left_s):
                report.left_out.append(f"Rank {rank} has not told what it has found; its own log says why.")
                continue
            found = notes.read(self._store, f"found/{rank}")
            report.store[rank] = written.Store(**found["store"])
            if "copies" in found:
                report.copies[rank] = written.Copies(**found["copies"])
            if "failed" in found:
                report.failed[rank] = found["failed"]
            if "training" in found:
                report.training[rank] = written.Training(**found["training"])
        report.links.sort(key=lambda link: (link.i, link.j))
        if len(report.links) < report.pairs:
            report.left_out.append(f"{report.pairs - len(report.links)} of {report.pairs} pairs were not measured in time.")

    def _awaited(self, key: str, seconds: float) -> bool:
        """Whether a key has come."""
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, seconds)))
        except dist.DistNetworkError as error:
            raise PeerError("The store of the job does not answer any more: rank 0 has ended.", phase="store") from error
        except dist.DistStoreError:
            return False
        return True
