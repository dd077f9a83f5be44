"""What is measured in virtual time: the hooks' arithmetic, the same models under another clock, when a loss is reached."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.time_to_loss import docs, images, language
from benchmarks.time_to_loss.contenders import CONTENDERS, KNOWN
from benchmarks.time_to_loss.hooks import Bfloat16, LowRank, compressed, share_of
from benchmarks.time_to_loss.language import CHAR_GPT
from benchmarks.time_to_loss.plan import planned
from benchmarks.time_to_loss.report import plot, ratio, reached, rows, show, targets
from benchmarks.time_to_loss.results import Results
from benchmarks.time_to_loss.runs import TUNING_SEED, Run, execute
from benchmarks.time_to_loss.task import SCENARIOS, Condition
from lightning_gossip.simulation import Cluster, Constant, Quadratic, Steps
from lightning_gossip.simulation.problems.sgd import SGD
from lightning_gossip.simulation.record import Recording
from lightning_gossip.simulation.run import Run as SimulatedRun
from tests.recipes.vision.generated import fashion_mnist

SHAPES = [torch.Size((40, 30)), torch.Size((30,)), torch.Size((6, 5, 5)), torch.Size((3, 4))]
NUMEL = sum(shape.numel() for shape in SHAPES)
CALM = Condition(4, 200, "equal")
SHORT = replace(CHAR_GPT, steps=32)
SETTINGS = {"steps": 1, "model_bytes": CHAR_GPT.model_bytes}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "SMALL", {**language.SMALL, "layers": 1, "width": 8})
    monkeypatch.setattr(language, "HELD_OUT", 4)


class Bucket:
    """What torch hands to a hook, of all gradients."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._buffer = gradient

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([shape.numel() for shape in SHAPES])
        return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@pytest.fixture
