"""The synchronous strategies: beside DDP's trajectory, and where workers part."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_gossip import AdaptivePeriod, ConstantPeriod, DPSGDStrategy, Outer, PeriodicAveragingStrategy, QSGDStrategy
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, samples, trainer

pytestmark = pytest.mark.processes

STEPS = 50


class Own(SequentialSampler):
    """Each rank's own samples, the same under every strategy."""

    def __iter__(self) -> Any:
        import torch.distributed as dist

        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        return iter(torch.randint(0, 128, (STEPS * 4,), generator=generator).tolist())

    def __len__(self) -> int:
        return STEPS * 4


def _trajectory(strategy: Any, momentum: float) -> Any:
    """The mean model after each step."""
    seed_everything(3, verbose=False)
    states: list[torch.Tensor] = []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
            import torch.distributed as dist

            mine = flat(model.network).double()
            if not isinstance(trainer.strategy, PeriodicAveragingStrategy | DPSGDStrategy):
                states.append(mine)
                return
            group = Record.group = getattr(Record, "group", None) or dist.new_group()
            everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(everyones, mine, group=group)
            states.append(torch.stack(everyones).mean(0))

    def optimizer(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-3, nesterov=momentum > 0)

    model = Net(optimizer, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
    data = samples(128)
    t = trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False, callbacks=[Record()])
    t.fit(model, DataLoader(data, batch_size=4, sampler=Own(data)))
    assert len(states) == STEPS
    return torch.stack(states)


def _pair(strategy: Any, momentum: float) -> float:
    """The largest difference to DDP, relative to how far the model went."""
    ours, ddp = _trajectory(strategy, momentum), _trajectory("ddp", momentum)
    return float((ours - ddp).abs().max() / (ddp[-1] - ddp[0]).abs().max())


LIKE_DDP = [
    ("period 1, no momentum", lambda: PeriodicAveragingStrategy(period=1), 0.0),
    ("period 1, momentum kept", lambda: PeriodicAveragingStrategy(period=1), 0.9),
    ("period 1, momentum averaged", lambda: PeriodicAveragingStrategy(period=1, optimizer_state="average"), 0.9),
    ("D-PSGD, complete graph, (X − γG)W", lambda: DPSGDStrategy(topology="complete", weights="uniform", overlap=False), 0.9),
]


@pytest.mark.parametrize(
    ("make", "momentum"),
    [pytest.param(*case[1:], id=case[0], marks=[pytest.mark.slow] if "no momentum" in case[0] else []) for case in LIKE_DDP],
)
def test_averaging_every_step_is_ddp(make: Any, momentum: float) -> None:
    assert max(launch(_pair, make(), momentum, workers=3)) < 1e-5


UNLIKE_DDP = [
    ("period 2", lambda: PeriodicAveragingStrategy(period=2), 0.0),
    ("momentum reset", lambda: PeriodicAveragingStrategy(period=1, optimizer_state="reset"), 0.9),
    ("D-PSGD, complete graph, X W − γG", lambda: DPSGDStrategy(topology="complete", weights="uniform"), 0.0),
]


@pytest.mark.parametrize(
    ("make", "momentum"),
    [pytest.param(*case[1:], id=case[0], marks=[pytest.mark.slow] if number else []) for number, case in enumerate(UNLIKE_DDP)],
)
def test_the_comparison_with_ddp_notices_a_difference(make: Any, momentum: float) -> None:
    assert min(launch(_pair, make(), momentum, workers=3)) > 1e-4


class Stream(IterableDataset[Any]):
    """As many batches as the rank says."""

    def __iter__(self) -> Any:
        import torch.distributed as dist

        count = {0: 7, 1: 11, 2: 5}[dist.get_rank()] * 4
        yield from (samples(count)[i] for i in range(count))


def _uneven(strategy: Any) -> Any:
    model = Net()
    t = trainer(strategy=strategy, max_epochs=2)
    t.fit(model, DataLoader(Stream(), batch_size=4))
    return len(model.seen), flat(model).tolist()


