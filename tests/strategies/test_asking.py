"""What a user's code asks for inside an epoch: checkpoints, ends and collectives, while workers are at different steps."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger

from lightning_gossip import ADPSGDStrategy, ConfigurationError
from tests.runtime.cluster import eventually
from tests.strategies.jobs import DIED, job, kill_myself, store, survivors
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = pytest.mark.processes

STRATEGIES = ["adpsgd", "apsgd", "periodic_averaging", "dpsgd", "qsgd"]
SAMPLES = 168  # 42 batches of 4: even shares for 2 and for 3 workers


class Uneven(Callback):
    """Rank 0 makes a step in 1 ms, the others in 10: with shared work they end up at very different steps."""

    def __init__(self, slow: int | None = None) -> None:
        self.slow = slow
        self.work_is_shared: bool | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        slow = trainer.global_rank > 0 if self.slow is None else trainer.global_rank == self.slow
        self.work_is_shared = trainer.strategy._fit.work.shared is not None
        time.sleep(0.01 if slow else 0.001)


class Noted(Net):
    """Notes what it has trained on whenever a checkpoint is made, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.at_save: list[list[int]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at_save.append(list(self.seen))


class Saves(Callback):
    """Saves after the first and each third batch of the worker's own, where ``ranks`` says so."""

    def __init__(self, folder: str, ranks: tuple[int, ...]) -> None:
        self.folder, self.ranks = folder, ranks

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank in self.ranks and batch_idx % 3 == 0:  # of the first one each is sure
            trainer.save_checkpoint(Path(self.folder, f"{trainer.current_epoch}-{batch_idx}.ckpt"))


class SavesInStep(Noted):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 4 == 0:
            for name in ("first", "second"):
                self.trainer.save_checkpoint(
                    Path(self.folder, f"{name}-{self.current_epoch}-{batch_idx}.ckpt"), weights_only=True
                )
        return super().training_step(batch, batch_idx)


def _saves(strategy: Any, folder: str, ranks: tuple[int, ...]) -> Any:
    model, in_step = Noted(), SavesInStep(folder)
    t = trainer(strategy=strategy, callbacks=[Uneven(), Saves(folder, ranks)])
    t.fit(model, loader(SAMPLES, 4))
    trainer(strategy=strategy, callbacks=[Uneven()], max_epochs=1).fit(in_step, loader(SAMPLES, 4))
    steps = [worker.steps for worker in t.strategy.report.workers]
    return {"model": flat(model).tolist(), "seen": model.seen, "saves": len(model.at_save), "steps": steps,
            "in step": in_step.seen, "saves in step": len(in_step.at_save)}  # fmt: skip


EVERY_RANK, RANK_0 = (0, 1), (0,)
QUICK = [("adpsgd", EVERY_RANK), ("apsgd", RANK_0), ("qsgd", RANK_0)]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param(
            *(strategy, ranks),
            id=f"{strategy}-{'every rank' if ranks == EVERY_RANK else 'rank 0 only'}",
            marks=[] if (strategy, ranks) in QUICK else pytest.mark.slow,
        )
        for strategy in STRATEGIES
        for ranks in (EVERY_RANK, RANK_0)
    ],
)
def test_a_checkpoint_inside_an_epoch_is_saved_at_rank_0s_steps(tmp_path: Path, strategy: str, ranks: tuple[int, ...]) -> None:
    results = launch(_saves, strategy, str(tmp_path), ranks)
    assert results[0]["model"] == results[1]["model"]
    for seen, epochs in (("seen", 2), ("in step", 1)):
        counts = Counter(sample for result in results for sample in result[seen])
        assert set(counts) == set(range(SAMPLES))
        assert set(counts.values()) == {epochs}
    names = {path.stem for path in tmp_path.glob("*.ckpt")}
    own = results[0]["steps"][0]
    between = {name for name in names if name[0].isdigit()}
    assert own // 3 <= len(between) <= own // 3 + 2  # two epochs
    assert results[0]["saves"] == results[1]["saves"] == len(between)  # each took part in each
    in_step = results[0]["saves in step"]
    assert in_step == results[1]["saves in step"] == len(names - between) >= 2
    assert {name.replace("first", "second") for name in names if "first" in name} == {n for n in names if "second" in n}
    for path in tmp_path.glob("*.ckpt"):
        state = torch.load(path, weights_only=True)
        Net().load_state_dict(state["state_dict"])
        assert ("optimizer_states" in state) == path.stem[0].isdigit()  # the arguments are those of the call


