"""Outer steps in real fits: beside a DiLoCo of a few lines, and what they do at a resume, a death, an arrival."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from lightning_gossip import Outer, PeriodicAveragingStrategy
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, samples, trainer

pytestmark = pytest.mark.processes

STEPS, BATCH, PERIOD, WORKERS = 22, 4, 4, 3


def indices(rank: int) -> list[int]:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randint(0, 128, (STEPS * BATCH,), generator=generator).tolist()


class Own(SequentialSampler):
    """Each rank's own samples."""

    def __iter__(self) -> Any:
        import torch.distributed as dist

        return iter(indices(dist.get_rank()))

    def __len__(self) -> int:
        return STEPS * BATCH


def network(momentum: float = 0.9) -> Net:
    torch.manual_seed(3)

    def optimizer(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-3)

    return Net(optimizer, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))


def _fit(strategy: Any) -> Any:
    model, data = network(), samples(128)
    t = trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    t.fit(model, DataLoader(data, batch_size=BATCH, sampler=Own(data)))
    return flat(model.network).tolist(), t.strategy.report.workers[0].averagings


def by_hand(outer: Outer, *, late: int = 0) -> torch.Tensor:
    """The mean of all models after the epoch: local steps, and torch's own optimizer on the mean of their progress.

    Args:
        outer: the outer step.
        late: steps after which it is applied, as a difference.
    """
    models, data = [network() for _ in range(WORKERS)], samples(128)
    slow = copy.deepcopy(models[0].network)
    inner = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for model in models]
    outside = torch.optim.SGD(
        slow.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov and outer.momentum > 0
    )
    begun: list[list[torch.Tensor]] = []
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            at = indices(rank)[(step - 1) * BATCH : step * BATCH]
            x, y = torch.stack([data[i][0] for i in at]), torch.stack([data[i][1] for i in at])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.network(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            if step % PERIOD == 0:
                begun = [[p.clone() for p in model.network.parameters()] for model in models]
            if begun and (step - late) % PERIOD == 0:
                for number, parameter in enumerate(slow.parameters()):
                    parameter.grad = parameter - torch.stack([theirs[number] for theirs in begun]).mean(0)
                outside.step()
                for model, snapshot in zip(models, begun, strict=True):
                    for own, new, old in zip(model.network.parameters(), slow.parameters(), snapshot, strict=True):
                        own += new - old
                begun = []
    return torch.stack([flat(model.network) for model in models]).mean(0)


@pytest.mark.parametrize(
    ("outer", "late"),
    [
        pytest.param(Outer(0.7, 0.9), 0, id="DiLoCo"),
        pytest.param(Outer(0.7, 0.9), 2, id="DiLoCo, overlapped"),
        pytest.param(Outer(1.0, 0.6, nesterov=False), 0, id="SlowMo", marks=pytest.mark.slow),
    ],
)
def test_periodic_averaging_with_an_outer_step_is_that_of_a_few_lines(outer: Outer, late: int) -> None:
    strategy = PeriodicAveragingStrategy(period=PERIOD, outer=outer, overlap=late)
    results = launch(_fit, strategy, workers=WORKERS)
    assert results[0] == results[1] == results[2]
    ours, averagings = torch.tensor(results[0][0]), results[0][1]
    assert averagings == STEPS // PERIOD + 1
    expected = by_hand(outer, late=late)
    start = flat(network().network)
    assert (ours - expected).abs().max() < 1e-5 * (expected - start).abs().max()
    without = by_hand(Outer(1.0, 0.0), late=late)
    assert (ours - without).abs().max() > 1e-2 * (expected - start).abs().max()


class Watched(Callback):
    """The model after each batch."""

    def __init__(self) -> None:
        self.models: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        self.models.append(flat(model.network))


def _data() -> DataLoader[Any]:
    return loader(6 * 8 * 2, 8, shuffle=False)  # 6 steps an epoch for each of two workers


def _diloco(kind: Any) -> PeriodicAveragingStrategy:
    """A round of 5 steps: a checkpoint after step 12 comes in the middle of one."""
    at_rendezvous: Any = "evaluate" if kind == "replicas" else "adopt"
    return PeriodicAveragingStrategy(period=5, outer=Outer(0.7, 0.9), checkpoint=kind, at_rendezvous=at_rendezvous)


def _epochs(make: Any, kind: str, path: str, *, resumes: bool) -> Any:
    """Three epochs: all, with a checkpoint after the second; or the third, from it."""
    watched = Watched()
    callbacks: list[Callback] = [watched]
    if not resumes:
        callbacks.append(ModelCheckpoint(dirpath=path, filename="{epoch}", save_top_k=-1))
    # the mean of the workers' momenta is in the file, and each goes on with its own here
    model = network(momentum=0.9 if kind == "replicas" else 0.0)
    t = trainer(strategy=make(kind), max_epochs=3, callbacks=callbacks)
    t.fit(model, _data(), ckpt_path=f"{path}/epoch=1.ckpt" if resumes else None)
    return [x.tolist() for x in watched.models]


def both(make: Any, kind: str, path: Path) -> tuple[Any, Any]:
    """The third epoch in one go, and resumed, by rank."""
    whole = launch(_epochs, make, kind, str(path), resumes=False)
    return [run[12:] for run in whole], launch(_epochs, make, kind, str(path), resumes=True)


@pytest.mark.parametrize("kind", ["mean", pytest.param("replicas", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, kind: str) -> None:
    whole, resumed = both(_diloco, kind, tmp_path)
    assert len(whole[0]) == 6
    assert whole == resumed
    ours = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["lightning_gossip"]["tensors"]
    assert set(ours) == {f"{part}/{name}" for part in ("slow", "velocity") for name, _ in network().named_parameters()}
    assert all(tensor.abs().max() > 0 for tensor in ours.values())


def test_a_checkpoint_without_outer_state_begins_a_round_with_its_model(tmp_path: Path) -> None:
    launch(_epochs, _diloco, "mean", str(tmp_path), resumes=False)
    path = tmp_path / "epoch=1.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lightning_gossip"]["tensors"]
    torch.save(checkpoint, path)
    a, b = launch(_epochs, _diloco, "mean", str(tmp_path), resumes=True)
    start = torch.cat([tensor.flatten() for name, tensor in checkpoint["state_dict"].items() if name.startswith("network")])
    gained = (torch.tensor(a[1]) + torch.tensor(b[1])) / 2 - start  # of two steps; the third ends the round under way
    assert a[2] == b[2]
    gain = 0.7 * (1.0 + 0.9)  # of a first outer step
    moved = torch.tensor(a[2]) - start
    assert 0.5 * gain * gained.norm() < moved.norm() < 3.0 * gain * gained.norm()
