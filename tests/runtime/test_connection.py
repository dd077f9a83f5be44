"""Connections to the store: every wait in making one has a deadline."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from lightning_gossip.runtime.connection import another


def test_a_connection_whose_calls_may_wait_for_ever_is_not_waited_for_for_ever_itself() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=1))
    assert another(one, timeout_s=1e6).timeout == timedelta(seconds=1e6)  # type: ignore[attr-defined]
    del server
    began_s = time.monotonic()
    with pytest.raises(dist.DistError):
        another(one, timeout_s=1e6)
    assert time.monotonic() - began_s < 20
