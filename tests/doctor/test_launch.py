"""Ranks as launchers tell them, without any process."""

from __future__ import annotations

import pytest

from lightning_gossip import ConfigurationError
from lightning_gossip.doctor.launch import Place, place

_ALL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch) -> object:
    for name in _ALL:
        monkeypatch.setenv(name, "")  # so that it is put back, whoever sets it
        monkeypatch.delenv(name)

    def setting(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return setting


def test_without_a_launcher_there_is_no_place(set_variables: object) -> None:
    assert place() is None


def test_torchrun(set_variables: object) -> None:
    set_variables(  # type: ignore[operator]
        RANK="5",
        WORLD_SIZE="8",
        LOCAL_RANK="1",
        GROUP_RANK="1",
        MASTER_ADDR="gpu00",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="none",
    )
    assert place() == Place(5, 8, 1, "gpu00", 29500, "TorchElastic")


def test_slurm(set_variables: object) -> None:
    set_variables(  # type: ignore[operator]
        SLURM_NTASKS="4",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_PROCID="3",
        SLURM_LOCALID="1",
        SLURM_NODEID="1",
        SLURM_JOB_ID="17",
        SLURM_JOB_NAME="doctor",
        SLURM_NODELIST="gpu[03-04]",
    )
    found = place()
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.host, found.launcher) == (3, 4, 1, "gpu03", "SLURM")
    assert found.port > 1024


def test_variables_by_hand_and_what_is_wrong_with_them(set_variables: object) -> None:
    set_variables(NODE_RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29400")  # type: ignore[operator]
    assert place() == Place(1, 2, 0, "10.0.0.1", 29400, "variables")
    set_variables(RANK="2")  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match="RANK=2 is not below WORLD_SIZE=2"):
        place()
    set_variables(MASTER_PORT="")  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match="MASTER_PORT=\\)"):
        place()


def test_what_lightning_refuses_is_said_in_its_words(set_variables: object) -> None:
    set_variables(SLURM_NTASKS="4", SLURM_JOB_NAME="doctor")  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match="--ntasks-per-node=4"):
        place()
