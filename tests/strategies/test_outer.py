"""Outer steps in real fits: beside a DiLoCo of a few lines, and what they do at a resume, a death, an arrival."""

from __future__ import annotations

import copy
import itertools
import math
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, SequentialSampler

from lightning_gossip import ADPSGDStrategy, Outer, PeriodicAveragingStrategy
from tests.strategies.jobs import job, survivors
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, samples, trainer
from tests.strategies.test_survival import _until_it_is_back

pytestmark = pytest.mark.processes

STEPS, BATCH, PERIOD, WORKERS = 22, 4, 4, 3


def indices(rank: int) -> list[int]:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randint(0, 128, (STEPS * BATCH,), generator=generator).tolist()


class Own(SequentialSampler):
    """Each rank's own samples."""

    def __iter__(self) -> Any:
        return iter(indices(int(os.environ["RANK"])))

    def __len__(self) -> int:
        return STEPS * BATCH


def network(momentum: float = 0.9) -> Net:
    torch.manual_seed(3)

    def optimizer(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-3)

    return Net(optimizer, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))


def _fit(strategy: Any) -> Any:
    return fit_own(strategy, network())


def fit_own(strategy: Any, model: Net) -> Any:
    """Trains on each rank's own samples for an epoch."""
    data = samples(128)
    t = trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    t.fit(model, DataLoader(data, batch_size=BATCH, sampler=Own(data)))
    return whole(model.network), t.strategy.report.workers[0].averagings


def whole(model: nn.Module) -> list[float]:
    """All parameters in one vector, gathered where they are in shards."""
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([tensor.detach().reshape(-1) for tensor in found]).tolist()


