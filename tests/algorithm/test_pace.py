from __future__ import annotations

from lightning_gossip.algorithm.pace import backoff_s


def test_the_wait_after_refusals_doubles_up_to_50_ms_however_many_there_are() -> None:
    waits = [backoff_s(refusals) for refusals in range(1200)]  # 2.0**1024 does not fit a float
    assert waits[:3] == [0.0005, 0.001, 0.002]
    assert waits == sorted(waits)
    assert set(waits[7:]) == {0.05}