def _saved_and_left(folder: str, options: dict[str, Any]) -> Any:
    model = Noted()
    t = trainer(strategy=ADPSGDStrategy(**options), callbacks=[Uneven(), Saves(folder, (0,))], max_epochs=1)
    t.fit(model, loader(SAMPLES, 4))
    return model.at_save


def _resumed(path: str, options: dict[str, Any]) -> Any:
    model = Net()
    t = trainer(strategy=ADPSGDStrategy(**options), max_epochs=1)
    t.fit(model, loader(SAMPLES, 4), ckpt_path=path)
    return model.seen, flat(model).tolist()


@pytest.mark.parametrize("options", [{}, {"work_sharing": False, "checkpoint": "replicas"}], ids=["shared", "static"])
def test_a_fit_goes_on_from_a_checkpoint_of_the_middle_of_an_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    before = launch(_saved_and_left, str(tmp_path), options, workers=3)
    results = launch(_resumed, str(tmp_path / "0-0.ckpt"), options, workers=3)
    counts = Counter(sample for worker in before for sample in worker[0])
    assert counts
    assert set(counts.values()) == {1}
    assert set(counts).isdisjoint(sample for seen, _ in results for sample in seen)
    counts.update(sample for seen, _ in results for sample in seen)
    assert set(counts) == set(range(SAMPLES))
    assert results[0][1] == results[1][1] == results[2][1]


def _dies_while_all_save(folder: str, rank: int, where: str, address: str) -> Any:
    class Dies(Noted):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            super().on_save_checkpoint(checkpoint)
            if where == "saving" and os.environ["RANK"] == str(rank):
                kill_myself()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if where == "called" and os.environ["RANK"] == str(rank):
                called = self.trainer.strategy._fit._algorithm.sync_requested
                assert eventually(called, 30.0)  # rank 0 saves after its first batch, of which each is sure
                kill_myself()
            return super().training_step(batch, batch_idx)

    model = Dies()
    strategy = ADPSGDStrategy(store=address)  # or it would die with rank 0
    t = trainer(strategy=strategy, callbacks=[Uneven(slow=rank), Saves(folder, (0,))], max_epochs=2)
    t.fit(model, loader(SAMPLES, 4))
    return {"seen": model.seen, "model": flat(model).tolist(), "lost": t.strategy.report.lost}


