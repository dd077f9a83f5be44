"""Connections to the store of the job: where it is, and a second one for a second thread."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.transport.interface import listen

_NOTHING = "<nothing>"


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``.

    Raises:
        ConfigurationError: for anything else.

    >>> parse_address("tcp://10.0.0.1:29400")
    ('10.0.0.1', 29400)
    """
    try:
        parsed = urlparse(address)
        host, port = parsed.hostname, parsed.port
    except (ValueError, AttributeError):
        host, port = None, None
    if not host or not port or parsed.scheme != "tcp":
        raise ConfigurationError(f"store={address!r} is not an address. Write it as store='tcp://host:port'.")
    return host, port


def connect(address: str | None, *, rank: int, timeout_s: float, interface: str | None = None) -> Store:
    """A connection to the store that all workers of the job share.

    It lives in torchrun's agent, or at the given address; otherwise in rank 0, which serves it from here on. Nobody waits
    here for other workers.

    Args:
        address: of the option ``store``; None for the one of the environment (``MASTER_ADDR``, ``MASTER_PORT``).
        rank: of this process when the job was started.
        timeout_s: how long to try, in seconds.
        interface: on which rank 0's listens; all if None.
    """
    if address is not None:
        host, port, serves = *parse_address(address), False
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    return TCPStore(
        host,
        port,
        is_master=serves,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listen(interface, host, port) if serves and interface is not None else None,
    )


def look_up(store: Store, key: str) -> bytes | None:
    """The value of a key that somebody may be deleting, or None; never waits, as ``get`` would for a key that is not there."""
    # a swap of something that nobody writes: it tells the value, or, if there is none, what was expected
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


def another(store: Store, *, timeout_s: float | None = None) -> Store:
    """A second connection, since one serves one call at a time.

    Args:
        store: the first one.
        timeout_s: how long a call may wait, in seconds; as for the first one if None.
    """
    if isinstance(store, TCPStore):
        timeout = store.timeout if timeout_s is None else timedelta(seconds=timeout_s)  # type: ignore[attr-defined]
        return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store  # in memory or a file: calls are short


class ReportingStore:
    """A store whose end is a PeerError, in torch's place a bare one.

    Args:
        store: that is asked.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except dist.DistError as error:
                raise store_lost() from error

        return call


def store_lost() -> PeerError:
    """What to say when the store does not answer any more."""
    return PeerError(
        "The store of the job does not answer: the process that holds it has ended. That is rank 0, unless it has an address of"
        " its own, so rank 0 cannot be survived; start `python -m lightning_gossip.store --port 29400` on a machine that stays"
        ' and pass store="tcp://<host>:29400", or start with torchrun, whose agent holds the store (docs/survival.md).',
        phase="store",
    )
