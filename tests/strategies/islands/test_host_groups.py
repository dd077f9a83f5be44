"""Groups between islands work on host memory: nothing of a device is handed to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from benchmarks.emulated_device import EmulatedDevice
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.collectives import Collectives
from lightning_gossip.runtime.islands.flags import IslandFlags, StepFlag
from lightning_gossip.runtime.islands.host_collectives import gathered_from, gathered_list, reduced
from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.strategies.state.checkpoint_contents import mean_optimizer_state
from lightning_gossip.strategies.state.shared_tensors import start_equal
from lightning_gossip.transport.gloo_group import host_group

HOST = torch.device("cpu")


class Alone(FixedWorkers):
    """The one worker of a group of one."""

    def gather(self, mine: object, kind: str = "values") -> list[object]:
        return [mine]


@pytest.fixture
def group() -> dist.ProcessGroup:
    return host_group(HashStore(), 0, 1, 10.0)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(collectives=False)
    yield device
    device.close()


def model_on(device: EmulatedDevice) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for tensor in model.state_dict().values():
        device.tensor(tensor)
    return model


def test_models_start_equal_through_host_memory(device: EmulatedDevice, group: dist.ProcessGroup) -> None:
    model = model_on(device)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with device:
        with pytest.raises(RuntimeError, match="works on host memory, and was given a tensor of the device's"):
            start_equal(model, Alone(group))
        start_equal(model, Alone(group), in_host_memory=True)
        device.synchronize()
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_means_and_gathered_values_go_through_host_memory(device: EmulatedDevice, group: dist.ProcessGroup) -> None:
    workers = Alone(group)
    x, model = device.tensor(torch.arange(4.0)), model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": device.tensor(torch.ones_like(parameter))}
    state = optimizer.state_dict()
    with device:
        assert reduced(x, workers, "mean").tolist() == [0.0, 1.0, 2.0, 3.0]
        assert gathered_from(x, workers).shape == (1, 4)
        assert len(gathered_list(x, workers)) == 1
        mean = mean_optimizer_state(state, HOST, workers, keeps=lambda: True)["state"]
        assert mean[0]["momentum_buffer"].sum() == 12.0
        device.synchronize()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_sums_of_a_devices_vectors_go_through_host_memory(device: EmulatedDevice, group: dist.ProcessGroup) -> None:
    """As the averagings of islands need them; the vector is free to change meanwhile."""
    collectives = Collectives(HOST, 10.0, Timeline(), group, staged=True)
    x = device.tensor(torch.arange(4.0))
    with device:
        with pytest.raises(RuntimeError, match="works on host memory, and was given a tensor of the device's"):
            Collectives(HOST, 10.0, Timeline(), group).sum(x)
        pending = collectives.start_sum(x)
        x.zero_()
        pending.wait()
        assert collectives.sum_of(1.0, 2.5) == [1.0, 2.5]
        device.synchronize()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_flags_are_in_host_memory(group: dist.ProcessGroup) -> None:
    """And each is known one batch after it was set, to all, and once."""
    flags = IslandFlags(lambda: group)
    with torch.device("meta"):  # a user's default device
        assert flags.reduce(StepFlag.STOP) == StepFlag.NOTHING
        assert flags.reduce(StepFlag.ASK | StepFlag.LEAVE) == StepFlag.STOP
        assert flags.reduce(StepFlag.NOTHING) == StepFlag.ASK | StepFlag.LEAVE
        assert flags.take_last() == StepFlag.NOTHING
        assert flags.take_last() == StepFlag.NOTHING
        flags.reduce(StepFlag.MEET)
        flags.forget()
        assert flags.take_last() == StepFlag.NOTHING
