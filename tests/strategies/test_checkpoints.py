from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_gossip import ADPSGDStrategy
from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.strategies.state import checkpoint_contents
from tests.strategies.launch import launch, outcomes
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = pytest.mark.processes


def _save(path: str) -> Any:
    saver = ModelCheckpoint(dirpath=path, monitor="val_acc", mode="max", save_last=True)
    t = trainer(enable_checkpointing=True, callbacks=[saver], max_epochs=3)
    model = Net()
    t.fit(model, loader(), loader(64, shuffle=False))
    best, last = saver.best_model_path, saver.last_model_path  # loading a checkpoint loads the callback's state too
    t.test(model, loader(64, shuffle=False), ckpt_path="best", verbose=False)
    accuracy = t.validate(model, loader(64, shuffle=False), ckpt_path=last, verbose=False)[0]["val_acc"]
    return best, last, accuracy


def test_plain_lightning_loads_the_checkpoint_and_gets_the_reported_accuracy(tmp_path: Path) -> None:
    a, b = launch(_save, str(tmp_path))
    assert a == b
    model = Net()
    t = trainer(strategy="auto", devices=1, max_epochs=4)
    result = t.validate(model, loader(64, shuffle=False), ckpt_path=a[1], verbose=False)
    assert result[0]["val_acc"] == pytest.approx(a[2])
    t.fit(model, loader(), ckpt_path=a[1])  # and trains on from it, with the mean of the optimizers' states
    assert t.current_epoch == 4
    assert t.optimizers[0].state


def _mean_state() -> Any:
    seed_everything(int(os.environ["RANK"]))
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    rank = int(os.environ["RANK"])
    parameters[0].grad = torch.full((3,), float(rank + 1))
    if rank == 1:  # a branch that only odd ranks use
        parameters[1].grad = torch.ones(2)
    optimizer.step()
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=2)
    mean = _mean_of(optimizer)
    dist.destroy_process_group()
    return {p: {name: value.tolist() for name, value in state.items()} for p, state in mean["state"].items()}


def _mean_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As both ranks would write it."""
    return checkpoint_contents.mean_optimizer_state(
        optimizer.state_dict(), torch.device("cpu"), FixedWorkers(), keeps=lambda: True
    )


def test_the_optimizers_states_are_averaged_over_the_workers_that_have_them() -> None:
    a, b = launch(_mean_state)
    assert a == b
    assert a[0]["exp_avg"] == pytest.approx([0.15] * 3)
    assert a[1]["exp_avg"] == pytest.approx([0.1] * 2)


def _odd_state() -> Any:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    wave = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    rows = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD([wave, rows.weight], lr=0.1, momentum=0.9)
    wave.grad = torch.tensor([1.0 + 2.0j, 3.0j]) * (rank + 1)
    rows(torch.tensor([rank])).sum().backward()
    optimizer.step()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mean = _mean_of(optimizer)["state"]
    dist.destroy_process_group()
    sparse = mean[1]["momentum_buffer"]
    return torch.view_as_real(mean[0]["momentum_buffer"]).tolist(), sparse.is_sparse, sparse.to_dense().sum(1).tolist()


def test_complex_state_is_averaged_and_sparse_state_stays_with_its_worker() -> None:
    a, b = launch(_odd_state)
    assert a[0] == b[0] == [[1.5, 3.0], [0.0, 4.5]]
    assert a[1:] == (True, [2.0, 0.0, 0.0, 0.0])
    assert b[1:] == (True, [0.0, 2.0, 0.0, 0.0])


class Stop(Callback):
    """Sends this process a SIGTERM in the middle of an epoch, on one rank."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch

    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == 1 and batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


