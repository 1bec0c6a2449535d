"""Locks by key."""

import os
import threading
from collections.abc import Hashable


class KeyedLocks:
    """A lock for each key. All locks are free after a fork, since the holding threads do not exist in the child. Use at
    module level only, as `os.register_at_fork` keeps it alive."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._locks: dict[Hashable, threading.Lock] = {}

    def __getitem__(self, key: Hashable) -> threading.Lock:
        return self._locks.setdefault(key, threading.Lock())  # atomic