SYNCHRONOUS = [
    ("period 3", lambda: PeriodicAveragingStrategy(period=3)),
    ("period 3, overlapped", lambda: PeriodicAveragingStrategy(period=3, overlap=True, optimizer_state="average")),
    ("three fragments, overlapped", lambda: PeriodicAveragingStrategy(period=4, fragments=3, overlap=1, outer=Outer(0.7, 0.3))),
    ("two fragments, int8", lambda: PeriodicAveragingStrategy(period=3, fragments=2, wire="int8")),
    ("D-PSGD", lambda: DPSGDStrategy()),
    ("D-PSGD, not overlapped", lambda: DPSGDStrategy(overlap=False)),
    ("D-PSGD, Base-2", lambda: DPSGDStrategy(topology="base_2")),
    ("D-PSGD, directed", lambda: DPSGDStrategy(topology="one_peer_exponential")),
    ("QSGD", lambda: QSGDStrategy()),
]


SLOW = ("period 3", "D-PSGD, not overlapped", "D-PSGD, Base-2", "two fragments, int8")


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, make in SYNCHRONOUS],
)
def test_uneven_streams_end_and_agree(make: Any) -> None:
    results = launch(_uneven, make(), workers=3)
    assert [seen for seen, _ in results] == [2 * 28, 2 * 44, 2 * 20]
    assert results[0][1] == results[1][1] == results[2][1]


def _overlapped(overlap: Any) -> Any:
    """How far the mean of the models is from what the local updates alone make of it; no rendezvous in between."""
    import torch.distributed as dist

    moved: list[torch.Tensor] = []

    class Watch(Callback):
        """Sees the model before and after the optimizer; the averaging comes later."""

        def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            self.before = flat(model.network)

        def optimizer_stepped(self, model: Any) -> None:
            moved.append(flat(model.network).double() - self.before.double())

    watch = Watch()

    class Watched(Net):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            watch.optimizer_stepped(self)

    seed_everything(1, verbose=False)
    model = Watched(network=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
    start = flat(model.network).double()
    strategy = PeriodicAveragingStrategy(period=ConstantPeriod(4), overlap=overlap)
    t = trainer(strategy=strategy, max_epochs=1, callbacks=[watch])
    data = samples(16 * 23)
    t.fit(model, DataLoader(data, batch_size=8))
    total = torch.stack(moved).sum(0)
    dist.all_reduce(total)
    expected = start + total / dist.get_world_size()
    return float((flat(model.network).double() - expected).abs().max()), t.strategy.report.workers[0].averagings


@pytest.mark.parametrize(
    "overlap", [False, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), True]
)
def test_averaging_loses_no_update(overlap: Any) -> None:
    for error, averagings in launch(_overlapped, overlap, workers=2):
        assert error < 1e-5
        assert averagings == 23 // 4 + 1  # and the one of the rendezvous