class Seen(Callback):
    """What was trained on in each epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        self.epochs.setdefault(trainer.current_epoch, []).extend(batch[2].tolist())


class Slow(Callback):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        import time

        time.sleep(0.03 if trainer.global_rank == 1 else 0.02)


def _interrupted(path: str, sharing: Any, kind: str, num_workers: int) -> Any:
    seen = Seen()
    strategy = ADPSGDStrategy(work_sharing=sharing, checkpoint=kind)
    t = trainer(
        strategy=strategy,
        callbacks=[OnExceptionCheckpoint(path, "stopped"), Stop(1, 0), Slow(), seen],
        max_epochs=3,
    )
    model = Net()
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    data = loader(192, 4, num_workers=num_workers, **options)
    try:
        t.fit(model, data, loader(32, shuffle=False))
    except SystemExit:
        return seen.epochs, t.global_step, flat(model).tolist()
    raise AssertionError("the fit was not stopped")


def _resumed(path: str, sharing: Any, kind: str) -> Any:
    seen = Seen()
    started = {}

    class AtStart(Callback):
        def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
            if not started:
                momentum = [state["momentum_buffer"].flatten() for state in trainer.optimizers[0].state.values()]
                started["model"] = flat(model).tolist()
                started["momentum"] = torch.cat(momentum).tolist()
                started["random"] = torch.rand(2).tolist()

    strategy = ADPSGDStrategy(work_sharing=sharing, checkpoint=kind)
    t = trainer(strategy=strategy, callbacks=[seen, AtStart()], max_epochs=3)
    model = Net()
    t.fit(model, loader(192, 4), loader(32, shuffle=False), ckpt_path=f"{path}/stopped.ckpt")
    return seen.epochs, started, t.current_epoch


@pytest.mark.parametrize(("sharing", "num_workers"), [pytest.param("auto", 0, marks=pytest.mark.slow), ("auto", 2), (False, 0)])
def test_sigterm_to_one_rank_stops_all_and_the_resumed_epoch_takes_every_remaining_sample_once(
    tmp_path: Path, sharing: Any, num_workers: int
) -> None:
    first = launch(_interrupted, str(tmp_path), sharing, "mean", num_workers, workers=3)
    assert first[0][1:] == first[1][1:] == first[2][1:]
    second = launch(_resumed, str(tmp_path), sharing, "mean", workers=3)
    before = Counter(index for epochs, *_ in first for index in epochs[1])
    after = Counter(index for epochs, *_ in second for index in epochs.get(1, []))
    assert sum(before.values()) < 192
    assert set(before + after) == set(range(192))
    repeated = sum((before + after).values()) - 192
    assert repeated == 0 if sharing == "auto" else repeated in (0, 4, 8)  # equal shares are filled up with whole batches
    for epochs, _, current_epoch in second:
        assert current_epoch == 3
        assert 0 not in epochs
    assert Counter(index for epochs, *_ in second for index in epochs[2]) == Counter(range(192))
    assert second[0][1]["model"] == second[1][1]["model"]


def test_an_interrupted_epoch_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    first = launch(_interrupted, str(tmp_path), "auto", "mean", 0, workers=3)
    second = launch(_resumed, str(tmp_path), "auto", "mean", workers=2)
    before = Counter(index for epochs, *_ in first for index in epochs[1])
    after = Counter(index for epochs, *_ in second for index in epochs.get(1, []))
    assert before + after == Counter(range(192))


def test_replicas_resume_each_workers_own_optimizer_and_random_generator(tmp_path: Path) -> None:
    launch(_interrupted, str(tmp_path), "auto", "replicas", 0, workers=2)
    assert sorted(p.name for p in (tmp_path / "stopped.ckpt.replicas").iterdir()) == ["rank0.pt", "rank1.pt"]
    own = [checkpoint_contents.load_replica(tmp_path / "stopped.ckpt", rank) for rank in range(2)]
    a, b = launch(_resumed, str(tmp_path), "auto", "replicas", workers=2)
    for state, (_, started, _) in zip(own, (a, b), strict=True):
        assert state is not None
        momentum = [s["momentum_buffer"].flatten() for s in state["optimizers"][0]["state"].values()]
        assert started["momentum"] == torch.cat(momentum).tolist()
    assert a[1]["momentum"] != b[1]["momentum"]
    assert a[1]["model"] == b[1]["model"]  # the stop was a rendezvous
    # another number of workers: the mean, with a word about it
    resumed = launch(_resumed, str(tmp_path), "auto", "replicas", workers=1)
    assert resumed[0][2] == 3


def _evaluate_replicas(path: str, resume: bool) -> Any:
    models = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                models.append(flat(model).tolist())

    strategy = ADPSGDStrategy(at_rendezvous="evaluate", checkpoint="replicas", exchanges_per_step=0)
    saver = ModelCheckpoint(dirpath=path, save_last=True, save_top_k=1)
    t = trainer(strategy=strategy, callbacks=[saver, Look()], enable_checkpointing=True, max_epochs=2 if resume else 1)
    model = Net()
    t.fit(model, loader(), ckpt_path=f"{path}/last.ckpt" if resume else None)
    return models[0], flat(model).tolist()


def test_replicas_of_an_evaluated_mean_resume_each_workers_own_model(tmp_path: Path) -> None:
    (_, mean_a), (_, mean_b) = launch(_evaluate_replicas, str(tmp_path), False)
    assert mean_a == mean_b
    (own_a, _), (own_b, _) = launch(_evaluate_replicas, str(tmp_path), True)
    assert own_a != own_b
    middle = torch.tensor([own_a, own_b]).mean(0)
    torch.testing.assert_close(middle, torch.tensor(mean_a), rtol=1e-4, atol=1e-5)


def _loaded_then_gossip(path: str) -> Any:
    before = {}

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, model: Any) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.0
            model.network[1].eval()  # statistics stay
            before["model"] = flat(model).tolist()

    model = Net()
    t = trainer(callbacks=[Look()], max_epochs=4)
    t.fit(model, loader(), ckpt_path=path)
    assert t.strategy.report.workers[0].exchanges
    return before["model"], flat(model).tolist()


def test_gossip_at_learning_rate_zero_keeps_the_loaded_weights(tmp_path: Path) -> None:
    (_, last, _), _ = launch(_save, str(tmp_path))
    results = launch(_loaded_then_gossip, last)
    for before, after in results:
        torch.testing.assert_close(torch.tensor(after), torch.tensor(before), rtol=1e-6, atol=1e-7)


class SavesInStep(Net):
    """Saves inside a training step, which is a rendezvous."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, batch_idx)


