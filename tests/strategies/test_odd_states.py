"""States of optimizers that are not only floating-point tensors: what a joiner gets of them, and what a checkpoint holds."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.optim.swa_utils import SWALR

from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.strategies.elastic.optimizer_transfer import _described, _made, copy_optimizers
from lightning_gossip.strategies.elastic.state_transfer import load_scheduler_states, scheduler_states
from lightning_gossip.strategies.state.checkpoint_contents import mean_optimizer_state
from lightning_gossip.strategies.state.optimizer_state import OptimizerStates
from tests.strategies.launch import launch

processes = pytest.mark.processes
HOST = torch.device("cpu")


class Coded(Optimizer):
    """SGD whose momentum is kept in 8 bits, as 8-bit optimizers do; initialised at a parameter's first step."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if len(state) == 0:
                    state["codes"] = torch.full(parameter.shape, 128, dtype=torch.uint8)
                    state["scale"] = torch.zeros(())
                    state["signs"] = [torch.zeros(parameter.shape, dtype=torch.bool), (torch.zeros(2, dtype=torch.bfloat16),)]
                    state["step"] = torch.zeros(1, dtype=torch.int64)
                    state["seen"] = 0
                momentum = (state["codes"].float() - 128) * state["scale"] * 0.9 + parameter.grad
                state["scale"] = momentum.abs().max() / 127
                state["codes"] = (momentum / state["scale"]).round().add(128).to(torch.uint8)
                state["signs"][0] = momentum > 0
                state["signs"][1][0].add_(0.25)
                state["step"] += 1
                state["seen"] += 1
                parameter.sub_(group["lr"] * momentum)


def _flat(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: _flat(one) for key, one in value.items()}
    return [_flat(one) for one in value] if isinstance(value, list | tuple) else value


def _stepped(used: dict[int, list[int]], kind: type[Optimizer] = Coded, **options: Any) -> tuple[int, Optimizer]:
    """A rank's optimizer after steps with gradients of its own, for the parameters that it uses."""
    rank = int(os.environ["RANK"])
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    optimizer = kind(parameters, lr=0.1, **options)  # type: ignore[call-arg]
    for number in used[rank]:
        parameters[number].grad = (torch.arange(float(parameters[number].numel())) - rank).reshape(parameters[number].shape)
    for _ in range(rank + 2):
        optimizer.step()
    return rank, optimizer


def _join(used: dict[int, list[int]]) -> Any:
    rank, optimizer = _stepped(used)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    copy_optimizers([optimizer], FixedWorkers(), receives=rank == 1, device=HOST, group=lambda: None)
    dist.destroy_process_group()
    copied = _flat(optimizer.state_dict()["state"])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # a parameter without a state begins
    return copied, _flat(optimizer.state_dict()["state"])


@processes
@pytest.mark.parametrize("used", [{0: [0, 1], 1: []}, {0: [0], 1: [0, 1]}], ids=["it is new", "it comes back with another one"])
def test_a_joiner_gets_all_of_an_optimizers_state(used: dict[int, list[int]]) -> None:
    member, joiner = launch(_join, used)
    assert member == joiner
    assert set(member[0]) == set(used[0])


@pytest.mark.parametrize("with_parameter", [True, False], ids=["fused or capturable", "neither"])
def test_what_is_made_for_others_states_is_on_the_device_where_they_have_it(with_parameter: bool) -> None:
    """A kernel of a device that finds a step count in host memory fails. The device is one of which each machine has one."""
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    member, joiner = (torch.optim.AdamW([parameter]) for _ in range(2))
    member.state[parameter] = {
        "step": torch.zeros((), device="meta" if with_parameter else "cpu"),
        "exp_avg": torch.zeros(3, device="meta"),
        "qmap": torch.zeros(16, dtype=torch.uint8, device="meta"),
    }
    devices = {name: value.device for name, value in member.state[parameter].items()}
    made = _made(_described(member, [parameter])[0], parameter)
    assert {name: value.device for name, value in made.items()} == devices
    OptimizerStates([joiner]).tensors(OptimizerStates([member]).slots())  # to be averaged
    assert {name: value.device for name, value in joiner.state[parameter].items()} == {
        name: devices[name] for name in ("exp_avg", "step")
    }


