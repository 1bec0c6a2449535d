"""Preparation of every process of a run that Ray starts."""

import os

import ray
import torch

from skyrl_train.utils.nodes import set_node_address
from skyrl_train.utils.process_log import capture_output, configure_logging


def prepare_process(log_file: str) -> None:
    """Send the process's output to `log_file`, learn its address in the cluster, and compute on one thread (of a CPU)
    unless OMP_NUM_THREADS says otherwise."""
    capture_output(log_file)
    configure_logging()
    set_node_address(ray.util.get_node_ip_address())
    # Two threads of one process fight over two cores; two processes of one thread do not.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
