from typing import Any

import pytest
import torch

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime import sync_point as module
from lightning_gossip.runtime.sync_point import Agreement, Arrival, Purpose, SyncPoint
from lightning_gossip.runtime.workers import FixedWorkers
from tests.workers import run_processes

WORLD = 3


def models() -> torch.Tensor:
    return torch.randn(WORLD, 1001, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def script(rank: int) -> dict[str, Any]:
    module._CHUNK_NUMEL = 100  # several chunks, the last one shorter
    sync_point = SyncPoint(torch.device("cpu"), FixedWorkers())
    seen: dict[str, Any] = {}

    def agree(purpose: Purpose, *, should_stop: bool = False) -> Agreement | str:
        try:
            return sync_point.agree(Arrival(purpose, 10 * rank, should_stop))
        except ConfigurationError as error:
            return str(error)

    seen["all for the same"] = agree(Purpose.EPOCH_END)
    seen["one wants to end"] = agree(Purpose.EPOCH_END, should_stop=rank == 2)
    seen["one was told to stop"] = agree(Purpose.STOP if rank == 1 else Purpose.EPOCH_END)
    seen["different things"] = agree(Purpose.EPOCH_END if rank == 1 else Purpose.VALIDATE)
    seen["afterwards"] = agree(Purpose.EPOCH_END)
    for dtype in (torch.float64, torch.float32):
        flat = models()[rank].to(dtype)
        where = flat.data_ptr()
        seen[f"distance {dtype}"] = sync_point.average(flat)
        assert flat.data_ptr() == where
        seen[f"mean {dtype}"] = flat.numpy().tobytes()
    seen["nothing"] = sync_point.average(torch.zeros(0))
    seen["number"] = sync_point.mean(float(rank))
    seen["equal"] = sync_point.extremes([1, 2**40])
    seen["unequal"] = sync_point.extremes([1, 2**40 + (rank == 1)])
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    results = run_processes(script, tmp_path_factory.mktemp("sync_point"), world_size=WORLD)
    assert all(isinstance(result, dict) for result in results), results
    return results


pytestmark = pytest.mark.processes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_mean_is_exact_and_the_same_bits_everywhere(seen: list[dict[str, Any]], dtype: torch.dtype) -> None:
    means = [worker[f"mean {dtype}"] for worker in seen]
    assert means[0] == means[1] == means[2]
    mean = torch.frombuffer(bytearray(means[0]), dtype=dtype).double()
    tolerance = 1e-15 if dtype == torch.float64 else 3e-7
    assert torch.allclose(mean, models().mean(0), rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_averaging_returns_the_squared_distance_to_the_mean(seen: list[dict[str, Any]], dtype: torch.dtype) -> None:
    expected = (models() - models().mean(0)).square().sum(1)
    for rank in range(WORLD):
        assert seen[rank][f"distance {dtype}"] == pytest.approx(float(expected[rank]), rel=1e-5)
    assert [worker["nothing"] for worker in seen] == [0.0] * WORLD


def test_all_learn_what_each_came_for(seen: list[dict[str, Any]]) -> None:
    steps = (0, 10, 20)
    for worker in seen:
        assert worker["all for the same"] == Agreement(False, False, steps)
        assert worker["one wants to end"] == Agreement(False, True, steps)
        assert worker["afterwards"] == Agreement(False, False, steps)


def test_all_stop_if_any_was_told_to(seen: list[dict[str, Any]]) -> None:
    assert all(worker["one was told to stop"].stop for worker in seen)


def test_different_purposes_are_refused_on_every_rank(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        assert "rank 0 for VALIDATE, rank 1 for EPOCH_END, rank 2 for VALIDATE" in worker["different things"]


def test_numbers_are_averaged_and_compared(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        assert worker["number"] == 1.0
        assert worker["equal"] == ([1, 2**40], [1, 2**40])
        assert worker["unequal"] == ([1, 2**40], [1, 2**40 + 1])
