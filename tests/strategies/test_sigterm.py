"""SIGTERM to one worker, under every strategy; test_conformance.py has the rest."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer
from tests.strategies.test_conformance import SLOW, parameters

pytestmark = pytest.mark.processes


class Terminated(Callback):
    """Rank 1 gets a SIGTERM in its first batch of the second epoch."""

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == 1 and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def _terminated(strategy: Any) -> Any:
    model = Net()
    t = trainer(strategy=strategy, max_epochs=3, callbacks=[Terminated()])
    with pytest.raises(SIGTERMException):
        t.fit(model, loader(512, 8))
    return t.current_epoch, flat(model).tolist()


# one of each way to meet: by gossip, at a server, in each step
@pytest.mark.parametrize("make", parameters(SLOW | {"dpsgd", "eamsgd", "periodic_averaging", "adaptive_averaging"}))
def test_sigterm_to_one_rank_stops_all_with_the_mean_model(make: Any) -> None:
    results = launch(_terminated, make(), workers=3)
    assert results[0] == results[1] == results[2]
    assert results[0][0] in (1, 2)  # 2 if the others had taken all batches of the epoch when rank 1 began it