def group_of_one() -> Any:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_power_sgd_is_torch_s_hook_step_by_step() -> None:
    """Error feedback and warm start are seen from the second step on; of one worker, since torch's needs a group."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2)
    ours = LowRank(SHAPES, 3, workers=1, seed=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # torch's own begins with all-reduces
        powerSGD_hook.powerSGD_hook(state, Bucket(torch.zeros(NUMEL))).wait()  # type: ignore[arg-type]
    for step in range(4):
        gradient = torch.randn(NUMEL, generator=generator)
        if step == 1:  # the first Q is random in both: from here on the same
            begin = [q.clone() for q in ours._q]
            state.q_memory_dict[0].copy_(torch.cat([q.flatten() for q in begin]))
            errors = torch.zeros(NUMEL)
            for (place, *_), error in zip(ours._matrices, ours._errors, strict=True):
                errors[place] = error[0].flatten()
            state.error_dict[0].copy_(errors)
        mine = ours(gradient[None].clone())
        theirs = powerSGD_hook.powerSGD_hook(state, Bucket(gradient.clone())).wait()  # type: ignore[arg-type]
        if step:
            assert torch.allclose(mine, theirs, atol=1e-5), step
    assert (state.total_numel_after_compression / state.total_numel_before_compression) == pytest.approx(share_of(SHAPES, 3))


@pytest.mark.usefixtures("group_of_one")
def test_bfloat16_is_torch_s_hook() -> None:
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
    theirs = default_hooks.bf16_compress_hook(None, Bucket(gradient.clone())).wait()  # type: ignore[arg-type]
    assert torch.equal(Bfloat16().averager(a_run(1))(gradient[None].clone()), theirs)


def a_run(workers: int) -> SimulatedRun:
    return SimulatedRun(
        strategy=Bfloat16(),
        cluster=Cluster(workers, Constant(1.0)),
        links=CALM.links,
        work=Steps(number=1),
        objective=Quadratic([1.0]),
        optimizer=SGD(),
        model_bytes=0,
        shares_work=False,
        seed=0,
        recording=Recording(),
        target_loss=None,
    )


def test_the_mean_of_many_workers_low_rank_gradients_is_unbiased_over_time() -> None:
    ours = LowRank(SHAPES, 2, workers=3, seed=1)
    gradients = torch.randn(3, NUMEL, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(NUMEL)
    for _ in range(200):
        total += ours(gradients.clone())
    assert torch.allclose(total / 200, gradients.mean(0), atol=0.1)


def test_only_what_saves_half_is_sent_as_low_rank_matrices() -> None:
    assert [compressed(shape, 3) for shape in SHAPES] == [3 * 70, None, None, None]
    assert share_of(SHAPES, 3) == pytest.approx((210 + 30 + 150 + 12) / NUMEL)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", ["ddp", "ddp_powersgd", "adaptive_outer"])
def test_models_that_no_link_changes_are_timed_as_if_they_were_trained_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {(entry["rate_mbit"], entry["scenario"]): entry for entry in execute(Run(name, 4e-3, 1.0, CALM, 0), SHORT)}
    assert set(entries) == {(rate, scenario) for rate in SHORT.rates_mbit for scenario in SCENARIOS}
    monkeypatch.setattr("benchmarks.time_to_loss.runs.Run.waits", False)  # trained there
    for condition in (CALM, Condition(4, 50, "slow_worker")):
        (there,) = execute(Run(name, 4e-3, 1.0, condition, 0), SHORT)
        timed = entries[condition.rate_mbit, condition.scenario]
        assert timed["curve"]["s"] == pytest.approx(there["curve"]["s"])
        for key in ("steps", "loss", "gb"):
            assert timed["curve"][key] == there["curve"][key]


def test_images_learn_in_as_many_epochs_as_their_number_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FOLDER", fashion_mnist(tmp_path))  # 48 images
    monkeypatch.setattr(images, "VALIDATION_IMAGES", 8)
    monkeypatch.setattr(images, "images", images.images.__wrapped__)
    task = replace(images.FASHION_MNIST, steps=32, batch_size=4)
    work = task.work(steps=task.steps, hosts=4, samples=40)
    assert (work.number, work.batches) == (13, 128 // 13)
    found = list(execute(Run("ddp", 0.1, 1.0, CALM, 0), task))
    assert {entry["rate_mbit"] for entry in found} == {1000, 200}
    curve = found[0]["curve"]
    assert curve["steps"][-1] == 13 * 3  # 9 batches an epoch, filled up to 12 for four
    assert len(set(curve["loss"])) > 10


def entry(contender: str, seed: int, losses: list[float], *, lr: float = 4e-3, hour: float = 1.0) -> dict[str, Any]:
    curve = {
        "s": [3600.0 * hour * place for place in range(len(losses))],
        "steps": [10.0 * place for place in range(len(losses))],
        "loss": losses,
        "gb": [100.0 * place for place in range(len(losses))],
    }
    run = Run(contender, lr, 1.0, CALM, seed)
    return {
        **run.described(),
        "ended": "done",
        "exchanges_per_step": None,
        "topology": None,
        "averagings": None,
        "curve": curve,
    }


def filled(path: Path) -> Results:
    results = Results(path, SETTINGS)
    results.add([entry("ddp", seed, [4.0, 3.0, final], hour=10.0) for seed, final in enumerate((1.9, 2.0, 2.1))])
    results.add([entry("adpsgd", 0, [4.0, 2.0, 1.5]), entry("adpsgd", 1, [4.0, 3.0, 2.5])])
    return results


def test_a_loss_is_reached_between_two_points_and_a_mean_has_to_be_made(tmp_path: Path) -> None:
    results = filled(tmp_path / "r.json")
    target = targets(results, 4)
    assert target is not None
    assert (target.within, target.below) == (pytest.approx(2.1), pytest.approx(1.9))
    ddp = reached(results.of(contender="ddp", seed=1)[0], 2.5, model_bytes=CHAR_GPT.model_bytes)
    assert ddp is not None
    assert (ddp.s, ddp.steps, ddp.gb) == (pytest.approx(15 * 3600), pytest.approx(15), pytest.approx(150))
    gossip = reached(results.of(contender="adpsgd", seed=0)[0], 3.0, model_bytes=CHAR_GPT.model_bytes)
    assert gossip is not None
    an_all_reduce_s = 1.5 * CHAR_GPT.model_bytes / CALM.links.bandwidth
    assert gossip.s == pytest.approx(1800 + an_all_reduce_s, abs=0.1)
    assert gossip.gb == pytest.approx(50 + 1.5 * CHAR_GPT.model_bytes / 1e9)
    assert reached(results.of(contender="adpsgd", seed=1)[0], 2.1, model_bytes=CHAR_GPT.model_bytes) is None


def test_rows_count_the_seeds_that_reach_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = filled(tmp_path / "r.json")
    target = targets(results, 4)
    assert target is not None
    ddp, gossip = rows(results, CALM, target)
    assert (len(ddp.hits), len(gossip.hits), ddp.below, gossip.below) == (3, 1, 1, 1)
    sooner = ratio(ddp, gossip, "s")
    assert sooner is not None
    assert sooner > 10
    assert target.half == pytest.approx(3.0)
    assert len(gossip.half) == 2
    show(results, 4)
    said = capsys.readouterr().out
    assert "(1/2)" in said
    assert "AD-PSGD" in said
    plot(results, 4, "equal", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_the_plan_follows_what_was_found_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = Results(path, SETTINGS)
    first = list(planned(results, CHAR_GPT))
    assert [run.lr for run in first] == list(CHAR_GPT.lrs)
    results.add([entry("ddp", TUNING_SEED, [4.0, 2.0 + abs(lr - CHAR_GPT.lrs[1])], lr=lr) for lr in CHAR_GPT.lrs])
    second = [run for run in planned(results, CHAR_GPT) if not results.has(run)]
    assert {run.seed for run in second} == {TUNING_SEED}
    assert {run.lr / CHAR_GPT.lrs[1] for run in second} <= {1.0, 0.5}
    for run in second:
        better = 1.0 if run.contender == "diloco_25_1_0.5" else 2.0
        results.add([entry(run.contender, TUNING_SEED, [4.0, better + run.lr], lr=run.lr)])
    third = [run for run in planned(Results(path, SETTINGS), CHAR_GPT) if not results.has(run)]
    assert {run.contender for run in third} == {*CONTENDERS, "diloco_25_1_0.5"}
    assert {run.lr / CHAR_GPT.lrs[1] for run in third if run.contender == "adpsgd"} == {0.5}
    assert not Results(path, {**SETTINGS, "steps": 2}).runs  # of other settings


def test_every_contender_has_a_colour_and_a_marker_of_its_own() -> None:
    shown = [(contender.colour, contender.marker) for contender in CONTENDERS.values()]
    assert len(set(shown)) == len(shown)
    assert len({contender.label for contender in KNOWN.values()}) == len(KNOWN)


def test_the_settings_are_plain_values_and_the_small_model_has_the_size_that_is_said() -> None:
    settings = json.loads(json.dumps(CHAR_GPT.settings()))
    assert settings["small_model"]["parameters"] == 120_576
    assert sum(shape.numel() for shape in language.shapes(language.LARGE)) * 4 == CHAR_GPT.model_bytes


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    page = docs.PAGE.read_text()
    assert docs.with_tables(page, docs.kept()) == page, "run python -m benchmarks.time_to_loss.docs, and read the prose again"


def test_the_rows_that_performance_repeats_are_those_of_the_page() -> None:
    text = (docs.PAGE.parent / "performance.md").read_text()
    rows = text.split("<!-- some of time-to-loss.md -->\n")[1].split("<!-- end -->")[0].splitlines()
    assert len(rows) > 5
    assert [row for row in rows if row not in docs.PAGE.read_text().splitlines()] == []
