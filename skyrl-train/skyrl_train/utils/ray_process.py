"""Preparation of every Ray process of a run."""

import ray

from skyrl_gym.waits import report_as
from skyrl_train.utils.cpu_numerics import prepare_cpu
from skyrl_train.utils.nodes import set_node_address
from skyrl_train.utils.process_log import capture_output, configure_logging


def prepare_process(log_file: str, name: str) -> None:
    """Redirect the process's output to `log_file`, record its waits under its name, get its address in the cluster, and
    configure its CPU."""
    capture_output(log_file)
    report_as(name, log=log_file)
    configure_logging()
    set_node_address(ray.util.get_node_ip_address())
    prepare_cpu()
