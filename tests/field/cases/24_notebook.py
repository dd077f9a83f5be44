"""A notebook's cells under STRATEGY_notebook: fit, look at metrics and weights in the parent process, fit for more epochs,
test the best checkpoint.
"""

import lightning as L
import torch
from _field import digits, folder, main, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def worker(strategy):
    torch.manual_seed(1)
    model, data = Net(), TensorDataset(*digits(256))
    x, y = data.tensors[:2]
    train, val = DataLoader(data, 8, shuffle=True), DataLoader(data, 8)

    def accuracy():
        model.eval()
        with torch.no_grad():
            return float((model.net(x).argmax(1) == y).float().mean())

    saver = ModelCheckpoint(folder() / "saved", monitor="val_acc", mode="max", save_top_k=-1)
    t = trainer(strategy, callbacks=[saver], enable_checkpointing=True, max_epochs=2)
    cells = {"before": accuracy()}
    t.fit(model, train, val)  # cell 1
    cells |= {
        "after 2": accuracy(),
        "logged 2": float(t.callback_metrics["val_acc"]),
        "files 2": len(list((folder() / "saved").glob("*.ckpt"))),
        "best": saver.best_model_path != "",
    }
    saver = ModelCheckpoint(folder() / "saved more", monitor="val_acc", mode="max", save_top_k=-1)
    last = max((folder() / "saved").glob("*.ckpt"), key=lambda p: int(p.name.split("step=")[1].split(".")[0]))
    t = trainer(strategy, callbacks=[saver], enable_checkpointing=True, max_epochs=4)
    t.fit(model, train, val, ckpt_path=last)  # cell 2: Lightning forbids a second fit of one Trainer here
    cells |= {
        "after 4": accuracy(),
        "logged 4": float(t.callback_metrics["val_acc"]),
        "files 4": sorted(p.name for p in (folder() / "saved more").glob("*.ckpt")),
    }
    cells["tested"] = t.test(model, val, ckpt_path="best", verbose=False)[0]["val_acc"]  # cell 3
    states = torch.load(saver.best_model_path, weights_only=False)["callbacks"]
    cells["best score"] = float(next(s["best_model_score"] for n, s in states.items() if n.startswith("ModelCheckpoint")))
    return cells


def judge(ranks, run):
    c = ranks[0]
    assert abs(c["after 2"] - c["logged 2"]) < 1e-5, (
        f"logged {c['logged 2']:.3f}, the weights that came back have {c['after 2']:.3f}"
    )
    assert c["files 2"] == 2 and c["best"], c
    assert abs(c["after 4"] - c["logged 4"]) < 1e-5, f"second fit: logged {c['logged 4']:.3f}, weights {c['after 4']:.3f}"
    assert [f.split("-")[0] for f in c["files 4"]] == ["epoch=2", "epoch=3"], f"resumed after epoch 1, saved {c['files 4']}"
    assert abs(c["tested"] - c["best score"]) < 1e-5, f"tested {c['tested']:.4f}, best score {c['best score']:.4f}"


if __name__ == "__main__":
    main(worker, judge, workers=1, suffix="_notebook")
