"""Locks by key."""

import os
import threading
from collections.abc import Hashable


class KeyedLocks:
    """A lock for each key. Those of a forked process are free: the threads that held them do not exist there. For a
    module's own, as `os.register_at_fork` keeps it alive."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._locks: dict[Hashable, threading.Lock] = {}

    def __getitem__(self, key: Hashable) -> threading.Lock:
        return self._locks.setdefault(key, threading.Lock())  # atomic
