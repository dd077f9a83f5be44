"""How a logger shows what ``GossipMonitor`` logs: what belongs together in one place, and against time."""

from __future__ import annotations

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

WALL = "time/wall_s"
_AGAINST_TIME = ("gossip/*", "averaging/*", "worker/*", "val_*")  # Weights & Biases
_TOGETHER = {  # TensorBoard: the tab Custom Scalars; regular expressions of names that share a chart
    "gossip": {
        "consensus distance": ["gossip/consensus_distance"],
        "staleness": ["gossip/staleness_mean"],
        "exchanges per step": ["gossip/exchanges_per_step"],
        "bytes sent": ["gossip/bytes_sent"],
    },
    "averaging": {"period": ["averaging/period"], "deviation": ["averaging/deviation"]},
    "workers": {
        "steps": [r"worker/\d+/steps"],
        "busy cores": [r"worker/\d+/cores"],
        "memory, GB": [r"worker/\d+/memory_gb"],
        "memory of the device, GB": [r"worker/\d+/device_memory_gb"],
    },
    "validation": {"loss": ["val_loss"], "accuracy": ["val_acc"]},
}


def arrange(logger: Logger) -> None:
    """Arrange a logger's charts, before the first metric; nothing for loggers without charts."""
    if isinstance(logger, WandbLogger):
        logger.experiment.define_metric(WALL)
        for names in _AGAINST_TIME:
            logger.experiment.define_metric(names, step_metric=WALL)
    elif isinstance(logger, TensorBoardLogger):
        layout = {part: {title: ["Multiline", names] for title, names in charts.items()} for part, charts in _TOGETHER.items()}
        logger.experiment.add_custom_scalars(layout)
