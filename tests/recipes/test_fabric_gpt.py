"""The language model with Fabric: by gossip, and on from its checkpoint with DDP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import ROOT, run

SMALL = ("--width", "32", "--layers", "1", "--characters", "40000", "--accelerator", "cpu")


def _bits(output: str) -> list[float]:
    return [float(bits) for bits in re.findall(r"epoch \d: ([\d.]+) bits a byte", output)]


@pytest.mark.slow
@pytest.mark.processes
def test_it_trains_by_gossip_and_goes_on_with_ddp(tmp_path: Path) -> None:
    first = run("-m", "recipes.fabric_gpt", *SMALL, "--epochs", "2", "--checkpoint", str(tmp_path / "one.ckpt"))
    assert first.returncode == 0, first.output
    options = ("--strategy", "ddp", "--epochs", "3", "--resume", str(tmp_path / "one.ckpt"), "--accumulate", "2")
    second = run("-m", "recipes.fabric_gpt", *SMALL, *options, "--checkpoint", str(tmp_path / "two.ckpt"))
    assert second.returncode == 0, second.output
    assert first.left == second.left == []
    bits = _bits(first.output) + _bits(second.output)
    assert len(bits) == 3
    assert 8.0 > bits[0] > bits[1] > bits[2]


def test_a_checkpoint_that_is_not_there_is_said() -> None:
    ended = run("-m", "recipes.fabric_gpt", "--resume", "nowhere.ckpt")
    assert ended.returncode == 2
    assert "nowhere.ckpt: there is no such file" in ended.stderr
    assert "Traceback" not in ended.output


def test_it_is_short_enough_to_copy() -> None:
    assert len((ROOT / "recipes" / "fabric_gpt.py").read_text().splitlines()) <= 120


def test_a_strategy_that_there_is_not_is_said() -> None:
    ended = run("-m", "recipes.fabric_gpt", "--strategy", "adpsdg")
    assert ended.returncode == 2
    assert "--strategy adpsdg is none of adaptive_averaging" in ended.stderr
    assert "Traceback" not in ended.output