class Follow(Callback):
    """After each batch: averagings so far and bytes sent so far."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        algorithm = trainer.strategy._fit._algorithm
        self.seen.append((algorithm.protocol.averagings, algorithm.collectives.bytes_sent))


def _bytes() -> Any:
    follow = Follow()
    model = Net()
    strategy = PeriodicAveragingStrategy(period=4)
    trainer(strategy=strategy, max_epochs=1, callbacks=[follow]).fit(model, DataLoader(samples(3 * 4 * 11), batch_size=4))
    return follow.seen, flat(model.network).numel()


def test_nothing_is_sent_between_averagings_and_then_one_model_and_five_numbers() -> None:
    for seen, numel in launch(_bytes, workers=3):
        sent = [after[1] - before[1] for before, after in zip([(0, 0), *seen], seen, strict=False)]
        averaging = math.ceil(4 / 3 * 4 * numel) + math.ceil(4 / 3 * 8 * 5)
        # the callback comes after the averaging of its step, and before the one at the epoch's end
        assert sent[:8] == [0, 0, 0, averaging] * 2
        assert sent[8:10] == [0, 0]


def _interrupted(strategy: Any, folder: str, interrupt: bool) -> Any:
    """Four epochs of five steps, in one fit or resumed after two; averagings after each step, and the model at the end."""
    seed_everything(5, verbose=False)
    follow = Follow()
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, enable_version_counter=False)

    def model() -> Net:
        seed_everything(5, verbose=False)
        return Net(network=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))

    data = DataLoader(samples(2 * 4 * 5), batch_size=4, shuffle=True)
    if not interrupt:
        trained = model()
        trainer(strategy=strategy, max_epochs=4, callbacks=[follow]).fit(trained, data)
        return [count for count, _ in follow.seen], flat(trained.network).tolist()
    trainer(strategy=copy.deepcopy(strategy), max_epochs=2, callbacks=[follow, keep]).fit(model(), data)
    trained = model()
    path = f"{folder}/epoch=1.ckpt"
    trainer(strategy=strategy, max_epochs=4, callbacks=[follow]).fit(trained, data, ckpt_path=path)
    return [count for count, _ in follow.seen], flat(trained.network).tolist()


RESUMED = [
    ("constant", lambda: PeriodicAveragingStrategy(period=3, at_rendezvous="evaluate", checkpoint="replicas")),
    (
        "adaptive",
        lambda: PeriodicAveragingStrategy(
            period=AdaptivePeriod(initial=2, sample=2, warmup_epochs=0, low=0.9, high=1.0),
            at_rendezvous="evaluate",
            checkpoint="replicas",
        ),
    ),
    ("adopting the mean", lambda: PeriodicAveragingStrategy(period=3)),
]


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=[pytest.mark.slow] if name == "constant" else []) for name, make in RESUMED]
)
def test_after_a_resume_the_next_averaging_comes_at_the_same_step(make: Any, tmp_path: Path) -> None:
    whole = launch(_interrupted, make(), str(tmp_path), False)
    parts = launch(_interrupted, make(), str(tmp_path), True)
    assert len(whole[0][0]) == 20
    assert [counts for counts, _ in parts] == [counts for counts, _ in whole]
    if make().fit_options.checkpoint == "replicas":
        for (_, a), (_, b) in zip(whole, parts, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-6)


def _adaptive(normalized: bool) -> Any:
    def falling(model: Any) -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return [sgd], [torch.optim.lr_scheduler.MultiStepLR(sgd, [4, 8])]

    seed_everything(1, verbose=False)
    layers = [nn.Linear(8, 16), *([nn.BatchNorm1d(16)] if normalized else []), nn.ReLU(), nn.Linear(16, 2)]
    period = AdaptivePeriod(sample=8)
    t = trainer(strategy=PeriodicAveragingStrategy(period=period, at_rendezvous="evaluate"), max_epochs=12)
    t.fit(Net(falling, nn.Sequential(*layers)), DataLoader(samples(640), batch_size=8, shuffle=True))
    return t.strategy.report.workers[0].period


@pytest.mark.parametrize("normalized", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_period_grows_as_the_learning_rate_falls_with_and_without_batchnorm(normalized: bool) -> None:
    assert min(launch(_adaptive, normalized)) > 8


def _grown(counts: tuple[int, int]) -> Any:
    """The second optimizer steps for the first time when the models have been averaged before; batches by rank."""
    t = trainer(strategy=PeriodicAveragingStrategy(period=1, optimizer_state="average"), max_epochs=1)
    last: dict[str, Any] = {}

    class Later(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            loss = self.loss(batch)
            for optimizer in (first, second):
                optimizer.zero_grad()
            self.manual_backward(loss)
            first.step()
            if batch_idx % 3 == 2:
                second.step()

        def configure_optimizers(self) -> Any:
            layers = list(self.network)
            return [torch.optim.SGD(layers[at].parameters(), lr=0.1, momentum=0.9) for at in (0, 3)]

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                states = [state["momentum_buffer"] for o in trainer.optimizers for state in o.state.values()]
                last["momentum"] = torch.cat([value.flatten() for value in states]).tolist()

    class Uneven(IterableDataset[Any]):
        def __iter__(self) -> Any:
            import torch.distributed as dist

            yield from (samples(64)[i] for i in range(4 * counts[dist.get_rank()]))

    t.callbacks.append(Look())
    model = Later()
    t.fit(model, DataLoader(Uneven(), batch_size=4))
    return last.get("momentum"), flat(model.network).tolist()


def test_momentum_that_appears_between_two_averagings_is_averaged_too() -> None:
    a, b = launch(_grown, (16, 16))
    assert a == b


def test_momentum_may_appear_when_another_worker_has_arrived() -> None:
    (_, a), (_, b) = launch(_grown, (2, 9))
    assert a == b
