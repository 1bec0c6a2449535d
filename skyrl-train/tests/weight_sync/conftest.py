"""Trainers and engines that hold a few small tensors, connected in one process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train_testing.weight_holders import HolderInfo, WeightHolder, engines_in_threads
from skyrl_train_testing.weight_sources import BlockingSender

Connect = Callable[..., BlockingSender]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """A sender and `holders`, met by `ways` (transport, encoding). Closed when the test ends."""
    with ExitStack() as opened:

        def connect(
            ways: tuple[Any, Any],
            *holders: WeightHolder,
            verification: Any = "sampled",
            max_bucket_bytes: int = 1_000_000,
            timeout_seconds: float = 20.0,
        ) -> BlockingSender:
            infos = init_infos_for(
                [Route(*ways)] * len(holders),
                [HolderInfo()] * len(holders),
                master_address="127.0.0.1",
                master_port=find_free_port(),
                directory=str(tmp_path / "weights"),
                verification=verification,
                timeout_seconds=timeout_seconds,
            )
            engines = engines_in_threads(holders, timeout_seconds)
            sender = BlockingSender(engines, infos, max_bucket_bytes=max_bucket_bytes)
            opened.callback(sender.close)
            for holder in holders:
                assert holder.receiver is not None
                opened.callback(holder.receiver.close)
            return sender

        yield connect