@pytest.mark.parametrize(("rank", "where"), [(0, "saving"), pytest.param(2, "saving", marks=pytest.mark.slow), (2, "called")])
def test_a_worker_that_dies_while_all_save_is_left_out_and_the_epoch_goes_on(tmp_path: Path, rank: int, where: str) -> None:
    with store() as address, job(_dies_while_all_save, str(tmp_path), rank, where, address, workers=3) as running:
        running.start_all()
        outcomes = running.outcomes()
    assert dict(outcomes)[rank] == DIED
    results = survivors(outcomes)
    assert len(results) == 2
    assert all(result["lost"] == [rank] for result in results)
    assert results[0]["model"] == results[1]["model"]
    counts = Counter(sample for result in results for sample in result["seen"])
    assert sum(counts.values()) >= 2 * SAMPLES - 3 * 4 * (SAMPLES // 12)  # what it had trained on before it died
    assert all(counts[sample] >= 1 for sample in range(SAMPLES))  # the whole second epoch
    assert list(tmp_path.glob("1-*.ckpt"))  # and checkpoints go on, by the new rank 0 if need be
    for path in tmp_path.glob("*.ckpt"):
        Net().load_state_dict(torch.load(path, weights_only=True)["state_dict"])


def _is_frozen_while_others_save(folder: str) -> Any:
    class Frozen(Callback):
        def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
            if os.environ["RANK"] == "2" and (trainer.current_epoch, batch_idx) == (1, 0):
                Path(folder, "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            pid = Path(folder, "pid")
            if trainer.is_global_zero and trainer.world_size == 2 and pid.exists():  # they have gone on without it
                os.kill(int(pid.read_text()), signal.SIGCONT)
                pid.unlink()

        def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
            trainer.should_stop = trainer.world_size == 3 and trainer.current_epoch > 1

    model = Noted()
    t = trainer(
        strategy=ADPSGDStrategy(peer_timeout_s=2.0),
        callbacks=[Uneven(slow=1), Saves(folder, (0,)), Frozen()],
        max_epochs=300,
    )
    t.fit(model, loader(SAMPLES, 4))
    return {"model": flat(model).tolist(), "world": t.world_size, "lost": t.strategy.report.lost}


@pytest.mark.slow
def test_a_worker_that_was_taken_for_dead_while_the_others_saved_leaves_their_epoch_and_is_taken_in_again(
    tmp_path: Path,
) -> None:
    with job(_is_frozen_while_others_save, str(tmp_path), workers=3) as running:
        running.start_all()
        results = survivors(running.outcomes())
    assert [result["world"] for result in results] == [3, 3, 3]
    assert all(result["lost"] == [2] for result in results)
    assert results[0]["model"] == results[1]["model"] == results[2]["model"]


# -- ends --------------------------------------------------------------------------------------------------------------


class Ticks(Timer):
    """The time of one rank is up after its first batch, which each is sure of; that of the others never."""

    def __init__(self, rank: int, interval: str = "step") -> None:
        super().__init__(timedelta(hours=1), interval=interval, verbose=False)
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        if os.environ["RANK"] == str(self.rank) and batch_idx == 0:
            self._offset = 3600
        super().on_train_batch_end(trainer, model, outputs, batch, batch_idx)


def _time_is_up(strategy: Any, folder: str, rank: int, validation: bool) -> Any:
    hooks: list[str] = []

    class Ends(Callback):
        def on_train_end(self, trainer: Any, model: Any) -> None:
            hooks.append("train end")

        def on_validation_end(self, trainer: Any, model: Any) -> None:
            hooks.append("validation end")

    model, saver, timer = Net(), ModelCheckpoint(folder, filename="end", save_last=True), Ticks(rank)
    t = trainer(strategy=strategy, callbacks=[Uneven(), timer, saver, Ends()], max_epochs=5)
    t.fit(model, loader(SAMPLES, 4), loader(16, shuffle=False) if validation else None)
    copied = copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))
    assert all(clock.time_remaining() is not None for clock in copied)
    return {"seen": model.seen, "model": flat(model).tolist(), "hooks": hooks, "steps": t.global_step,
            "epoch": t.current_epoch, "batch": t.fit_loop.epoch_loop.batch_idx}  # fmt: skip


def _time_again(strategy: Any, path: str) -> Any:
    model, timer = Net(), Ticks(rank=-1)
    timer._duration = 9 * 3600.0
    t = trainer(strategy=strategy, callbacks=[timer], max_epochs=1)
    t.fit(model, loader(SAMPLES, 4), ckpt_path=path)
    return {"seen": model.seen, "elapsed": timer.time_elapsed(), "model": flat(model).tolist()}


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        *(pytest.param(name, 0, marks=[] if name in ("adpsgd", "dpsgd") else pytest.mark.slow) for name in STRATEGIES),
        pytest.param("adpsgd", 1, marks=pytest.mark.slow),
        ("qsgd", 1),
    ],
)
def test_when_the_time_of_one_worker_is_up_all_stop_and_a_resume_goes_on_there(
    tmp_path: Path, strategy: str, rank: int
) -> None:
    results = launch(_time_is_up, strategy, str(tmp_path), rank, rank == 1)
    assert results[0]["model"] == results[1]["model"]
    assert results[0]["steps"] == results[1]["steps"]
    for result in results:
        assert result["hooks"] == (["validation end"] if rank == 1 else []) + ["train end"]
        assert 0 < len(result["seen"]) < SAMPLES  # in the middle of the first epoch
    stopped = Counter(sample for result in results for sample in result["seen"])
    assert set(stopped.values()) == {1}
    assert sum(stopped.values()) < SAMPLES
    again = launch(_time_again, strategy, str(tmp_path / "last.ckpt"))
    assert again[0]["model"] == again[1]["model"]
    if rank == 0:
        assert all(result["elapsed"] > 3600 for result in again)  # the clock of rank 0, which writes the file
    assert set(stopped).isdisjoint(sample for result in again for sample in result["seen"])
    stopped.update(sample for result in again for sample in result["seen"])
    assert set(stopped) == set(range(SAMPLES))
    assert sum(stopped.values()) <= SAMPLES + (0 if strategy in ("adpsgd", "apsgd") else 4)  # equal shares of an odd rest


