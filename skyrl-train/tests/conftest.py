"""Tiny real things that many tests use: a model, a Ray cluster, the folder of real data."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads of one process fight over two cores

import pytest
import torch
from loguru import logger

from skyrl_train.utils.cpu_numerics import prepare_cpu
from skyrl_train_testing.object_store import ObjectStore, object_store

prepare_cpu()


@pytest.fixture(scope="session")
def run_script() -> Callable[..., str]:
    """`run_script("benchmarks/x.py", "--option")`: what a program of the repository prints; it must succeed."""

    def run(*command: str, timeout: float = 280.0) -> str:
        environment, root = os.environ | {"OMP_NUM_THREADS": "1"}, Path(__file__).parents[2]
        finished = subprocess.run(
            [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, timeout=timeout
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        return finished.stdout + finished.stderr

    return run


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a tiny model of an architecture in the table; made once."""

    @functools.cache
    def folder(name: str) -> str:
        from skyrl_train_testing.architectures import ARCHITECTURES

        return ARCHITECTURES[name].save(tmp_path_factory.mktemp(name))

    return folder


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the log, from level INFO on."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two layers and 64 words with random weights, as a folder."""
    from skyrl_train_testing.tiny_models import build_tiny_qwen3

    folder = tmp_path_factory.mktemp("models") / "tiny_qwen3"
    build_tiny_qwen3(hidden_size=32, scale=3.0, vocab_size=64, max_position_embeddings=128).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two layers with random weights and a tokenizer of one token a character, as a folder."""
    from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(folder)
    model = build_tiny_qwen3(hidden_size=32, vocab_size=len(tokenizer), max_position_embeddings=256)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def save_mixture() -> Callable[..., str]:
    """`save_mixture(folder, **config)` makes a Qwen3 of four experts in two layers with random weights there."""
    from skyrl_train_testing.tiny_models import build_tiny_mixture

    def save(folder: str | Path, **config: Any) -> str:
        build_tiny_mixture(**config).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An object store that answers to `s3://bucket`, in a process of its own."""
    with object_store(tmp_path_factory.mktemp("object_store") / "server.log") as store:
        yield store


@pytest.fixture
def bucket(s3: ObjectStore, request: pytest.FixtureRequest) -> str:
    """A URL in the object store, for one test."""
    return f"s3://bucket/{request.node.name}-{os.urandom(4).hex()}"


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A process group that is this process alone, until the end of the file. Inline runs share it, and with it torch's
    plans of sharded tensors, which take a quarter of the time of a run with a group of its own."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from skyrl_train.distributed.process_group import find_free_port, init_process_group
    from skyrl_train.orchestration.inline_launcher import model_thread
    from skyrl_train.utils.gpus import get_indexed_device

    init_process_group(
        rank=0,
        world_size=1,
        master_address="127.0.0.1",
        master_port=find_free_port(),
        device=get_indexed_device("cuda" if torch.cuda.is_available() else "cpu"),  # its group has a CPU's backend, too
        timeout_seconds=60,
    )
    yield
    model_thread().submit(_clear_sharding_prop_cache).result()  # they hold the group
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ray_cpu():
    """One Ray cluster on this machine for the whole session."""
    import ray

    from skyrl_train.utils.ray_cluster import LOCAL_CLUSTER, build_worker_environment

    os.environ.update(LOCAL_CLUSTER, RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    ray.init(
        num_cpus=64,  # groups of workers stay for other tests
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": build_worker_environment()},
        object_store_memory=512 << 20,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
