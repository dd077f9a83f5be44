"""What the protocols of this package ask of the store that all workers share: operations of torch.distributed's stores.

Each is an effect (:mod:`lightning_gossip.algorithm.effects`): a driver does it and sends its result back. Each happens at once
and for all workers. Values are bytes and never empty.

Where workers keep stores in reserve (:mod:`.failover`) an operation has one more outcome: :class:`StoreLostError`, thrown into
the protocol. Whether the operation has been done is then not known. The last effects of this module are about stores.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")
Steps = Generator[Any, Any, Result]
"""A protocol under way: it yields effects and returns a result."""


class Decide(NamedTuple):
    """Write a value unless the key has one. The result is the value that stands: whoever comes first has decided."""

    key: str
    value: bytes


class Swap(NamedTuple):
    """Write a value if the key has the expected one. The result is the value that stands."""

    key: str
    expected: bytes
    value: bytes


class Write(NamedTuple):
    """Write a value in place of the one before. No result."""

    key: str
    value: bytes


class Append(NamedTuple):
    """Add to the end of a value, which may have been none. No result, and no wait for the store."""

    key: str
    value: bytes


class Count(NamedTuple):
    """Add one to a counter. The result is what it has become."""

    key: str


class Read(NamedTuple):
    """The result is the value of a key, None if it has none."""

    key: str


class ReadAll(NamedTuple):
    """The result is the values of keys, None if one of them has none.

    Args:
        keys: in which order.
        exist: whether all are known to have been written, and are never deleted: asks the store once less.
    """

    keys: tuple[str, ...]
    exist: bool = False


class Await(NamedTuple):
    """Wait until a key has a value. The result is the value, None if it has none in time."""

    key: str
    seconds: float


class Delete(NamedTuple):
    """Delete a key, which may have no value. No result."""

    key: str


class HaveEnded(NamedTuple):
    """Ask the kernel which processes of this machine have ended. The result is one bool for each.

    Args:
        processes: their names; None for one without.
    """

    processes: tuple[str | None, ...]


class Encode(NamedTuple):
    """The result is a value as bytes. An effect since it may take long."""

    value: Any


class Restore(NamedTuple):
    """The result is the values of bytes that :class:`Encode` has made."""

    data: tuple[bytes, ...]


class Pause(NamedTuple):
    """Let some time pass. No result."""

    seconds: float


class StoreLostError(Exception):
    """The store does not answer this worker, or this worker has left it: it never uses it again."""


class NextStore(NamedTuple):
    """Wait until this worker has gone on with another store than the one that this thread was connected with. No result.

    Of the training thread, which may not have noticed that the monitor's thread went on before.
    """


class Reconnect(NamedTuple):
    """Connect the training thread with the store that this worker is at, without a wait. No result."""


class Leave(NamedTuple):
    """End all this worker's connections with the job's store; what is under way there ends by StoreLostError. No result."""


class Reached(Enum):
    """What became of a connection.

    OPEN: it stands. REFUSED: the host answers, and the process that listened there has ended. SILENT: nothing answers.
    """

    OPEN = "open"
    REFUSED = "refused"
    SILENT = "silent"


class Probe(NamedTuple):
    """Look whether somebody listens at addresses. The result is one :class:`Reached` for each."""

    addresses: tuple[str, ...]


class Enter(NamedTuple):
    """Connect this thread with the store that a worker keeps, where workers meet. The result is a :class:`Reached`.

    From then on this thread's operations go there.

    Args:
        address: of the store.
        view: whose keys are to be read there, without going on in it; None for those of the meeting.
    """

    address: str
    view: int | None = None


class Adopt(NamedTuple):
    """Take the store that a worker keeps for the job's, with keys of its own for the view. No result.

    From then on operations of this thread go there, and those of others when they connect.
    """

    view: int
    address: str


class Publish(NamedTuple):
    """Write where the job's store is into the store that this worker itself keeps, for those that come there. No result."""

    view: int
    address: str


class Seek(NamedTuple):
    """Write where this worker waits into the store that it itself keeps, for those that wait elsewhere. No result."""

    view: int
    address: str


class AtOwn(NamedTuple):
    """Do an operation in the store that this worker itself keeps, wherever this thread is connected. The result is its result.

    Args:
        operation: a :class:`Read`, :class:`Write` or :class:`Swap`.
    """

    operation: Read | Write | Swap


class Ask(NamedTuple):
    """Read from the store that another worker keeps, wherever this thread is connected.

    The result is a :class:`Reached`, and the values of the keys; None for a key without one, or if the store is not open.

    Args:
        address: of the store.
        keys: of the meeting there.
    """

    address: str
    keys: tuple[str, ...]
