"""What a process uses of its host."""

from __future__ import annotations

import threading
import time

import torch

from lightning_gossip.runtime.usage import Usage, peak_device_memory_bytes, peak_memory_bytes


def test_work_is_counted_and_waiting_is_not() -> None:
    usage = Usage()
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    busy = usage.cores()
    assert busy > 0.0
    threading.Event().wait(0.2)
    waiting = usage.cores()
    assert 0.0 <= waiting < 0.5  # since it was asked last


def test_memory_is_at_least_that_of_a_tensor_that_was_written() -> None:
    before = peak_memory_bytes()
    assert before is not None
    held = torch.ones(max(1, before // 4) + (64 << 20), dtype=torch.uint8)
    after = peak_memory_bytes()
    assert after is not None
    assert after >= held.numel()
    if not torch.cuda.is_initialized():
        assert peak_device_memory_bytes() is None
