"""A server inside the job, and a worker's link with it: what the strategies that have one share."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_gossip.algorithm.apsgd.server import ServerRule
from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.algorithm.tensors.flat import FlatModel
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.adpsgd.nonfinite_guard import OnNonFinite
from lightning_gossip.runtime.apsgd.client import RemoteServer, ServerLink, Update
from lightning_gossip.runtime.apsgd.server import Server
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.lightning.replicated_processes import ReplicatedProcesses
from lightning_gossip.strategies.options import check_nonfinite, seconds_of
from lightning_gossip.strategies.state.nonfinite import error_of
from lightning_gossip.strategies.state.optimizer_state import OptimizerStates
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.worker_algorithm import Algorithm
from lightning_gossip.transport.gloo_group import GlooTransport
from lightning_gossip.transport.messages import Kind, Message

log = logging.getLogger(__name__)


class ServerStrategy(DecentralizedStrategy, ReplicatedProcesses):
    """Workers that send vectors to a server and receive its own.

    Args:
        exchange_timeout_s: deadline of a vector on its way, in seconds.
        refuse_nonfinite: whether vectors that hold NaN or infinities are refused and counted.
        on_nonfinite: what a worker does whose vector was refused: ``"raise"`` or ``"adopt"``.
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`.
    """

    def __init__(self, *, exchange_timeout_s: float, refuse_nonfinite: bool, on_nonfinite: OnNonFinite, **options: Any) -> None:
        super().__init__(**options)
        self.refuse_nonfinite, self.on_nonfinite = check_nonfinite(refuse_nonfinite, on_nonfinite)
        self.exchange_timeout_s = seconds_of("exchange_timeout_s", exchange_timeout_s)


class ServerWorker(Algorithm):
    """One worker's requests to a server during one fit, and on one rank the server.

    Args:
        strategy: whose options.
        server_rank: where the server is.
        timeline: where waits are recorded.
    """

    def __init__(self, strategy: ServerStrategy, server_rank: int, timeline: Timeline) -> None:
        self._strategy = strategy
        self._refuses = strategy.refuse_nonfinite
        self._rank = server_rank
        self._workers = strategy.workers
        self._timeout_s = strategy.exchange_timeout_s
        self._turn_s = strategy.timeout_s
        self._timeline = timeline
        self._waited_s = 0.0
        self._transport: GlooTransport | None = None
        self._server: Server | None = None
        self._link: ServerLink | None = None
        self._model = SharedModel(nn.Module())
        self._layout = 0  # of the flat vectors
        self._sent = FlatModel([])
        self._received = FlatModel([])
        self._session = 0
        self._sync_requested = False

    @property
    @override
    def waited_s(self) -> float:
        return self._waited_s

    @override
    def start(self) -> None:
        self._transport = GlooTransport(self._timeout_s)
        if self._transport.rank == self._rank:
            self._link = self._server = Server(
                self._transport, timeout_s=self._timeout_s, turn_timeout_s=self._turn_s, refuse_nonfinite=self._refuses
            )
            self._server.start()
        else:
            self._link = RemoteServer(self._transport, self._rank, timeout_s=self._timeout_s, turn_timeout_s=self._turn_s)

    @override
    def open(self, model: SharedModel) -> None:
        before, self._layout = self._layout, model.layout
        self._model = model
        if self._layout != before:
            self._sent, self._received = FlatModel(self._model.tensors), FlatModel(self._model.tensors)
        self._session += 1
        self._sync_requested = False
        if self._server is not None:
            own = self._sent.read(self._model.tensors).clone()
            self._server.open(self._session, self._model.layout, self.rule(own))

    @abstractmethod
    def rule(self, model: Tensor) -> ServerRule:
        """The server of the session that begins; called on its rank.

        Args:
            model: this worker's, shape (d,); a copy.
        """

    @override
    def settle(self) -> None:
        """The server had taken in all that was sent when the workers had arrived."""

    @override
    def close(self, *, together: bool) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if together and transport.rank == (self._rank + 1) % self._workers:
            transport.post(self._rank, Message(Kind.STOP))
        if not together and self._server is None:
            self._say_that_it_has_failed(transport)
        if self._server is not None:
            self._server.close(together=together)
        transport.close()  # who asks later finds it closed

    @override
    def request_sync(self) -> None:
        self.connected.request_sync(self._session)

    @override
    def sync_requested(self) -> bool:
        return self._sync_requested or (self._server is not None and self._server.sync_requested)

    @property
    def connected(self) -> ServerLink:
        """The link to the server."""
        assert self._link is not None, "start() comes first"
        return self._link

    def raise_failure(self) -> None:
        """Raise what ended a thread of the server, if it is on this rank and something did."""
        if self._server is not None:
            self._server.raise_failure()

    def pull(self, update: Update | None) -> Served:
        """Send an update, if there is one, and receive the server's answer into ``_received``."""
        began_s = now_s()
        served = self.connected.pull(self._session, self._model.layout, self._received.flat, update)
        ended_s = now_s()
        self._waited_s += ended_s - began_s
        self._timeline.record("wait", began_s, ended_s, self._rank)
        return self.heard(served)

    def heard(self, served: Served) -> Served:
        """Note whether somebody asks for a synchronisation."""
        self._sync_requested = self._sync_requested or served.sync_requested
        return served

    def refused(self) -> None:
        """React to the refusal of what this worker sent, not finite: end the job, or go on with a fresh optimizer state.

        Raises:
            NonFiniteError: with ``on_nonfinite="raise"``.
        """
        if self._strategy.on_nonfinite == "raise":
            raise error_of(self._strategy.global_rank, self._model.names, self._model.tensors)
        OptimizerStates(self._strategy.optimizers).reset()

    def _say_that_it_has_failed(self, transport: GlooTransport) -> None:
        """The server may wait for this worker's update, and would not notice that it has ended."""
        try:
            transport.post(self._rank, Message(Kind.FAILED))
        except PeerError as error:
            log.info("rank %d: the parameter server has ended too: %s", transport.rank, error)
