"""All models of a learning test live in this process, in one process group, which ends with the file."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a critic has no use for the policy's output layer, and is told so each time
    yield
    logging.enable_progress_bar()
    logging.set_verbosity(verbosity)
    if dist.is_initialized():
        dist.destroy_process_group()
