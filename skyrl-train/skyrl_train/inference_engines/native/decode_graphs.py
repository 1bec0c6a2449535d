"""Decoding by replay: passes of a few padded shapes over fixed buffers, as CUDA graphs where the device has them.

Launching the kernels of a pass takes the host longer than the device needs to run them, unless the batch is large. A
captured pass is launched at once. It reads and writes the memory that it was captured with, so

- inputs are copied into one buffer, and the logits are in another (those of all graphs, which therefore overwrite each
  other's: use them before the next pass);
- the numbers of rows and keys are padded to a few sizes (`pad_size`), each captured at its second use: its first runs
  kernel by kernel, which also loads the kernels;
- graphs are dropped when memory that they use is replaced (`state` of `run`).

On a CPU a replay is the same pass again, called directly, so that everything but the capture is the same.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from skyrl_train.inference_engines.native.device_copies import upload

logger = logging.getLogger(__name__)

_CAPTURING = threading.Lock()
"""A process can capture one graph at a time."""


class DecodeShape(NamedTuple):
    """Shape of a pass."""

    num_rows: int
    num_keys: int
    is_adapted: bool
    """Whether a row uses an adapter."""


Compute = Callable[[torch.Tensor, DecodeShape], torch.Tensor]
"""Compute logits [rows, V] of inputs [rows, 3]: token, position and adapter slot. The host must read no value."""


def pad_size(size: int, smallest: int) -> int:
    """Round up to `smallest`, or the next of 1, 1.5, 2, 3, 4, 6, 8 … times a power of two: at most a half too many."""
    size = max(size, smallest)
    power = 1 << (size - 1).bit_length()
    return 3 * power // 4 if 3 * power // 4 >= size and power >= 4 else power


class DecodeGraphs:
    """Captured decoding passes of one model and cache. Only one thread uses it.

    Args:
        compute: pass to capture; every tensor that it reads, except its inputs, must be in place until `state` changes
    """

    def __init__(self, compute: Compute, vocabulary: int, device: torch.device):
        self._compute, self._vocabulary, self._device = compute, vocabulary, device
        self._state: object = None
        self._replays: dict[DecodeShape, Callable[[], None] | None] = {}
        """Captured passes; None: used once."""
        self._inputs = self._logits = torch.empty(0)
        self._is_capturing = True
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = None if self._stream is None else torch.cuda.graph_pool_handle()

    @property
    def num_captured(self) -> int:
        return sum(replay is not None for replay in self._replays.values())

    def run(self, inputs: np.ndarray, shape: DecodeShape, *, max_rows: int, state: object) -> torch.Tensor:
        """Compute float32 logits [rows, V]. The next call overwrites them.

        Args:
            inputs: [rows, 3] int64: token, position and adapter slot of each row
            max_rows: maximum number of rows while `state` stays the same
            state: changes whenever memory that passes use is replaced
        """
        if state != self._state:
            self.clear()
            self._state = state
            self._inputs = torch.zeros(max_rows, 3, dtype=torch.long, device=self._device)
            self._logits = torch.empty(max_rows, self._vocabulary, dtype=torch.float32, device=self._device)
        used, logits = self._inputs[: shape.num_rows], self._logits[: shape.num_rows]
        used.copy_(upload(inputs, self._device))

        def compute() -> None:
            logits.copy_(self._compute(used, shape))  # in place of `float()`: no kernel more

        if shape not in self._replays or not self._is_capturing:
            self._replays[shape] = None
            with self._use_capture_stream():  # whose libraries then have their workspaces
                compute()
            return logits
        replay = self._replays[shape] or self._capture(compute)
        if self._is_capturing:
            self._replays[shape] = replay
        replay()
        return logits

    def clear(self) -> None:
        """Free all graphs and buffers. Their logits must not be used any more."""
        self._replays = {}
        self._inputs = self._logits = torch.empty(0)
        self._state = None

    def _capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture a pass without running it; return its replay. If it cannot be captured, nothing is any more."""
        if self._stream is None:
            return compute
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (a trainer in this process) may go on to use the device.
            capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
            with _CAPTURING, self._use_capture_stream(), capture:
                compute()
        except RuntimeError as error:
            # An operation that cannot be captured raises, and then the end of the capture.
            reason = str(error.__context__ or error).partition("\n")[0]
            logger.warning(
                "decoding continues without CUDA graphs, since a pass of this model cannot be captured: %s; "
                "generator.enforce_eager=true does not try",
                reason,
            )
            self._is_capturing, self._stream = False, None  # its stream may still allocate from the graphs' memory
            return compute
        return graph.replay

    @contextlib.contextmanager
    def _use_capture_stream(self) -> Iterator[None]:
        """Run on the capture stream, after all work so far and before all later work of the current one."""
        stream = self._stream
        if stream is None:
            yield
            return
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):  # also restores the current stream after a failed capture
                    yield
            finally:
                current.wait_stream(stream)