def _saves_in_step(path: str, sharing: Any) -> Any:
    left = []

    class Look(Callback):
        def on_train_epoch_end(self, trainer: Trainer, model: Any) -> None:
            left.append(trainer.strategy._fit.work.batches.unstepped())

    trainer(strategy=ADPSGDStrategy(work_sharing=sharing), callbacks=[Look()]).fit(SavesInStep(path), loader(64, 4))
    return left


@pytest.mark.parametrize("sharing", ["auto", False])
def test_a_batch_in_which_a_checkpoint_was_saved_counts_as_trained_on(tmp_path: Path, sharing: Any) -> None:
    for left in launch(_saves_in_step, str(tmp_path / "saved.ckpt"), sharing):
        assert left == [[], []]


def _stop_while_saving(path: str) -> Any:
    saver = ModelCheckpoint(dirpath=path, every_n_train_steps=3, save_top_k=-1)
    t = trainer(callbacks=[saver, OnExceptionCheckpoint(path, "stopped"), Stop(1, 4), Slow()], max_epochs=3)
    try:
        t.fit(Net(), loader(192, 4))
    except SystemExit:
        return t.global_step
    raise AssertionError("the fit was not stopped")


def test_sigterm_while_others_come_to_save_stops_all(tmp_path: Path) -> None:
    steps = launch(_stop_while_saving, str(tmp_path), workers=3)
    assert len(set(steps)) == 1
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=True)["global_step"] == steps[0]


def _raises_in(hook: str) -> Any:
    def fail(trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            raise ArithmeticError(f"rank 1 breaks in {hook}")

    callback = Callback()
    setattr(callback, hook, fail)
    trainer(callbacks=[callback], max_epochs=2).fit(Net(), loader(200, 4), loader(32, shuffle=False))


@pytest.mark.parametrize(
    "hook",
    [
        *(pytest.param(hook, marks=pytest.mark.slow) for hook in ("on_train_start", "on_train_epoch_start")),
        "on_validation_start",
        "on_train_epoch_end",
    ],
)
def test_a_rank_that_raises_in_any_hook_ends_all(hook: str) -> None:
    results = outcomes(_raises_in, hook, workers=3, timeout_s=45)
    assert f"rank 1 breaks in {hook}" in results[1][1]
    assert not any(ok or "no result within" in text for ok, text in results)


class Broken(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 3:
            raise ArithmeticError("rank 1 breaks in step 3")
        return super().training_step(batch, batch_idx)


def _broken(path: str) -> Any:
    saver = ModelCheckpoint(dirpath=path, save_on_exception=True)
    t = trainer(strategy=ADPSGDStrategy(exchange_timeout_s=10.0), callbacks=[OnExceptionCheckpoint(path, "broken"), saver])
    t.fit(Broken(), loader(800, 4), loader(32, shuffle=False))


def test_a_rank_that_raises_ends_and_the_others_say_who_is_gone(tmp_path: Path) -> None:
    results = outcomes(_broken, str(tmp_path), workers=3, timeout_s=60)
    assert not any(ok for ok, _ in results)
    assert "rank 1 breaks in step 3" in results[1][1]
    for rank in (0, 2):
        assert "PeerError" in results[rank][1]
