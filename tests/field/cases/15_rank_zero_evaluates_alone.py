"""Rank 0 alone computes a slow metric (122 s) after validation while the other waits at torch.distributed.barrier(); DDP waits
30 minutes.
"""

import os
import time

import lightning as L
import torch
import torch.distributed as dist
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("FIELD_SECONDS", 122))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking and self.current_epoch == 0:
            if self.trainer.is_global_zero:
                time.sleep(SECONDS)
            dist.barrier()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model, data = Net(), TensorDataset(*digits(64))
    t = trainer(strategy)
    t.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    return {"weights": weights(model), "epoch": t.current_epoch, "world": t.world_size}


def judge(ranks, run):
    same(ranks, "weights")
    assert ranks[0]["epoch"] == 2 and ranks[0]["world"] == 2


if __name__ == "__main__":
    main(worker, judge, deadline=165)
