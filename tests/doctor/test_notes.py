"""What the ranks tell each other passes where large packets are lost."""

from __future__ import annotations

import random

from torch.distributed import HashStore
from typing_extensions import override

from lightning_gossip.doctor import notes


class Watched(HashStore):
    """Notes how large values are, and whether an answer was waited for between two."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.unanswered = self.at_once = 0

    @override
    def set(self, key: str, value: bytes | str) -> None:
        self.largest = max(self.largest, len(key) + len(value))
        self.unanswered += 1
        self.at_once = max(self.at_once, self.unanswered)
        super().set(key, value)

    @override
    def check(self, keys: list[str]) -> bool:
        self.unanswered = 0
        return bool(super().check(keys))


def test_what_is_read_is_what_was_written_and_no_packet_was_large() -> None:
    store, said = Watched(), {"workers": [{"rank": rank, "token": random.randbytes(40).hex()} for rank in range(64)]}
    notes.write(store, "workers", said)
    assert notes.read(store, "workers") == said
    assert (store.largest < 500, store.at_once) == (True, 1)


def test_a_short_word_is_one_part() -> None:
    store = HashStore()
    notes.write(store, "decided", [])
    assert notes.read(store, "decided") == []
    assert store.get("decided") == b"1"