def by_hand(
    outer: Outer, *, late: int = 0, fragments: int = 1, workers: int = WORKERS, ranks_of_worker: int = 1
) -> torch.Tensor:
    """The mean of all models after the epoch: local steps, and torch's own optimizer on the mean of their progress.

    Args:
        outer: the outer step.
        late: steps after which it is applied, as a difference.
        fragments: of the model, one after the other in a period.
        workers: models.
        ranks_of_worker: whose samples are a worker's batch.
    """
    models, data = [network() for _ in range(workers)], samples(128)
    inner = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for model in models]
    numel = parameters_to_vector(models[0].network.parameters()).numel()
    ends = [number * numel // fragments for number in range(fragments + 1)]
    places = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
    slow = [nn.Parameter(parameters_to_vector(models[0].network.parameters()).detach()[place].clone()) for place in places]
    outside = [
        torch.optim.SGD([s], lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov and outer.momentum > 0) for s in slow
    ]
    begins = {(number + 1) * PERIOD // fragments % PERIOD: number for number in range(fragments)}
    begun: dict[int, list[torch.Tensor]] = {}
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            mates = range(rank * ranks_of_worker, (rank + 1) * ranks_of_worker)
            at = [i for mate in mates for i in indices(mate)[(step - 1) * BATCH : step * BATCH]]
            x, y = torch.stack([data[i][0] for i in at]), torch.stack([data[i][1] for i in at])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.network(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            if step % PERIOD in begins:
                number = begins[step % PERIOD]
                begun[step] = [parameters_to_vector(m.network.parameters())[places[number]].clone() for m in models]
            for at_step in [
                b for b in begun if b + late == step or step == STEPS
            ]:  # what is under way at the end is waited for
                snapshots, number = begun.pop(at_step), begins[at_step % PERIOD]
                slow[number].grad = slow[number] - torch.stack(snapshots).mean(0)
                outside[number].step()
                for model, snapshot in zip(models, snapshots, strict=True):
                    x = parameters_to_vector(model.network.parameters())
                    x[places[number]] += slow[number] - snapshot
                    vector_to_parameters(x, model.network.parameters())
    return torch.stack([flat(model.network) for model in models]).mean(0)


@pytest.mark.parametrize(
    ("outer", "late", "fragments"),
    [
        pytest.param(Outer(0.7, 0.9), 0, 1, id="DiLoCo"),
        pytest.param(Outer(0.7, 0.9), 2, 1, id="DiLoCo, overlapped", marks=pytest.mark.slow),
        pytest.param(Outer(0.7, 0.9), 1, 2, id="Streaming DiLoCo"),
        pytest.param(Outer(1.0, 0.6, nesterov=False), 0, 1, id="SlowMo", marks=pytest.mark.slow),
    ],
)
def test_periodic_averaging_with_an_outer_step_is_that_of_a_few_lines(outer: Outer, late: int, fragments: int) -> None:
    strategy = PeriodicAveragingStrategy(period=PERIOD, outer=outer, overlap=late, fragments=fragments)
    results = launch(_fit, strategy, workers=WORKERS)
    assert results[0] == results[1] == results[2]
    ours, averagings = torch.tensor(results[0][0]), results[0][1]
    assert averagings == STEPS * fragments // PERIOD + 1
    expected = by_hand(outer, late=late, fragments=fragments)
    start = flat(network().network)
    assert (ours - expected).abs().max() < 1e-5 * (expected - start).abs().max()
    without = by_hand(Outer(1.0, 0.0), late=late, fragments=fragments)
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


# -- gossip: each worker's own rounds ----------------------------------------------------------------------------------------


def _noloco(kind: Any) -> ADPSGDStrategy:
    """Without exchanges nothing is left to chance; workers meet at the epochs' ends. A round of 5 steps, of 6 in an epoch."""
    return ADPSGDStrategy(
        local_steps=5, outer=Outer(0.7, 0.9), exchanges_per_step=0.0, dense_share=0.0, work_sharing=False, checkpoint=kind
    )


def rounds_by_hand(seen: list[list[int]], epochs: int) -> torch.Tensor:
    """Two workers, each with a slow model and torch's optimizer on it; a meeting moves both models of a worker alike."""
    models, data = [network(momentum=0.0) for _ in range(2)], samples(96)
    slow = [copy.deepcopy(model.network) for model in models]
    inner = [torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3) for model in models]
    outside = [torch.optim.SGD(s.parameters(), lr=0.7, momentum=0.9, nesterov=True) for s in slow]
    for step in range(1, 6 * epochs + 1):
        for rank, model in enumerate(models):
            at = seen[rank][(step - 1) * 8 : step * 8]
            x, y = torch.stack([data[i][0] for i in at]), torch.stack([data[i][1] for i in at])
            inner[rank].zero_grad()
            nn.functional.cross_entropy(model.network(x), y).backward()
            inner[rank].step()
            with torch.no_grad():
                if step % 5 == 0:
                    for parameter, own in zip(slow[rank].parameters(), model.network.parameters(), strict=True):
                        parameter.grad = parameter - own
                    outside[rank].step()
                    model.network.load_state_dict(slow[rank].state_dict())
        if step % 6 == 0:
            with torch.no_grad():
                every = zip(*(model.network.parameters() for model in models), strict=True)
                slows = zip(*(s.parameters() for s in slow), strict=True)
                for parameters, slow_parameters in zip(every, slows, strict=True):
                    mean = torch.stack([p.detach() for p in parameters]).mean(0)
                    for parameter, slow_parameter in zip(parameters, slow_parameters, strict=True):
                        slow_parameter += mean - parameter
                        parameter.copy_(mean)
    return flat(models[0].network)


def _rounds() -> Any:
    model = network(momentum=0.0)
    t = trainer(strategy=_noloco("mean"), max_epochs=4)
    t.fit(model, _data())
    return flat(model.network).tolist(), model.seen


def test_a_worker_alone_has_outer_steps_of_its_own_and_a_meeting_is_no_progress() -> None:
    (a, seen), (b, seen_elsewhere) = launch(_rounds)
    expected, start = rounds_by_hand([seen, seen_elsewhere], 4), flat(network().network)
    assert a == b
    assert (torch.tensor(a) - expected).abs().max() < 1e-5 * (expected - start).abs().max()


@pytest.mark.parametrize("kind", ["mean", "replicas"])
def test_rounds_of_workers_go_on_to_the_bit_from_a_checkpoint(tmp_path: Path, kind: str) -> None:
    whole, resumed = both(_noloco if kind == "mean" else _noloco_of_replicas, kind, tmp_path)
    assert len(whole[0]) == 6
    assert whole == resumed


def _noloco_of_replicas(_: str) -> ADPSGDStrategy:
    return _noloco("replicas")


CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("accumulated and clipped", {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    ("bfloat16", {}, {"precision": "bf16-mixed"}),
    ("evaluating", {"at_rendezvous": "evaluate"}, {}),
    ("all", {"outer": Outer(1.0, 0.4, momentum_of="all")}, {}),
    ("int8, dense start", {"dense_share": 0.3, "wire": "int8"}, {}),
]


class TwoParts(Net):
    """A frozen layer, and an optimizer for each of two others, stepped in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()[batch_idx % 2]
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.network[at].parameters(), lr=0.05) for at in (1, 3)]


def _fits() -> Any:
    results = {}
    for name, options, others in CHANGES:
        model = Net()
        strategy = ADPSGDStrategy(**{"local_steps": 3, "outer": Outer(), "dense_share": 0.0, **options})
        t = trainer(strategy=strategy, max_epochs=3, **others)
        t.fit(model, loader(240, 8), loader(64, shuffle=False))
        results[name] = (flat(model).tolist(), strategy.report.workers[0].exchanges, float(t.callback_metrics["val_loss"]))
    torch.manual_seed(1)
    model = TwoParts()
    frozen = model.network[0].weight.clone()
    t = trainer(strategy=ADPSGDStrategy(local_steps=3, outer=Outer(), dense_share=0.0), max_epochs=2)
    t.fit(model, loader(240, 8))
    results["two optimizers"] = (flat(model).tolist(), 1, 0.0)
    if t.is_global_zero:
        assert torch.equal(model.network[0].weight, frozen)
    return results


def test_outer_steps_go_with_what_else_a_fit_has() -> None:
    a, b = launch(_fits)
    for name, (model, exchanges, loss) in a.items():
        assert b[name][0] == model, name
        assert all(math.isfinite(value) for value in model), name
        assert exchanges > 0, name
        assert loss < 0.7, name  # ln 2 is that of a guess


@pytest.mark.slow
def test_rounds_go_on_after_a_death_and_a_worker_that_comes_back_begins_one(tmp_path: Path) -> None:
    # no dense start: on a busy machine the worker is back before it is over, and then there is no outer state to be saved
    options = {"max_workers": 4, "local_steps": 3, "outer": Outer(1.0, 0.5), "exchanges_per_step": 1.0, "dense_share": 0.0}
    with job(_until_it_is_back, str(tmp_path), 2, 3, options, workers=3) as running:
        pids = running.start_all()
        psutil.wait_procs([psutil.Process(pids[2])], timeout=40)
        running.start(2)
        results = survivors(running.outcomes())
    assert len(results) == 3
    for result in results:
        assert result["model"] == results[0]["model"]
        assert all(math.isfinite(value) for value in result["model"])
        assert result["ranks"] == [0, 1, 2]
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["lightning_gossip"]["tensors"]
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert any(name.startswith("velocity/") for name in saved)
