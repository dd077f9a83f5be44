"""Training by steps over an endless stream: max_steps, validation every 6 batches with check_val_every_n_epoch=None, top-k by
val_loss, resume from last.
"""

import lightning as L
import torch
from _field import digits, folder, main, rank, same, trainer, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Endless(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(rank())
        w = torch.randn(8, 3, generator=torch.Generator().manual_seed(7))
        while True:
            x = torch.randn(8, generator=g)
            yield x, (x @ w).argmax()


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.validated, self.batches = [], 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    val, out = TensorDataset(*digits(64)[:2]), {}
    for part, steps in (("first", 20), ("second", 32)):
        model = Net()
        saver = ModelCheckpoint(
            folder() / "saved", monitor="val_loss", save_top_k=2, save_last=True, filename="{step}-{val_loss:.4f}"
        )
        t = trainer(
            strategy,
            max_epochs=-1,
            max_steps=steps,
            val_check_interval=6,
            check_val_every_n_epoch=None,
            callbacks=[saver],
            enable_checkpointing=True,
        )
        t.fit(model, DataLoader(Endless(), 8), DataLoader(val, 8), ckpt_path="last" if part == "second" else None)
        out[part] = {
            "weights": weights(model),
            "validated": model.validated,
            "steps": t.global_step,
            "batches": model.batches,
            "files": sorted(p.name for p in (folder() / "saved").glob("*.ckpt")),
        }
        t.strategy.barrier()
    return out


def judge(ranks, run):
    for part in ("first", "second"):
        both = [r[part] for r in ranks]
        same(both, "weights")
        same(both, "validated")
    first, second = ranks[0]["first"], ranks[0]["second"]
    assert first["validated"] == [6, 12, 18] and first["steps"] == 20 and first["batches"] == 20, first
    assert "last.ckpt" in first["files"] and len(first["files"]) == 3, first["files"]
    assert second["steps"] == 32 and second["validated"] == [24, 30], (second["steps"], second["validated"])
    assert second["batches"] == 14, f"resumed at step 18, {second['batches']} batches to step 32"


if __name__ == "__main__":
    main(worker, judge)
