"""How charts are arranged, from TensorBoard's own files."""

from __future__ import annotations

import re
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from lightning_gossip.callbacks.panels import arrange


def test_tensorboard_gets_a_layout_whose_charts_take_what_the_monitor_logs(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path))
    arrange(logger)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts["consensus distance"] == ["gossip/consensus_distance"]
    assert all(re.fullmatch(charts["busy cores"][0], f"worker/{rank}/cores") for rank in (0, 15))


def test_a_logger_without_charts_is_left_alone(tmp_path: Path) -> None:
    arrange(CSVLogger(tmp_path))
    assert list(tmp_path.iterdir()) == []
