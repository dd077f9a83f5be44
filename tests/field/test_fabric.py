"""Situations of public issue threads (test_cases.py) in a loop of the user's own: what works under DDP in a Fabric script."""

from __future__ import annotations

import copy
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy, normalize, softplus
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_gossip import (
    ADPSGDStrategy,
    APSGDStrategy,
    ConfigurationError,
    DPSGDStrategy,
    FabricStrategy,
    PeerError,
    PeriodicAveragingStrategy,
    QSGDStrategy,
)
from tests.strategies.launch import outcomes

pytestmark = pytest.mark.processes

WORKERS = 2
STRATEGIES: dict[str, Callable[..., Any]] = {
    "adpsgd": ADPSGDStrategy,
    "apsgd": APSGDStrategy,
    "dpsgd": DPSGDStrategy,
    "periodic_averaging": lambda **options: PeriodicAveragingStrategy(period=3, **options),
    "qsgd": lambda **options: QSGDStrategy(bits=8, **options),
}
Script = Callable[[Fabric, Path], dict[str, Any]]
Judge = Callable[[list[dict[str, Any]], str], None]


def digits(n: int = 64, seed: int = 0) -> TensorDataset:
    """A learnable toy problem: inputs, labels, and each sample's number."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    w = torch.randn(8, 3, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, (x @ w).argmax(1), torch.arange(n))


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().double().numpy().copy() for name, value in module.state_dict().items()}


def same(ranks: list[dict[str, Any]], key: str, tolerance: float = 1e-6) -> None:
    for theirs in ranks[1:]:
        for name, value in ranks[0][key].items():
            gap = float(abs(value - theirs[key][name]).max())
            assert gap <= tolerance, f"{key}: {name} differs over ranks by {gap:.3g}"


def _small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def _sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr, momentum=0.9)


# -- the scripts ---------------------------------------------------------------------------------------------------------


def frozen_discriminator(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """01: the discriminator is frozen for the generator's step, and stays so at the end of the batch."""
    torch.manual_seed(1)
    g = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    d = nn.Sequential(nn.Linear(11, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    generator, opt_g = fabric.setup(g, torch.optim.Adam(g.parameters(), 0.01))
    discriminator, opt_d = fabric.setup(d, torch.optim.Adam(d.parameters(), 0.01))
    for _ in range(3):
        for x, y, _ in fabric.setup_dataloaders(DataLoader(digits(128), 8, shuffle=True)):
            real = nn.functional.one_hot(y, 3).float()
            fake = generator(x)
            d.requires_grad_(True)
            opt_d.zero_grad()
            wrong = softplus(discriminator(torch.cat([x, fake.detach()], 1))).mean()
            fabric.backward(wrong + softplus(-discriminator(torch.cat([x, real], 1))).mean())
            opt_d.step()
            d.requires_grad_(False)
            opt_g.zero_grad()
            fake = generator(x)
            fabric.backward(softplus(-discriminator(torch.cat([x, fake], 1))).mean() + (fake - real).abs().mean())
            opt_g.step()
    return {"d": weights(d), "g": weights(g)}


class SAM(torch.optim.SGD):
    """Sharpness aware: climb a little, take the gradient there, step from where one was."""

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["climb"] = p.grad * 0.05
                p.add_(self.state[p]["climb"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p].pop("climb"))
        torch.optim.SGD.step(self)
        self.zero_grad()


def sam_two_steps(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """03: first_step and second_step of the optimizer are called, never step."""
    net = _small()
    sam = SAM(net.parameters(), 0.1)
    model, _ = fabric.setup(net, sam)
    data = fabric.setup_dataloaders(DataLoader(digits(256), 8, shuffle=True))
    for _ in range(2):
        for x, y, _ in data:
            fabric.backward(cross_entropy(model(x), y))
            sam.first_step()
            fabric.backward(cross_entropy(model(x), y))
            sam.second_step()
    return {"model": weights(net)}


def updates_without_an_optimizer(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """57: gradients are taken by hand."""
    net = _small()
    model = fabric.setup_module(net)
    for _ in range(2):
        for x, y, _ in fabric.setup_dataloaders(DataLoader(digits(128), 8, shuffle=True)):
            fabric.backward(cross_entropy(model(x), y))
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None
                    p.data.sub_(0.1 * p.grad)
                    p.grad = None
    return {"model": weights(net)}


def saves_every_5_steps(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """05, 06: every rank asks for a checkpoint every 5 steps of its own, in odd epochs in the middle of a step; one is slow."""
    net = _small()
    model, optimizer = fabric.setup(net, _sgd(net))
    data = fabric.setup_dataloaders(DataLoader(digits(384), 8, shuffle=True))
    step, seen = 0, []
    for epoch in range(2):
        for x, y, index in data:
            seen += index.tolist()
            loss = cross_entropy(model(x), y)
            inside = epoch % 2 == 1
            if inside and step % 5 == 0:
                fabric.save(folder / f"{epoch}-{step}.ckpt", {"model": model, "optimizer": optimizer, "step": step})
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005 * fabric.global_rank)
            step += 1
            if not inside and step % 5 == 0:
                fabric.save(folder / f"{epoch}-{step}.ckpt", {"model": model, "optimizer": optimizer, "step": step})
    return {"model": weights(net), "seen": seen, "files": sorted(path.name for path in folder.glob("*.ckpt"))}


def pickles_and_metrics(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """07, 08, 21: modules with metrics are copied, pickled and computed in a loop, and metrics are one at its end."""
    net = _small()
    net.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")  # type: ignore[assignment]
    model, optimizer = fabric.setup(net, _sgd(net))
    data = fabric.setup_dataloaders(DataLoader(digits(96), 8, shuffle=True))
    tracker = torchmetrics.MetricTracker(torchmetrics.classification.MulticlassAccuracy(3, average="micro"))
    found: dict[str, Any] = {}
    for _ in range(2):
        tracker.increment()
        hits = total = 0
        for number, (x, y, _) in enumerate(data):
            out = net[2](net[1](net[0](x)))  # type: ignore[index]
            fabric.backward(cross_entropy(out, y))
            optimizer.step()
            optimizer.zero_grad()
            tracker(out.detach(), y)
            net.accuracy(out.detach(), y)  # type: ignore[operator]
            hits, total = hits + int((out.argmax(1) == y).sum()), total + len(y)
            if number == 0:
                found["inside"] = abs(float(net.accuracy.compute()) - hits / total)  # type: ignore[operator, union-attr]
        torch.save(net, folder / f"whole-{fabric.global_rank}.pt")
        other = copy.deepcopy(net)
        counts = fabric.all_reduce(torch.tensor([float(hits), float(total)]), reduce_op="sum")
        want = float(counts[0] / counts[1])
        found["end"] = {
            "metric": abs(float(net.accuracy.compute()) - want),  # type: ignore[operator, union-attr]
            "copy": abs(float(other.accuracy.compute()) - want),  # type: ignore[operator, union-attr]
            "tracker": abs(float(tracker.compute()) - want),
        }
        net.accuracy.reset()  # type: ignore[operator, union-attr]
    torch.load(folder / f"whole-{fabric.global_rank}.pt", weights_only=False)
    del model
    return found


def schedule_by_length(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """09, 71: what is reckoned from the loader's length, and what follows the strategy instead."""
    net = nn.Linear(8, 3)
    model, optimizer = fabric.setup(net, _sgd(net))
    data = fabric.setup_dataloaders(DataLoader(digits(128), 8, shuffle=True))
    progress = []
    for epoch in range(4):
        for x, y, _ in data:
            progress.append((epoch + fabric.strategy.share_of_epoch) / 4)  # type: ignore[attr-defined]
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
    return {"model": weights(net), "length": len(data), "progress": progress}


class _PrunedError(Exception):
    pass


def pruned_trial(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """11: the first trial is ended by an exception on all ranks, which the script catches; the next trials run."""
    outcome = []
    for trial in range(3):
        if trial:
            fabric = Fabric(
                accelerator="cpu", devices=WORKERS, strategy=FabricStrategy(STRATEGIES[os.environ["FIELD_STRATEGY"]]())
            )
            fabric.launch()
        net = _small()
        model, optimizer = fabric.setup(net, _sgd(net))
        data = fabric.setup_dataloaders(DataLoader(digits(96), 8, shuffle=True))
        try:
            for _ in range(2):
                for x, y, _ in data:
                    fabric.backward(cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                    if trial == 0:
                        raise _PrunedError
            outcome.append(float(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum")))
        except (_PrunedError, PeerError):  # under apsgd a worker needs the server until its own exception
            outcome.append(-1.0)
    return {"outcome": outcome, "model": weights(net)}


def unit_vectors_and_queues(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """12, 55: spectral norm's unit vectors, a momentum encoder whose storage is replaced, a queue and its pointer."""
    torch.manual_seed(1)
    net = nn.Module()
    net.query = nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 4)))
    net.key = copy.deepcopy(net.query).requires_grad_(False)
    net.register_buffer("queue", normalize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), dim=0))
    net.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
    fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.query.parameters(), 0.1))  # type: ignore[union-attr]
    data = fabric.setup_dataloaders(DataLoader(digits(144), 8, shuffle=True))
    lengths = []
    for _ in range(3):
        for x, _, _ in data:
            with torch.no_grad():
                for q, k in zip(net.query.parameters(), net.key.parameters(), strict=True):  # type: ignore[union-attr]
                    k.data = k.data * 0.9 + q.data * 0.1
                keys = normalize(net.key(x + 0.1 * torch.randn_like(x)), dim=1)  # type: ignore[operator]
            queries = normalize(net.query(x), dim=1)  # type: ignore[operator]
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ net.queue.clone()], 1)  # type: ignore[operator]
            at = int(net.pointer)  # type: ignore[arg-type]
            net.queue[:, at : at + len(x)] = keys.T  # type: ignore[index, operator]
            net.pointer[0] = (at + len(x)) % 64  # type: ignore[index, operator]
            fabric.backward(cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long)))
            optimizer.step()
            optimizer.zero_grad()
        lengths.append(float(net.queue.norm(dim=0).min()))  # type: ignore[operator, union-attr]
        lengths += [float(value.norm()) for name, value in net.named_buffers() if name.endswith(("._u", "._v"))]
    return {"model": weights(net), "lengths": lengths}