def _stop_and_save(folder: str) -> Any:
    class Struck(Callback):
        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 1 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    model = Noted()
    t = trainer(callbacks=[Uneven(), Saves(folder, (0,)), Struck()], max_epochs=3)
    with pytest.raises(SystemExit):
        t.fit(model, loader(SAMPLES, 4))
    return t.global_step, len(model.at_save)


def test_a_sigterm_and_a_checkpoint_inside_an_epoch_end_together(tmp_path: Path) -> None:
    a, b = launch(_stop_and_save, str(tmp_path))
    assert a == b
    assert len(list(tmp_path.glob("*.ckpt"))) == a[1]


# -- ModelCheckpoint ---------------------------------------------------------------------------------------------------


def _saves_by_itself(strategy: Any, folder: str, options: dict[str, Any]) -> Any:
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_last=True, **options)
    model, uneven = Noted(), Uneven()
    t = trainer(strategy=strategy, callbacks=[uneven, saver], max_epochs=1)
    t.fit(model, loader(SAMPLES, 4))
    assert copy.deepcopy(saver).best_model_path == pickle.loads(pickle.dumps(saver)).best_model_path
    steps = t.strategy.report.workers[0].steps
    return {
        "best": saver.best_model_path,
        "last": saver.last_model_path,
        "seen": model.seen,
        "steps": steps,
        "count": t.global_step,
        "shared": uneven.work_is_shared,
    }


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("adpsgd", {"every_n_train_steps": 4}),
        pytest.param("apsgd", {"every_n_train_steps": 4}, marks=pytest.mark.slow),
        pytest.param("adpsgd", {"train_time_interval": timedelta(0)}, marks=pytest.mark.slow),
        ("periodic_averaging", {"train_time_interval": timedelta(0)}),
    ],
)
def test_checkpoints_by_steps_and_by_time_are_those_of_rank_0_and_the_work_is_shared(
    tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    results = launch(_saves_by_itself, strategy, str(tmp_path), options)
    assert results[0]["best"] == results[1]["best"]
    assert results[0]["last"] == results[1]["last"]
    counts = Counter(sample for result in results for sample in result["seen"])
    assert set(counts) == set(range(SAMPLES))
    assert set(counts.values()) == {1}
    names = {path.name for path in tmp_path.glob("step=*.ckpt")}
    every, own = options.get("every_n_train_steps", 1), results[0]["steps"]
    due = set(range(every, own + 1, every))
    if "every_n_train_steps" in options:  # a slow rank 0 makes fewer steps than the mean, which counts then
        due.add(max(own, results[0]["count"]) // every * every)
    assert names == {f"step={step}.ckpt" for step in due}
    assert {result["shared"] for result in results} == {strategy in ("adpsgd", "apsgd")}


def _saves_what_is_passed(folder: str) -> Any:
    def fit(model: Net, callbacks: list[Callback], **options: Any) -> int:
        t = trainer(strategy="adpsgd", callbacks=[Uneven(slow=0), *callbacks], max_epochs=2)
        t.fit(model, loader(160, 4), **options)
        return int(t.global_step)

    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=6)
    fit(Net(), [saver])
    resumed = Net()
    steps = fit(resumed, [], ckpt_path=f"{folder}/step=18.ckpt")
    return saver.best_model_path, steps, resumed.seen


def test_a_step_that_the_count_passes_where_all_meet_is_saved_there(tmp_path: Path) -> None:
    """Rank 0 is slow: it makes some 4 of 40 steps itself, and the count that both go on with is 20."""
    results = launch(_saves_what_is_passed, str(tmp_path))
    assert {best for best, _, _ in results} == {str(tmp_path / "step=36.ckpt")}
    assert {"step=18.ckpt", "step=36.ckpt"} <= {path.name for path in tmp_path.iterdir()}
    assert {steps for _, steps, _ in results} == {40}
    assert Counter(sample for _, _, seen in results for sample in seen) == Counter(range(160)), "the second epoch only"


# -- collectives -------------------------------------------------------------------------------------------------------


class Asks(Callback):
    """Calls collectives in the hooks of a batch; rank 1 alone makes some."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self.ask = ask
        self.answers: list[Any] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.answers.append(self.ask(trainer))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.answers.append(self.ask(trainer))


def _log_dir(strategy: Any, folder: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asks = Asks(lambda t: t.log_dir)
        logger = CSVLogger(folder, version=f"by-rank-{os.environ['RANK']}")
        trainer(strategy=strategy, callbacks=[Uneven(), asks], logger=logger, max_epochs=1).fit(Net(), loader(SAMPLES, 4))
    assert not [w for w in caught if "needs all workers" in str(w.message)]
    return set(asks.answers)


@pytest.mark.parametrize("strategy", ["adpsgd", "qsgd"])
def test_the_logging_folder_inside_an_epoch_is_that_of_rank_0(tmp_path: Path, strategy: str) -> None:
    a, b = launch(_log_dir, strategy, str(tmp_path))
    assert a == b
    assert len(a) == 1
    assert a.pop().endswith("by-rank-0")


def _collectives(strategy: Any) -> Any:
    def ask(t: Any) -> Any:
        t.strategy.barrier()
        return t.strategy.broadcast(f"rank {t.global_rank}"), float(t.strategy.reduce(torch.tensor(float(t.global_rank))))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asks, model = Asks(ask), Net()
        trainer(strategy=strategy, callbacks=[Uneven(), asks], max_epochs=1).fit(model, loader(64, 4))
    return (
        set(asks.answers[1:]),
        [str(w.message) for w in caught if "needs all workers" in str(w.message)],
        flat(model).tolist(),
    )


@pytest.mark.parametrize("make", ["adpsgd", ADPSGDStrategy, "qsgd"], ids=["shared", "static", "in step"])
def test_collectives_between_two_steps_are_each_workers_own_or_those_of_all(make: Any) -> None:
    strategy = make if isinstance(make, str) else make(work_sharing=False)
    results = launch(_collectives, strategy)
    assert results[0][2] == results[1][2]
    for rank, (answers, said, _) in enumerate(results):
        if make == "adpsgd":
            assert answers == {(f"rank {rank}", float(rank))} | ({("rank 0", 0.5)} if ("rank 0", 0.5) in answers else set())
            assert all("each of them is at a step of its own. Each worker gets its own value." in text for text in said)
            assert len(said) == (3 if rank == 0 else 0)
        else:
            assert answers == {("rank 0", 0.5)}
            assert not said


def _refused(strategy: Any, ask: Callable[[Any], Any]) -> Any:
    with pytest.raises(ConfigurationError) as caught:
        trainer(strategy=strategy, callbacks=[Uneven(), Asks(ask)], max_epochs=1).fit(Net(), loader(SAMPLES, 4))
    return str(caught.value)


def _validate(t: Any) -> Any:
    return t.validate(t.lightning_module, loader(16, shuffle=False), verbose=False)


def _validate_inside(strategy: Any) -> Any:
    return _refused(strategy, _validate)


def test_another_run_inside_a_fit_is_refused() -> None:
    for said in launch(_validate_inside, "adpsgd"):
        assert "trainer.validate(...) inside trainer.fit(...) would end the fit" in said


def _only_rank_1(strategy: Any) -> Any:
    def ask(t: Any) -> None:
        if t.global_rank == 1 and t.fit_loop.epoch_loop.batch_idx > 0:
            t.strategy.barrier()

    return _refused(strategy, ask)


@pytest.mark.parametrize("make", [ADPSGDStrategy, "qsgd"], ids=["static", "in step"])
def test_a_collective_that_one_rank_makes_alone_is_an_error_that_names_it_and_no_hang(make: Any) -> None:
    for said in launch(_only_rank_1, make if isinstance(make, str) else make(work_sharing=False)):
        assert "rank 1 for a barrier" in said or "rank 1 at a barrier" in said
