"""Ctrl-C at the terminal reaches all workers at once: they end soon, and OnExceptionCheckpoint leaves a checkpoint that loads
and resumes.
"""

import os
import signal
import time
from pathlib import Path

import lightning as L
import torch
from _field import digits, folder, main, rank, trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        if batch_idx == 10:
            (folder() / f"running-{rank()}").touch()
        time.sleep(0.02)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    trainer(strategy, max_epochs=50, callbacks=[OnExceptionCheckpoint(folder(), "stopped")], enable_checkpointing=True).fit(
        Net(), DataLoader(TensorDataset(*digits(2048)), 8, shuffle=True)
    )


def press(process, place):
    began = time.time()
    while time.time() - began < 60 and not all((place / f"running-{r}").exists() for r in range(2)):
        time.sleep(0.1)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    press.at = time.time()
    process.wait(60)
    press.took = time.time() - press.at
    press.left = [p for p in os.listdir("/proc") if p.isdigit() and _of(p, process.pid)]
    saved = place / "stopped.ckpt"
    press.saved = torch.load(saved, weights_only=False) if saved.exists() else None


def _of(pid, group):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[2]) == group and fields[0] != "Z"
    except (OSError, IndexError):
        return False


def judge(ranks, run):
    assert run.code != "hang", "hangs after Ctrl-C"
    assert press.took < 30, f"ended {press.took:.0f} s after Ctrl-C"
    assert not press.left, f"{len(press.left)} processes are left"
    assert press.saved is not None, "no checkpoint was saved"
    Net().load_state_dict(press.saved["state_dict"])
    assert all(torch.isfinite(v).all() for v in press.saved["state_dict"].values())
    return f"ended {press.took:.1f} s after Ctrl-C with status {run.code}"


if __name__ == "__main__":
    main(worker, judge, interrupt=press)
