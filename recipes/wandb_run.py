"""What a run leaves in Weights & Biases at its end: charts against time, models with aliases, files; and who it goes on from.

A run writes its id beside its checkpoints. One that is resumed from there goes on under that id, as W&B's users expect; offline
too, where ``wandb sync --append`` puts both parts into one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger

from recipes.record import METRICS, RECORD, RunRecord
from recipes.summary import SUMMARY

RUN_ID = "wandb_run_id.txt"
LAST, BEST = "model", "best"  # names of the checkpoints
BEST_BY = "val_loss"
_WALL = "time/wall_s"
_CHARTS = {  # of metrics.csv → what it is
    "gossip/consensus_distance": "Consensus distance",
    "gossip/staleness_mean": "Staleness of a step, mean",
    "gossip/exchanges_per_step": "Exchanges per step",
    "gossip/bytes_sent": "Bytes sent by all workers",
    "averaging/period": "Steps between two averagings",
    "train_loss": "Training loss",
    "val_loss": "Validation loss of the mean model",
    "val_acc": "Validation accuracy of the mean model",
}


def id_to_resume(checkpoint: str | None) -> str | None:
    """The id of the W&B run that has left a checkpoint.

    Args:
        checkpoint: its path; None where a run begins anew.
    """
    note = None if checkpoint is None else Path(checkpoint).parent / RUN_ID
    return note.read_text(encoding="utf-8").strip() or None if note is not None and note.is_file() else None


def note_id(logger: WandbLogger, folder: Path) -> None:
    """Write the run's id beside its checkpoints. On rank 0, when training begins."""
    (folder / RUN_ID).write_text(f"{logger.experiment.id}\n", encoding="utf-8")


def publish(
    logger: WandbLogger, summary: Mapping[str, Any], folder: Path, pictures: Sequence[Path], *, log_model: bool
) -> None:
    """Put the end of a run where its metrics are.

    Args:
        logger: of the run.
        summary: of the run.
        folder: of the run.
        pictures: PNG files.
        log_model: whether to add the checkpoints.
    """
    import wandb

    run = logger.experiment
    run.log({f"run/{picture.stem}": wandb.Image(str(picture)) for picture in pictures})
    run.summary.update({name: value for name, value in summary.items() if name != "workers" and value is not None})
    columns = list(summary["workers"][0])
    table = wandb.Table(columns, [[worker[column] for column in columns] for worker in summary["workers"]])
    run.log({"run/workers": table})
    record = RunRecord.load(folder)
    _charts(run, record.epochs)
    files = wandb.Artifact(f"run-{run.id}", "run", description="summary, metrics by epoch, time line, pictures")
    for path in (*(folder / name for name in (SUMMARY, METRICS, RECORD)), *pictures):
        files.add_file(str(path))
    run.log_artifact(files)
    if log_model:
        _models(run, summary, folder, record)


def _charts(run: Any, rows: Sequence[Mapping[str, float]]) -> None:
    """One chart a metric, against seconds of training: ready in the run's workspace, whatever else is plotted there."""
    import wandb

    for name, title in _CHARTS.items():
        points = [[row[_WALL], row[name]] for row in rows if _WALL in row and name in row]
        if points:
            table = wandb.Table([_WALL, name], points)
            run.log({f"against_time/{name}": wandb.plot.line(table, _WALL, name, title=f"{title}, against seconds")})


def _models(run: Any, summary: Mapping[str, Any], folder: Path, record: RunRecord) -> None:
    """The best checkpoint and the last one as versions of one artifact; one version where they are the same epoch's."""
    import wandb

    rows = record.epochs[record.epochs_before :]  # a resumed run keeps the best of its own epochs
    last = rows[-1]
    best = min((row for row in rows if BEST_BY in row), key=lambda row: row[BEST_BY], default=last)
    versions = [(LAST, last, ["latest", "best"])] if best is last else [(BEST, best, ["best"]), (LAST, last, ["latest"])]
    for name, row, aliases in versions:
        path = folder / f"{name}.ckpt"
        if path.exists():
            told = {key: summary.get(key) for key in ("strategy", "topology", "world_size", "test_acc")}
            model = wandb.Artifact(f"model-{run.id}", "model", metadata={**told, **row})
            model.add_file(str(path), name="model.ckpt")
            run.log_artifact(model, aliases=aliases)
