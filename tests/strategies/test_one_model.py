"""What workers make one of when they meet, beside the tensors that they share. Three forked processes for all tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.strategies.state.averaged_weights import AveragedWeights
from lightning_gossip.strategies.state.one_model import compare, compare_rest, unite
from lightning_gossip.strategies.state.shared_tensors import SharedModel, places
from tests.workers import run_processes

WORLD = 3
pytestmark = pytest.mark.processes


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Parameter(torch.zeros(2))
        self.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.late = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)
        self.base = nn.Parameter(torch.ones(1000), requires_grad=False)
        self.codes = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
        self.norm = nn.BatchNorm1d(2, affine=False, momentum=None)
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("grows", torch.zeros(1))
        self.register_buffer("coarse", torch.zeros(2, dtype=torch.bfloat16))


def state_of(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


def of_a_model(rank: int, sync_point: SyncPoint) -> dict[str, Any]:
    module = Module()
    model = SharedModel(module).open()
    for parameter in (module.student, module.teacher):
        parameter.data = torch.full((2,), float(rank))
    module.phase.data.fill_(complex(rank, -rank))
    module.codes.fill_(rank)
    module.norm.running_mean = torch.full((2,), float(rank))  # as SWA does
    module.queue.fill_(rank + 1)
    module.pointer.fill_(rank + 1)
    module.mask[0] = rank == 0
    module.grows = torch.full((3 - rank,), 7.0)
    module.coarse.fill_(1 + rank)
    module.late.requires_grad_(rank == 1)  # thawed by one that is further on
    found = compare_rest(model, sync_point, parts=sync_point, flag=rank == 2)
    own = [tensor.tolist() for tensor in found.tensors]
    united = found.unite(counts=True)
    united.write()
    distance = united.distance
    again = compare_rest(model, sync_point, parts=sync_point)
    return {
        "means": [place.name for place in found.means],
        "follows": [place.name for place in found.follows],
        "flags": (found.flag, again.flag),
        "own": own,
        "distance": distance,
        "state": state_of(module),
        "again": [*again.means, *again.follows],
        "trained": sorted(model.trained),
    }


def of_parts(rank: int, sync_point: SyncPoint) -> dict[str, Any]:
    """One worker has no value of use; one has a tensor that the others have not; nobody has begun."""
    seen: dict[str, Any] = {}
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, float("nan") if rank == 0 else rank)
    nn.init.constant_(module.bias, 0.0)
    unite(compare(places(module), sync_point), sync_point).write()
    seen["healthy"] = module.weight.tolist()

    nn.init.constant_(module.weight, rank)
    unite(compare(places(module), sync_point), sync_point, takes_part=rank == 1).write()
    seen["one"] = module.weight.tolist()

    nn.init.constant_(module.weight, rank)
    unite(compare(places(module), sync_point), sync_point, takes_part=False).write()
    seen["none"] = module.weight.tolist()

    nn.init.constant_(module.weight, rank)
    if rank == 1:
        module.register_buffer("extra", torch.ones(1))
    unite(compare(places(module), sync_point), sync_point).write()
    seen["common"] = module.weight.tolist()
    seen["nothing"] = unite(compare([], sync_point), sync_point).distance
    return seen


class Trainer:
    """What is asked of one."""

    def __init__(self, callbacks: list[Any], global_step: int) -> None:
        self.callbacks, self.global_step = callbacks, global_step


def of_averages(rank: int, sync_point: SyncPoint) -> dict[str, Any]:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    ema, swa = EMAWeightAveraging(), StochasticWeightAveraging(0.1)
    ema._average_model = AveragedModel(module, use_buffers=True)
    ema._average_model.n_averaged.fill_(10 * rank)  # that of rank 0 has not begun
    swa._average_model = AveragedModel(module).module  # any module
    swa.n_averaged = None if rank == 0 else torch.tensor(2)
    ema._latest_update_step = 10 * rank - 1
    for average in (ema._average_model.module, swa._average_model):
        nn.init.constant_(average[0].weight, rank)
        average[1].running_var.fill_(rank)
        average[1].num_batches_tracked.fill_(rank)
    mine = [ema, swa] if rank else [nn.Identity(), ema, swa]  # a callback of rank 0's alone stands before them
    if rank == 2:
        late = EMAWeightAveraging()
        late._average_model = AveragedModel(module)
        mine.append(late)  # of one worker only
    averages = AveragedWeights(Trainer(mine, 10 * rank), ())  # type: ignore[arg-type]
    assert averages.are_there
    assert not AveragedWeights(Trainer([EMAWeightAveraging()], 0), ()).are_there  # type: ignore[arg-type]
    averages.unite(sync_point, steps=10)
    return {
        "ema": (state_of(ema._average_model), ema._latest_update_step),
        "swa": (state_of(swa._average_model), None if swa.n_averaged is None else int(swa.n_averaged)),
    }


def script(rank: int) -> dict[str, Any]:
    sync_point = SyncPoint(torch.device("cpu"), FixedWorkers())
    return {case.__name__: case(rank, sync_point) for case in (of_a_model, of_parts, of_averages)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    results = run_processes(script, tmp_path_factory.mktemp("one_model"), world_size=WORLD)
    assert all(isinstance(result, dict) for result in results), results
    return results


def everyones(seen: list[dict[str, Any]], case: str, what: str) -> Any:
    """What all ranks say alike."""
    said = [worker[case][what] for worker in seen]
    assert said[0] == said[1] == said[2], said
    return said[0]


def test_what_differs_is_averaged_if_it_is_an_average_and_otherwise_that_of_rank_0(seen: list[dict[str, Any]]) -> None:
    state = [worker["of_a_model"]["state"] for worker in seen]
    assert [worker.pop("student") for worker in state] == [[rank, rank] for rank in range(WORLD)]  # the session's, not ours
    assert state[0] == state[1] == state[2]
    assert state[0] == {
        "teacher": [1, 1],
        "late": [0, 0],
        "phase": [1 - 1j, 1 - 1j],
        "base": [1] * 1000,
        "codes": [0, 0],
        "norm.running_mean": [1, 1],
        "norm.running_var": [1, 1],
        "norm.num_batches_tracked": 0,
        "queue": [1, 1],
        "pointer": [1],
        "mask": [True, False],
        "grows": [7, 7, 7],
        "coarse": [1, 1],
    }


def test_only_what_differs_is_touched_and_afterwards_nothing_does(seen: list[dict[str, Any]]) -> None:
    assert everyones(seen, "of_a_model", "means") == ["teacher", "phase", "norm.running_mean"]
    assert everyones(seen, "of_a_model", "follows") == ["codes", "queue", "pointer", "mask", "grows", "coarse"]
    assert everyones(seen, "of_a_model", "again") == []
    for rank, worker in enumerate(seen):
        assert worker["of_a_model"]["own"][0] == [rank, rank]
        # teacher, phase as two numbers each, running mean
        assert worker["of_a_model"]["distance"] == pytest.approx(8 * (rank - 1) ** 2)


def test_all_workers_learn_which_parameters_are_trained(seen: list[dict[str, Any]]) -> None:
    assert everyones(seen, "of_a_model", "trained") == ["late", "phase", "student", "teacher"]
    assert everyones(seen, "of_a_model", "flags") == (True, False)


def test_a_worker_that_is_ill_or_has_nothing_does_not_count(seen: list[dict[str, Any]]) -> None:
    assert everyones(seen, "of_parts", "healthy") == [[1.5, 1.5]]
    assert everyones(seen, "of_parts", "one") == [[1, 1]]
    assert everyones(seen, "of_parts", "none") == [[0, 0]]


def test_a_tensor_that_one_worker_alone_has_does_not_hang_the_others(seen: list[dict[str, Any]]) -> None:
    assert everyones(seen, "of_parts", "common") == [[1, 1]]
    assert everyones(seen, "of_parts", "nothing") == 0


def test_averaged_weights_become_one_and_the_next_step_is_averaged_by_all_or_none(seen: list[dict[str, Any]]) -> None:
    state, latest = everyones(seen, "of_averages", "ema")
    assert state == {
        "n_averaged": 15,
        "module.0.weight": [[1.5]],  # rank 0 has not begun to average
        "module.1.running_mean": [0],
        "module.1.running_var": [1.5],
        "module.1.num_batches_tracked": 1,
    }
    assert latest == 9
    swa = [worker["of_averages"]["swa"] for worker in seen]
    assert swa[0][0] == swa[1][0] == swa[2][0]
    assert swa[0][0]["0.weight"] == [[1.5]]
    assert [count for _, count in swa] == [None, 2, 2]
