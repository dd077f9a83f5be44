"""The limit of open files: raised where it can be, and a job that it is too small for is refused in a sentence."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

import pytest

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime import open_files


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """A soft limit of 100; put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    _, hard = limits
    limit = open_files.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert limit == (None if hard == resource.RLIM_INFINITY else hard)


def test_who_holds_the_store_needs_a_socket_for_each_connection_of_each_worker() -> None:
    alone = open_files.needed(1000, connections=6, serves=False)
    assert open_files.needed(1000, connections=6, serves=True) == alone + 6000
    assert alone > 999  # Gloo's mesh


@pytest.mark.parametrize(
    ("serves", "limit", "remedy"),
    [(True, 1024, "lightning_gossip.store"), (True, 600, "fewer workers"), (False, 600, "fewer workers"), (False, 1024, None)],
)
def test_a_limit_that_is_too_low_is_said_with_the_remedy(
    serves: bool, limit: int, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "raise_limit", lambda: limit)
    if remedy is None:
        open_files.check(200, connections=6, serves=serves)
        return
    with pytest.raises(ConfigurationError, match=f"200 workers needs up to .* and this system allows {limit} .*{remedy}"):
        open_files.check(200, connections=6, serves=serves)


def test_no_limit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "raise_limit", lambda: None)
    open_files.check(10**6, connections=6, serves=True)


@pytest.mark.parametrize(("limit", "warns"), [(1024, True), (4096, False), (resource.RLIM_INFINITY, False)])
def test_an_agent_with_a_low_limit_is_warned_of(
    limit: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "prlimit", lambda pid, which: (limit, limit))
    with caplog.at_level(logging.WARNING):
        open_files.warn_of_agent(300, connections=6)
    assert ("ulimit -n 1928" in caplog.text) is warns
