import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.transport import GlooTransport, Kind, Message, Transport
from tests.transport.faults import FaultyTransport
from tests.transport.memory import MemoryNetwork
from tests.transport.properties import (
    DEADLINE_S,
    DEADLINES,
    PATIENCE_S,
    PROPERTIES,
    WORLD,
    Property,
    others,
    posting_does_not_wait_for_the_reader,
)
from tests.workers import run_processes, run_threads

Wrap = Callable[[Transport], Transport]
WRAPPED: dict[str, Wrap] = {"memory": lambda inner: inner, "faultless faults": lambda inner: FaultyTransport(inner, [])}


def in_threads(script: Property, wrap: Wrap = WRAPPED["memory"]) -> None:
    network = MemoryNetwork(WORLD)
    ends = [wrap(network.transport(rank)) for rank in range(WORLD)]
    run_threads([functools.partial(script, end) for end in ends], deadline_s=60)


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("script", PROPERTIES + DEADLINES, ids=lambda script: script.__name__)
def test_between_threads(name: str, script: Property) -> None:
    in_threads(script, WRAPPED[name])


def test_a_property_that_does_not_hold_is_noticed() -> None:
    class Garbling(FaultyTransport):
        def post(self, peer: int, message: Message) -> None:
            super().post(peer, Message(message.kind, 1 + message.session))

    with pytest.raises(AssertionError):
        in_threads(posting_does_not_wait_for_the_reader, lambda inner: Garbling(inner, []))


# -- Gloo: one launch for all that leaves the connections whole, one for each way to break them ---------------------------


def all_properties(rank: int) -> str:
    transport = GlooTransport(timeout_s=30.0)
    for script in PROPERTIES:
        script(transport)
        dist.barrier()
    words_that_are_no_message_are_refused_and_the_inbox_goes_on(transport)
    dist.barrier()
    transport.close()
    transport.close()
    with pytest.raises(ProtocolError, match="after it was closed"):
        transport.post(others(transport)[0], Message(Kind.STOP))
    with pytest.raises(ProtocolError, match="after it was closed"):
        transport.swap(others(transport)[0], torch.zeros(1), torch.zeros(1))
    with pytest.raises(ProtocolError, match="after it was closed"):
        transport.next_message()
    return "ok"


def words_that_are_no_message_are_refused_and_the_inbox_goes_on(transport: GlooTransport) -> None:
    if transport.rank == 0:
        lengths = (8, 12)  # as an older version sends, and noise
        works = [dist.isend(torch.arange(length), dst=1, group=transport._control, tag=1) for length in lengths]
        transport.post(1, Message(Kind.SYNC, 9))
        for work in works:
            assert work is not None
            work.wait()
    elif transport.rank == 1:
        assert transport.next_message() == (0, Message(Kind.SYNC, 9))
        assert transport.refused == 2


def all_deadlines(rank: int) -> str:
    for script in DEADLINES:
        transport = GlooTransport(timeout_s=30.0)
        script(transport)
        dist.barrier()
        transport.close()
    return "ok"


def a_stop_is_read_before_the_sender_goes(rank: int) -> str:
    """Each ends its successor's listener and closes at once."""
    transport = GlooTransport(timeout_s=30.0)
    transport.post((rank + 1) % WORLD, Message(Kind.STOP))
    if rank == 0:
        time.sleep(0.5)  # reads late: the others must not have dropped what they sent
    assert transport.next_message() == ((rank - 1) % WORLD, Message(Kind.STOP))
    transport.close()
    return "ok"


def a_listener_outlasts_the_deadline(rank: int) -> str:
    """The deadline is of replies and vectors; who listens may have nothing to hear for longer."""
    transport = GlooTransport(timeout_s=1.0)
    if rank == 0:
        heard = [transport.next_message()[0] for _ in range(2)]
        assert heard == [1, 2]
    else:
        time.sleep(2.0 * rank)  # longer than the deadline: the point of the test
        transport.post(0, Message(Kind.SYNC))
    dist.barrier()
    transport.close()
    return "ok"


def await_vector(transport: GlooTransport) -> None:
    transport.swap(2, torch.zeros(4), torch.zeros(4)).wait(PATIENCE_S)


def await_answer(transport: GlooTransport) -> None:
    transport.await_reply(2, PATIENCE_S)


def one_dies(rank: int) -> str:
    """Rank 2 dies while rank 0 waits for its vector and rank 1 for its reply; both learn it, and go on with each other."""
    transport = GlooTransport(timeout_s=30.0)
    dist.barrier()
    if rank == 2:
        transport.next_message()
        transport.next_message()
        os._exit(9)
    start_s = time.monotonic()
    transport.post(2, Message(Kind.SYNC))
    wait = await_vector if rank == 0 else await_answer
    with pytest.raises(PeerError) as caught:
        wait(transport)
    assert caught.value.rank == 2
    assert caught.value.phase == ("exchange" if rank == 0 else "reply")
    assert time.monotonic() - start_s < PATIENCE_S / 2
    with pytest.raises(PeerError):  # and again, at once
        await_vector(transport)
    with pytest.raises(PeerError):
        transport.request(2, Message(Kind.EXCHANGE), PATIENCE_S)
    theirs = torch.zeros(4)
    transport.swap(1 - rank, torch.full((4,), float(rank)), theirs).wait(PATIENCE_S)
    assert theirs.tolist() == [1.0 - rank] * 4
    return "ok"


@pytest.mark.processes
@pytest.mark.parametrize(
    "script", [all_properties, all_deadlines, a_stop_is_read_before_the_sender_goes, a_listener_outlasts_the_deadline]
)
def test_between_processes(script: Callable[[int], str], tmp_path: Path) -> None:
    assert run_processes(script, tmp_path) == ["ok"] * WORLD


@pytest.mark.processes
def test_a_dead_process_is_an_error_at_those_that_wait_for_it(tmp_path: Path) -> None:
    assert run_processes(one_dies, tmp_path) == ["ok", "ok", "died"]


# -- the rest of memory ----------------------------------------------------------------------------------------------------


def test_closing_wakes_the_own_listener_once() -> None:
    network = MemoryNetwork(1)
    transport = network.transport(0)
    transport.close()
    transport.close()
    assert transport.next_message() == (0, Message(Kind.STOP))
    assert network.inbox[0].empty()


def test_queues_exist_before_two_threads_first_use_them() -> None:
    """Created on first use, one of two threads at the same queue got one that nobody read (seen)."""
    network = MemoryNetwork(3)
    assert len(network.replies) == len(network.vectors) == 9
    with pytest.raises(KeyError):
        network.transport(0).reply(3, Message(Kind.ACCEPT))


def test_deadlines_are_far_apart_from_patience() -> None:
    assert 5 * DEADLINE_S < PATIENCE_S
