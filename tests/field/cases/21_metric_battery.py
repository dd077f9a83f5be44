"""AUROC, MetricCollection, MeanMetric, log_dict, values of a step and of the epoch, two validation loaders: all equal to one
process's values.
"""

import lightning as L
import torch
import torchmetrics
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix, MulticlassF1Score


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)
        made = torchmetrics.MetricCollection(
            {"acc": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3)}
        )
        self.val = nn.ModuleList([made.clone(prefix="a_"), made.clone(prefix="b_")])
        self.loss = torchmetrics.MeanMetric()
        self.train_acc = MulticlassAccuracy(3, average="micro")
        self.confusion, self.matrix = MulticlassConfusionMatrix(3), None
        self.train_seen = []

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.train_acc(out, batch[1])
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True, prog_bar=True)
        self.log("seen", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.train_seen.append((out.argmax(1) == batch[1]).sum().item())
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx):
        out = self.net(batch[0])
        self.val[dataloader_idx].update(out, batch[1])
        each = nn.functional.cross_entropy(out, batch[1], reduction="none")
        if dataloader_idx == 0:
            self.loss.update(each)
            self.confusion.update(out, batch[1])
        self.log("plain", each.mean(), batch_size=len(each), sync_dist=True)
        self.log_dict({"hardest": each.max(), "count": float(len(each))}, reduce_fx="max", batch_size=len(each), sync_dist=True)

    def on_validation_epoch_end(self):
        for metrics in self.val:
            self.log_dict(metrics.compute())
            metrics.reset()
        self.log("mean_loss", self.loss)
        self.matrix = self.confusion.compute()
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model = Net()
    a, b = digits(72, seed=3), digits(40, seed=4)
    t = trainer(strategy, max_epochs=3)
    t.fit(model, DataLoader(TensorDataset(*digits(96)), 8, shuffle=True), [DataLoader(TensorDataset(*s), 4) for s in (a, b)])
    got = {k: float(v) for k, v in t.callback_metrics.items()}
    want = {}
    with torch.no_grad():
        for name, (x, y, _) in (("a", a), ("b", b)):
            out = model.net(x)
            each = nn.functional.cross_entropy(out, y, reduction="none")
            want |= {
                f"{name}_acc": float((out.argmax(1) == y).float().mean()),
                f"{name}_f1": float(MulticlassF1Score(3)(out, y)),
                f"{name}_auroc": float(MulticlassAUROC(3)(out, y)),
            }
            want |= {
                f"plain/dataloader_idx_{'ab'.index(name)}": float(each.mean()),
                f"hardest/dataloader_idx_{'ab'.index(name)}": float(each.max()),
            }
            if name == "a":
                want["mean_loss"] = float(each.mean())
                matrix = MulticlassConfusionMatrix(3)(out, y)
    want["seen"] = 96.0
    return {"got": got, "want": want, "matrix": model.matrix, "true matrix": matrix, "weights": weights(model.net)}


def judge(ranks, run):
    same(ranks, "weights")
    for r in ranks:
        for key, value in r["want"].items():
            assert key in r["got"], f"{key} is missing: {sorted(r['got'])}"
            assert abs(r["got"][key] - value) < 1e-4, f"{key}: {r['got'][key]:.5f}, in one process {value:.5f}"
        assert (r["matrix"] == r["true matrix"]).all(), "confusion matrix"
    assert abs(ranks[0]["got"]["train_acc_epoch"] - ranks[1]["got"]["train_acc_epoch"]) < 1e-6


if __name__ == "__main__":
    main(worker, judge)
