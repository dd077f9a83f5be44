"""Each worker's own samples: what its loader gives, what is refused, what is left behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_gossip import ADPSGDStrategy, ConfigurationError, DPSGDStrategy
from lightning_gossip.simulation import digits
from lightning_gossip.simulation.problems.label_skew import label_counts, label_skew
from recipes import skew
from recipes.digits import DigitsData
from recipes.skew import LabelHistogram, LabelledData, SkewedShare


def data_of(rank: int, workers: int = 4, **options: Any) -> DigitsData:
    data = DigitsData(batch_size=16, **options)
    data.trainer = SimpleNamespace(world_size=workers, global_rank=rank, is_global_zero=rank == 0, datamodule=data)  # type: ignore[assignment]
    return data


def drawn(loader: DataLoader[Any], epoch: int) -> list[int]:
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # as Lightning does
    return list(loader.sampler)  # type: ignore[call-overload]


def test_the_loaders_of_all_workers_have_every_sample_once_in_another_order_each_epoch() -> None:
    loaders = [data_of(rank, skew=0.1, skew_seed=3).train_dataloader() for rank in range(4)]
    assert {len(loader) for loader in loaders} == {20}
    for epoch in range(2):
        seen = [drawn(loader, epoch) for loader in loaders]
        assert sorted({index for own in seen for index in own}) == list(range(1277))
        assert sum(map(len, seen)) == 1280  # 320 or 319 samples and one of them again
        assert all(len(set(own)) >= 319 for own in seen)
    assert drawn(loaders[0], 0) != drawn(loaders[0], 1)
    assert sorted(set(drawn(loaders[0], 0))) == sorted(set(drawn(loaders[0], 1)))
    assert drawn(loaders[1], 7) == drawn(data_of(1, skew=0.1, skew_seed=3).train_dataloader(), 7)


def test_the_shares_are_those_of_the_simulator() -> None:
    ours, theirs = data_of(0, skew=0.1, skew_seed=5).shares(4), label_skew(digits().y.numpy(), 4, alpha=0.1, seed=5)
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))


def test_without_skew_the_loader_is_the_plain_one_whose_work_is_shared() -> None:
    loader = data_of(0).train_dataloader()
    assert not isinstance(loader.sampler, SkewedShare)
    with pytest.raises(ConfigurationError, match=r"Without recipe\.data\.skew"):
        data_of(0).shares(4)


@pytest.mark.parametrize(
    ("options", "message"), [({"skew": 0.0}, "skew=0.0 is not a number above 0"), ({"skew_seed": -1}, "skew_seed")]
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LabelledData(**options)


def test_work_sharing_that_is_asked_for_is_refused_and_otherwise_off() -> None:
    with pytest.raises(ConfigurationError, match=r"strategy\.work_sharing=true hands each batch"):
        skew.check(DigitsData(skew=0.1), ADPSGDStrategy(work_sharing=True))
    skew.check(DigitsData(skew=0.1), ADPSGDStrategy())
    skew.check(DigitsData(skew=0.1), DPSGDStrategy())
    skew.check(DigitsData(), ADPSGDStrategy(work_sharing=True))


def test_a_run_leaves_how_many_samples_of_each_label_each_worker_has(tmp_path: Path) -> None:
    data = data_of(0, skew=0.1)
    LabelHistogram(tmp_path).on_train_start(data.trainer, None)  # type: ignore[arg-type]
    table = np.genfromtxt(tmp_path / skew.TABLE, delimiter=",", skip_header=1, dtype=int)
    assert (table[:, 1:] == label_counts(data.training_labels, data.shares(4))).all()
    assert table[:, 0].tolist() == [0, 1, 2, 3]
    assert (tmp_path / skew.PICTURE).stat().st_size > 1000


def test_a_run_without_skew_leaves_nothing(tmp_path: Path) -> None:
    LabelHistogram(tmp_path).on_train_start(data_of(0).trainer, None)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("workers", "labels"), [(2, 1000), (128, 10)])
def test_a_picture_of_many_workers_or_labels_stays_readable(workers: int, labels: int) -> None:
    figure = skew.picture(np.ones((workers, labels), dtype=np.int64), 0.1)
    assert max(figure.get_size_inches()) <= 12.0
    assert not figure.axes[0].texts
