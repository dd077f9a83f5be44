"""101 validation samples on two ranks: torchmetrics, self.log, all_gather in the step and of all predictions, a shuffled
loader, one of a class of the user's.
"""

import lightning as L
import torch
import torchmetrics
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Loader(DataLoader):
    pass


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.acc = nn.Linear(8, 3), torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.seen, self.steps, self.hits = [], 0, []

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_validation_epoch_start(self):
        self.seen, self.steps, self.hits = [], 0, []

    def validation_step(self, batch, batch_idx):
        x, y, i = batch
        out = self.net(x)
        hit = (out.argmax(1) == y).float()
        self.hits.append(hit)
        self.seen += i.tolist()
        self.steps += 1
        self.all_gather(hit)
        self.acc.update(out, y)
        self.log("acc", self.acc)
        self.log("loss", nn.functional.cross_entropy(out, y), on_step=True, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self):
        assert self.all_gather(torch.cat(self.hits)).numel() >= 101

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model, x_y_i = Net(), digits(101, seed=4)
    data = TensorDataset(*x_y_i)
    t = trainer(strategy, num_sanity_val_steps=0)
    t.fit(model, DataLoader(TensorDataset(*digits(64)), 8, shuffle=True), DataLoader(data, 5))
    found = {}

    def note(name):
        with torch.no_grad():
            out = model.net(x_y_i[0])
            want = {"acc": (out.argmax(1) == x_y_i[1]).float().mean(), "loss_epoch": nn.functional.cross_entropy(out, x_y_i[1])}
        got = {key: float(t.callback_metrics[key]) for key in want}
        found[name] = (got, {key: float(value) for key, value in want.items()}, model.seen, model.steps)

    note("fit")
    for name, loader in (
        ("shuffled", DataLoader(data, 4, shuffle=True)),
        ("own class", Loader(data, 50)),
        ("two", DataLoader(data, 2)),
    ):
        t.validate(model, loader, verbose=False)
        note(name)
    return {"found": found, "weights": weights(model.net)}


def judge(ranks, run):
    same(ranks, "weights")
    for name in ranks[0]["found"]:
        both = [r["found"][name] for r in ranks]
        seen = sorted(i for _, _, theirs, _ in both for i in theirs)
        assert seen == list(range(101)), f"{name}: {len(seen)} evaluations of {len(set(seen))} samples, 101 wanted"
        assert both[0][3] == both[1][3], f"{name}: {both[0][3]} and {both[1][3]} steps"
        for got, want, _, _ in both:
            for key, value in want.items():
                assert abs(got[key] - value) < 1e-6, f"{name}: {key} {got[key]:.5f}, in one process {value:.5f}"


if __name__ == "__main__":
    main(worker, judge)
