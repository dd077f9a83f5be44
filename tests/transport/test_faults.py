import threading
import time

import pytest
import torch

from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.transport import Kind, Message
from tests.transport.faults import Fault, FaultyTransport
from tests.transport.memory import MemoryNetwork

ASK = Message(Kind.EXCHANGE, session=4, layout=5)


class Bench:
    """Rank 0 with faults; ranks 1 and 2 have answered in advance as often as needed."""

    def __init__(self, *faults: Fault, answers: int = 20) -> None:
        self.network = MemoryNetwork(3)
        self.transport = FaultyTransport(self.network.transport(0), faults)
        for peer in (1, 2):
            for _ in range(answers):
                self.network.transport(peer).reply(0, Message(Kind.ACCEPT))

    def ask(self, peer: int) -> str:
        try:
            return self.transport.request(peer, ASK, 1.0).kind.name
        except PeerError as error:
            return f"FAIL {error.phase} {error.rank}"

    def swap(self, peer: int) -> str:
        try:
            self.transport.swap(peer, torch.zeros(1), torch.zeros(1))
        except PeerError as error:
            return f"FAIL {error.phase} {error.rank}"
        return "OK"


def test_drops_and_failures_hit_exactly_the_chosen_numbers() -> None:
    bench = Bench(Fault("drop", at=[1, 3]), Fault("fail", at=lambda number: number == 4))
    assert [bench.ask(1) for _ in range(6)] == ["ACCEPT", "REFUSE", "ACCEPT", "REFUSE", "FAIL reply 1", "ACCEPT"]
    assert bench.transport.dropped == 2


def test_a_dropped_request_moves_nothing_and_reads_like_a_refusal() -> None:
    bench = Bench(Fault("drop"))
    answer = bench.transport.request(1, ASK, 1.0)
    assert (answer.kind, answer.session, answer.layout) == (Kind.REFUSE, ASK.session, ASK.layout)
    assert bench.network.inbox[1].empty()


def test_a_fault_of_one_peer_spares_the_others_and_numbers_count_all() -> None:
    bench = Bench(Fault("drop", peer=2, at=[0, 1, 3]))
    assert [bench.ask(peer) for peer in (1, 2, 1, 2, 2)] == ["ACCEPT", "REFUSE", "ACCEPT", "REFUSE", "ACCEPT"]


def test_requests_and_swaps_are_counted_apart() -> None:
    bench = Bench(Fault("fail", where="swap", at=[1]), Fault("drop", at=[0]))
    assert [bench.swap(1) for _ in range(3)] == ["OK", "FAIL exchange 1", "OK"]
    assert [bench.ask(1) for _ in range(2)] == ["REFUSE", "ACCEPT"]


def test_a_delay_takes_as_long_as_it_says_and_only_where_it_hits() -> None:
    bench = Bench(Fault("delay", at=[1], seconds=lambda number: 0.05 * number))
    took = []
    for _ in range(3):
        start_s = time.monotonic()
        assert bench.ask(1) == "ACCEPT"
        took.append(time.monotonic() - start_s)
    assert took[1] >= 0.05
    assert min(took[0], took[2]) < 0.05


def test_closing_ends_a_delay() -> None:
    bench = Bench(Fault("delay", seconds=600.0))
    thread = threading.Thread(target=bench.ask, args=(1,), daemon=True)
    thread.start()
    bench.transport.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_swap_cannot_be_dropped() -> None:
    with pytest.raises(ConfigurationError, match="use kind='fail'"):
        Fault("drop", where="swap")
