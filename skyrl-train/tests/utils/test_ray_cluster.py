"""Environment variables that travel from the driver to every process of a run."""

import re
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_train.config import SkyRLConfig
from skyrl_train.env_vars import FORWARDED_NAMES, FORWARDED_PREFIXES, NOT_FORWARDED, forwarded_environment
from skyrl_train.utils.ray_cluster import build_worker_environment, start_ray, warn_of_few_cpus

INSTALL = Path(__file__).parents[3] / "INSTALL.md"


def test_communication_settings_are_forwarded_but_machine_facts_are_not():
    travel = {
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_TOKEN": "secret",
        "WANDB_API_KEY": "secret",
        "https_proxy": "http://proxy:3128",
    }
    stay = {
        "CUDA_VISIBLE_DEVICES": "0",
        "VLLM_HOST_IP": "10.0.0.1",
        "NCCL_HOSTID": "a",
        "PATH": "/bin",
        "HOSTNAME": "a",
        "SKYRL_ENDPOINT_API_KEY": "secret",
        "MY_NCCL_DEBUG": "INFO",
    }
    assert forwarded_environment(travel | stay) == travel


def test_workers_receive_forwarded_variables(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    environment = build_worker_environment()
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["GLIBC_TUNABLES"].startswith("glibc.malloc.trim_threshold=")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert build_worker_environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


def test_install_page_lists_forwarded_variables():
    [paragraph] = [part for part in INSTALL.read_text().split("\n\n") if part.startswith("Environment variables")]
    named = set(re.findall(r"`([A-Z_]+)`", paragraph))
    assert named == {*FORWARDED_PREFIXES, *FORWARDED_NAMES, *NOT_FORWARDED}


def test_more_ranks_than_cpus_cause_warning(log):
    cfg = SkyRLConfig()
    cfg.trainer.placement.device = "cpu"
    for ranks, num_warnings in ((1, 0), (100_000, 1)):
        cfg.trainer.placement.policy_num_gpus_per_node = ranks
        warn_of_few_cpus(cfg)
        assert sum("policy_num_gpus_per_node" in line for line in log) == num_warnings


@pytest.mark.parametrize(
    ("errors", "num_starts", "is_raised"),
    [
        (["The current node timed out during startup."], 2, False),
        (["The current node timed out during startup."] * 2, 2, True),
        (["no permission"], 1, True),
    ],
)
def test_ray_is_started_again_after_timeout(
    monkeypatch: pytest.MonkeyPatch, errors: list[str], num_starts: int, is_raised: bool
):
    starts: list[dict[str, Any]] = []

    def start(**settings: Any) -> None:
        starts.append(settings)
        if len(starts) <= len(errors):
            raise Exception(errors[len(starts) - 1])
        raise StopIteration  # started: what follows needs a cluster

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = SkyRLConfig()
    cfg.trainer.placement.device = "cpu"
    with pytest.raises(Exception, match=errors[-1]) if is_raised else pytest.raises(StopIteration):
        start_ray(cfg)
    assert len(starts) == num_starts and starts[0]["address"] == "local"
