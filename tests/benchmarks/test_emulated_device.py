"""benchmarks/emulated_device.py: what is given to the device happens later, in order, and mistakes are found."""

from __future__ import annotations

import pytest
import torch

from benchmarks.emulated_device import EmulatedDevice


def test_a_stream_runs_what_it_was_given_later_and_in_order() -> None:
    device = EmulatedDevice(threads=False)
    x = device.tensor(torch.ones(3))
    with device:
        x += 1
        device.launch(lambda: x.mul_(10.0))
        x -= 5
    seen = [x.tolist()[0]]
    while device.advance():
        seen.append(x.tolist()[0])
    assert seen == [1.0, 2.0, 20.0, 15.0]


def test_one_stream_waits_for_another_by_an_event() -> None:
    device = EmulatedDevice(threads=False)
    streams = device.streams()
    x, [host] = device.tensor(torch.ones(3)), streams.pinned(1, 3, torch.float32)
    filled, copied = streams.event(), streams.event()
    with device:
        x += 1
        filled.record()
        with streams.side():
            filled.wait()
            host.copy_(x, non_blocking=True)
            copied.record()
    side = device._streams[1]
    assert not device.advance(side)  # it waits for x
    assert host.isnan().all()  # nobody may read it yet
    assert not copied.query()
    assert device.host_waits == 0
    copied.synchronize()
    assert copied.query()
    assert host.tolist() == [2.0, 2.0, 2.0]
    assert device.host_waits == 1


def test_what_needs_a_value_waits_for_the_device() -> None:
    device = EmulatedDevice()
    x = device.tensor(torch.ones(3))
    with device:
        device.launch(lambda: x.mul_(2.0), seconds=0.02)
        assert float(x.sum()) == 6.0
        pageable = torch.zeros(3)
        device.launch(lambda: x.mul_(2.0), seconds=0.02)
        pageable.copy_(x, non_blocking=True)
    assert pageable.tolist() == [4.0, 4.0, 4.0]
    device.close()
    assert device.host_waits == 2


def test_host_memory_that_changes_under_a_copy_is_found() -> None:
    device = EmulatedDevice(threads=False)
    x, host = device.tensor(torch.ones(3)), device.pin(torch.zeros(3))
    with device:
        x.copy_(host, non_blocking=True)
    host += 1
    with pytest.raises(RuntimeError, match="changed between a copy's launch and its end"):
        device.advance()


def test_the_host_may_be_ahead_by_so_many_steps() -> None:
    device = EmulatedDevice(ahead=2)
    x = device.tensor(torch.zeros(1))
    for _ in range(3):
        device.launch(lambda: x.add_(1.0), seconds=0.02)
    assert float(x) >= 1.0  # the third had to wait for the first
    device.synchronize()
    device.close()
    assert float(x) == 3.0
