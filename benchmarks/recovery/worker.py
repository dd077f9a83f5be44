"""One worker: ``python -m benchmarks.recovery.worker STRATEGY FOLDER PLAN`` (JSON)."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader

from benchmarks.recovery.work import BATCH_SIZE, WORKERS, Net, Plan, Record, data
from lightning_gossip import ADPSGDStrategy

_DEADLINE = timedelta(seconds=60)  # torchft's own


def train_with_lightning(strategy: str, folder: Path, plan: Plan) -> None:
    training, testing = data(plan)
    restarts = strategy == "ddp" and bool(plan.kills)
    trainer = Trainer(
        strategy=ADPSGDStrategy() if strategy == "adpsgd" else strategy,
        devices=WORKERS,
        accelerator="cpu",
        max_epochs=plan.epochs,
        logger=False,
        enable_checkpointing=restarts,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Record(folder, plan), *([ModelCheckpoint(folder, save_last=True)] if restarts else [])],
    )
    model, last = Net(), folder / "last.ckpt"
    loader = DataLoader(training, batch_size=BATCH_SIZE, shuffle=True)
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
    accuracy = trainer.test(model, testing, verbose=False)[0]["test_acc"]
    if trainer.is_global_zero:
        _tell(folder, accuracy)


def train_with_torchft(folder: Path, plan: Plan) -> None:
    """Like the example of its documentation: a step whose all-reduce fails is not committed, the batch is lost."""
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.data import DistributedSampler  # type: ignore[import-not-found]
    from torchft.ddp import DistributedDataParallel  # type: ignore[import-not-found]
    from torchft.optim import OptimizerWrapper  # type: ignore[import-not-found]

    rank = int(os.environ["LOCAL_RANK"])
    training, testing = data(plan)
    model = Net()
    sgd = model.configure_optimizers()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=_DEADLINE),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"worker-{rank}",
        hostname="127.0.0.1",
    )
    network, optimizer = DistributedDataParallel(manager, model.network), OptimizerWrapper(manager, sgd)
    sampler = DistributedSampler(training, rank, WORKERS, group_rank=0, num_replicas=1, shuffle=True)
    record = Record(folder, plan)
    for epoch in range(plan.epochs):
        sampler.set_epoch(epoch)
        for number, (x, y, samples) in enumerate(DataLoader(training, batch_size=BATCH_SIZE, sampler=sampler)):
            record.begin(epoch, number)
            committed = manager.current_step()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if manager.current_step() > committed:
                record.end(epoch, samples)
    model.eval()
    with torch.no_grad():
        for x, y in testing:
            model.accuracy(model.network(x), y)
    if rank == 0:
        _tell(folder, float(model.accuracy.compute()))
    manager.shutdown(wait=False)


def _tell(folder: Path, accuracy: float) -> None:
    (folder / "result").write_text(json.dumps({"test_acc": accuracy}))


def main(strategy: str, folder: str, plan: str) -> None:
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    if strategy == "torchft":
        train_with_torchft(Path(folder), Plan.from_json(plan))
    else:
        train_with_lightning(strategy, Path(folder), Plan.from_json(plan))


if __name__ == "__main__":
    main(*sys.argv[1:])