def growing_data_set(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """14: the loader is set up anew each epoch, over more data."""
    net = nn.Linear(8, 3)
    model, optimizer = fabric.setup(net, _sgd(net))
    seen: list[list[int]] = []
    for epoch in fabric.strategy.epochs_left(4):  # type: ignore[attr-defined]
        seen.append([])
        for x, y, index in fabric.setup_dataloaders(DataLoader(digits(48 * (1 + epoch)), 8, shuffle=True)):
            seen[-1] += index.tolist()
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return {"model": weights(net), "seen": seen}


def two_loaders_at_once(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """18: zip of a labelled and an unlabelled loader."""
    net = _small()
    model, optimizer = fabric.setup(net, _sgd(net))
    labelled, other = fabric.setup_dataloaders(
        DataLoader(digits(64), 8, shuffle=True), DataLoader(digits(96, seed=5), 8, shuffle=True)
    )
    seen: list[int] = []
    for _ in range(2):
        for (x, y, index), (z, _, _) in zip(labelled, other, strict=False):
            seen += index.tolist()
            fabric.backward(cross_entropy(model(x), y) + 0.1 * model(z).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        fabric.strategy.synchronize()  # type: ignore[attr-defined]
    return {"model": weights(net), "seen": seen}


def gathers_in_a_step(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """20: contrastive losses over the batches of all ranks."""
    net = _small()
    model, optimizer = fabric.setup(net, _sgd(net))
    for x, y, _ in fabric.setup_dataloaders(DataLoader(digits(64), 8, shuffle=True)):
        out = model(x)
        gathered = fabric.all_gather(out)
        fabric.backward(cross_entropy(out, y))
        optimizer.step()
        optimizer.zero_grad()
    return {"shape": tuple(gathered.shape)}


def evaluates_inside_the_epoch(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """25: a loop that counts steps, and evaluates every 4 of them."""
    net = _small()
    model, optimizer = fabric.setup(net, _sgd(net))
    train, val = fabric.setup_dataloaders(DataLoader(digits(128), 8, shuffle=True), DataLoader(digits(30, seed=3), 8))
    seen, validated = [], 0
    for _ in range(2):
        for number, (x, y, index) in enumerate(train):
            seen += index.tolist()
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if number % 4 == 3:
                net.eval()
                with torch.no_grad():
                    validated += sum(len(out) for out in (model(x) for x, _, _ in val))
                net.train()
    return {"model": weights(net), "seen": seen, "validated": validated}


def layers_thawed_in_turn(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """58: each layer is thawed for a batch and frozen again."""
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.3))
    for _ in range(3):
        for number, (x, y, _) in enumerate(fabric.setup_dataloaders(DataLoader(digits(256), 8, shuffle=True))):
            for place, layer in enumerate(net):
                layer.requires_grad_(place in (3, number % 3))
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        for place, layer in enumerate(net):
            layer.requires_grad_(place == 3)
    return {"model": weights(net)}


def rank_0_saves_alone(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """66: only rank 0 calls fabric.save, between two batches, which hangs under DDP."""
    net = _small()
    model, optimizer = fabric.setup(net, _sgd(net))
    for number, (x, y, _) in enumerate(fabric.setup_dataloaders(DataLoader(digits(128), 8, shuffle=True))):
        fabric.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and fabric.is_global_zero:
            fabric.save(folder / "first.ckpt", {"model": model})
    return {"model": weights(net), "files": sorted(path.name for path in folder.glob("*.ckpt"))}


def uneven_evaluation(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """70: 101 samples on two ranks, by metrics, by sums, and gathered."""
    net = _small()
    model, optimizer = fabric.setup(net, _sgd(net))
    train, val = fabric.setup_dataloaders(DataLoader(digits(64), 8, shuffle=True), DataLoader(digits(101, seed=4), 5))
    for x, y, _ in train:
        fabric.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    hits, seen = [], []
    with torch.no_grad():
        for x, y, index in val:
            out = model(x)
            accuracy.update(out, y)
            hits.append((out.argmax(1) == y).float())
            seen += index.tolist()
    x, y, _ = digits(101, seed=4).tensors
    with torch.no_grad():
        want = float((net(x).argmax(1) == y).float().mean())
    gathered = fabric.all_gather(torch.cat(hits))
    return {"seen": seen, "off": abs(float(accuracy.compute()) - want), "gathered": gathered.numel()}


# -- what is right -------------------------------------------------------------------------------------------------------


def _each_once(ranks: list[dict[str, Any]], samples: int, epochs: int) -> None:
    seen = sorted(index for theirs in ranks for index in theirs["seen"])
    assert seen == sorted(epochs * list(range(samples)))


def _one_model(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)


def _two_nets(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "d", 1e-5)
    same(ranks, "g", 1e-5)


def _steps_counted(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)
    steps = [worker["steps"] for worker in ranks[0]["report"]]
    assert sum(steps) == ranks[0]["batches"], steps
    if strategy == "adpsgd":
        assert sum(worker["exchanges"] for worker in ranks[0]["report"]) > 0


def _files(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model")
    _each_once(ranks, 384, 2)
    files = ranks[0]["files"]
    assert {name[0] for name in files} == {"0", "1"}, files
    assert len(files) >= 6, files


def _metrics(ranks: list[dict[str, Any]], strategy: str) -> None:
    for theirs in ranks:
        assert theirs["inside"] < 1e-6
        assert max(theirs["end"].values()) < 1e-6, theirs["end"]


def _progress(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)
    for theirs in ranks:
        progress = theirs["progress"]
        assert theirs["length"] == 8
        assert progress == sorted(progress)
        assert progress[0] < 0.1
        assert 0.85 < progress[-1] <= 1.0


def _trials(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)
    assert all(theirs["outcome"] == [-1.0, 2.0, 2.0] for theirs in ranks)


def _lengths(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)
    assert all(min(theirs["lengths"]) > 0.999 for theirs in ranks), min(ranks[0]["lengths"])


def _grown(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)
    for epoch in range(4):
        seen = sorted(index for theirs in ranks for index in theirs["seen"][epoch])
        assert seen == list(range(48 * (1 + epoch))), f"epoch {epoch}"


def _both(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)
    _each_once(ranks, 64, 2)


def _shape(ranks: list[dict[str, Any]], strategy: str) -> None:
    assert all(theirs["shape"] == (2, 8, 3) for theirs in ranks)


def _epoch_goes_on(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)
    _each_once(ranks, 128, 2)
    assert all(theirs["validated"] >= 15 for theirs in ranks)


def _saved(ranks: list[dict[str, Any]], strategy: str) -> None:
    same(ranks, "model", 1e-5)
    assert ranks[0]["files"] == ["first.ckpt"]


def _evaluated(ranks: list[dict[str, Any]], strategy: str) -> None:
    assert sorted(index for theirs in ranks for index in theirs["seen"]) == list(range(101))
    assert all(theirs["off"] < 1e-6 and theirs["gathered"] >= 101 for theirs in ranks)


CASES: dict[str, tuple[Script, Judge]] = {
    "01_frozen_discriminator": (frozen_discriminator, _two_nets),
    "03_sam_two_steps": (sam_two_steps, _steps_counted),
    "05_saves_every_5_steps": (saves_every_5_steps, _files),
    "07_pickles_and_metrics": (pickles_and_metrics, _metrics),
    "09_schedule_by_length": (schedule_by_length, _progress),
    "11_pruned_trial": (pruned_trial, _trials),
    "12_unit_vectors_and_queues": (unit_vectors_and_queues, _lengths),
    "14_growing_data_set": (growing_data_set, _grown),
    "18_two_loaders_at_once": (two_loaders_at_once, _both),
    "20_gathers_in_a_step": (gathers_in_a_step, _shape),
    "25_evaluates_inside_the_epoch": (evaluates_inside_the_epoch, _epoch_goes_on),
    "57_updates_without_an_optimizer": (updates_without_an_optimizer, _steps_counted),
    "58_layers_thawed_in_turn": (layers_thawed_in_turn, _one_model),
    "66_rank_0_saves_alone": (rank_0_saves_alone, _saved),
    "70_uneven_evaluation": (uneven_evaluation, _evaluated),
}
OPTIONS: dict[str, dict[str, Any]] = {"18_two_loaders_at_once": {"work_sharing": False}}
REFUSED = {("20_gathers_in_a_step", "adpsgd"), ("20_gathers_in_a_step", "apsgd")}
BATCHES = {"03_sam_two_steps": 64, "57_updates_without_an_optimizer": 32}


def work(name: str, strategy: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """One rank of a case."""
    os.environ["FIELD_STRATEGY"] = strategy
    warnings.simplefilter("ignore")
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy=FabricStrategy(STRATEGIES[strategy](**options)))
    fabric.launch()
    result = CASES[name][0](fabric, Path(folder))
    report = fabric.strategy.report  # type: ignore[attr-defined]
    result |= {"report": [worker.as_dict() for worker in report.workers], "batches": BATCHES.get(name)}
    return result


def pairs() -> list[Any]:
    """Each case with each strategy; one of them runs always."""
    found = []
    for number, name in enumerate(CASES):
        quick = "adpsgd" if number % 2 == 0 else list(STRATEGIES)[1 + number // 2 % (len(STRATEGIES) - 1)]
        for strategy in STRATEGIES:
            marks = [] if number % 3 == 0 and strategy == quick else [pytest.mark.slow]
            found.append(pytest.param(name, strategy, marks=marks, id=f"{name}-{strategy}"))
    return found


@pytest.mark.parametrize(("name", "strategy"), pairs())
def test_what_works_under_ddp_works_in_a_loop_of_ones_own(name: str, strategy: str, tmp_path: Path) -> None:
    ended = outcomes(work, name, strategy, OPTIONS.get(name, {}), str(tmp_path), workers=WORKERS)
    failures = [result for ok, result in ended if not ok]
    if (name, strategy) in REFUSED:
        assert any(ConfigurationError.__name__ in failure for failure in failures), ended
        return
    assert not failures, "\n".join(failures)
    CASES[name][1]([result for _, result in ended], strategy)


@pytest.mark.slow
def test_two_loaders_at_once_are_refused_where_the_first_is_shared(tmp_path: Path) -> None:
    ended = outcomes(work, "18_two_loaders_at_once", "adpsgd", {}, str(tmp_path), workers=WORKERS)
    assert any("work_sharing=False" in str(result) for ok, result in ended if not ok), ended


def test_progress_is_a_number() -> None:
    """Shows that the judge of 09 can fail."""
    ranks = [{"model": {}, "length": 8, "progress": [0.0, math.nan]}]
    with pytest.raises(AssertionError):
        _progress(ranks, "adpsgd")