def _join_in_parts() -> Any:
    """Two islands of two ranks, whose parameters differ in size as uneven shards do; the second one joins."""
    rank = int(os.environ["RANK"])
    part, receives = rank % 2, rank >= 2
    parameter = torch.nn.Parameter(torch.ones(3 - part))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    if not receives:
        parameter.grad = torch.arange(float(3 - part)) + rank
        optimizer.step()
    dist.init_process_group("gloo", rank=rank, world_size=4)
    peers = [dist.new_group([first, first + 2]) for first in (0, 1)][part]
    copy_optimizers([optimizer], FixedWorkers(), receives=receives, device=HOST, part=part, group=lambda: peers)
    dist.destroy_process_group()
    return _flat(optimizer.state_dict()["state"])


@processes
def test_each_rank_of_a_joining_island_gets_the_state_of_its_own_part() -> None:
    first, second, *joined = launch(_join_in_parts, workers=4)
    assert joined == [first, second]
    assert second[0]["momentum_buffer"][1] == [1.0, 2.0]


def _saved(used: dict[int, list[int]]) -> Any:
    rank, optimizer = _stepped(used)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mean = mean_optimizer_state(optimizer.state_dict(), HOST, FixedWorkers(), keeps=lambda: rank == 0)
    dist.destroy_process_group()
    return _flat(optimizer.state_dict()["state"]), _flat(mean["state"])


@processes
def test_a_checkpoint_does_not_mix_codes_with_the_mean_of_their_scales() -> None:
    """The state of a parameter is that of the lowest rank that has one."""
    (own, saved), (others, nothing) = launch(_saved, {0: [0], 1: [0, 1]})
    assert saved == {0: own[0], 1: others[1]}
    assert own[0] != others[0]
    assert nothing == {}


def _saved_with_counters() -> Any:
    rank, optimizer = _stepped({0: [0], 1: [0, 1]}, torch.optim.SGD, momentum=0.9)
    for state in optimizer.state.values():
        state["step"], state["seen"] = torch.tensor([rank + 2]), rank + 2
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mean = mean_optimizer_state(optimizer.state_dict(), HOST, FixedWorkers(), keeps=lambda: rank == 0)
    dist.destroy_process_group()
    return _flat(optimizer.state_dict()["state"]), _flat(mean["state"])


@processes
def test_counters_do_not_keep_a_state_from_having_a_mean() -> None:
    (own, saved), (others, _) = launch(_saved_with_counters)
    mean = [(a + b) / 2 for a, b in zip(own[0]["momentum_buffer"][1], others[0]["momentum_buffer"][1], strict=True)]
    assert saved[0]["momentum_buffer"][1] == pytest.approx(mean)
    assert saved[0]["step"] == (torch.int64, [2])
    assert saved[0]["seen"] == 2
    assert saved[1] == others[1]  # of which rank 0 has none, and an optimizer that finds half of a state fails


def test_schedules_that_a_callback_has_put_in_on_the_members_are_left_to_the_callback_of_a_joiner() -> None:
    def schedules(*kinds: type[LRScheduler], steps: int) -> list[LRSchedulerConfig]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
        make: dict[type[LRScheduler], Any] = {StepLR: lambda: StepLR(optimizer, 2), SWALR: lambda: SWALR(optimizer, 0.1)}
        made = [LRSchedulerConfig(make[kind]()) for kind in kinds]
        for _ in range(steps):
            optimizer.step()
            for config in made:
                config.scheduler.step()
        return made

    joiner = schedules(StepLR, steps=0)
    load_scheduler_states(joiner, scheduler_states(schedules(SWALR, steps=4)))  # replaced
    assert joiner[0].scheduler.last_epoch == 0
    load_scheduler_states(joiner, scheduler_states(schedules(StepLR, SWALR, steps=4)))  # added
    assert joiner[0].scheduler.last_epoch == 4
