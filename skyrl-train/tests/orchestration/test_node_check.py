"""Proof that all nodes see the same files. Two nodes are two folders here: the second has its paths below another."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.orchestration.node_check import Paths, differences, get_response_path, paths_of, problems_of, view_of
from skyrl_train.utils.storage import location, replace_file


def node(root: Path, *, token: str | None = "token", weights: int = 10, config: str = "{}") -> Paths:
    """Files of one node: a run folder with the driver's token or without, and a model."""
    run, model = root / "run", root / "model"
    run.mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text(config)
    (model / "model.safetensors").write_bytes(b"x" * weights)
    if token is not None:
        (run / "token").write_text(token)
    return Paths({"trainer.run_dir": run / "token"}, {"trainer.policy.model.path": model})


def problems(driver: Paths, other: Paths) -> list[str]:
    """Return the driver's findings about the other node."""
    there = view_of(other, "id", "node-b")
    return problems_of(view_of(driver, "own", "node-a"), there, driver, "id")


def test_node_with_same_folder_has_no_problems(tmp_path: Path):
    driver = node(tmp_path)
    assert problems(driver, driver) == []
    assert get_response_path(driver.tokens["trainer.run_dir"], "id").is_file()


def test_node_with_different_run_folder_is_named(tmp_path: Path):
    driver, other = node(tmp_path / "a"), node(tmp_path / "b", token=None)
    run = tmp_path / "a" / "run"
    assert problems(driver, other) == [
        f"node node-b has a different folder, or none, at trainer.run_dir={run} than node node-a"
    ]


def test_copied_token_is_rejected(tmp_path: Path):
    """The node reads the token, but its answer does not arrive: a snapshot of the folder, say."""
    [problem] = problems(node(tmp_path / "a"), node(tmp_path / "b"))
    assert "has a different folder, or none, at trainer.run_dir" in problem


def test_node_without_write_access_is_named_with_reason(tmp_path: Path):
    driver = node(tmp_path)
    get_response_path(driver.tokens["trainer.run_dir"], "id").mkdir()  # nothing can be written there
    [problem] = problems(driver, driver)
    assert problem.startswith(f"node node-b cannot write into trainer.run_dir={tmp_path / 'run'}: ")


@pytest.mark.parametrize(
    "other, words",
    [
        ({"weights": 9}, "model.safetensors: 9 bytes there, 10 bytes here"),
        ({"config": "[]"}, "config.json: 2 bytes, sha256 4f53cda18c2b there, 2 bytes, sha256 44136fa355b3 here"),
    ],
)
def test_different_model_is_named_with_file(tmp_path: Path, other: dict, words: str):
    driver = node(tmp_path / "a")
    there = view_of(node(tmp_path / "b", **other), "id", "node-b")
    [problem] = differences(view_of(driver, "own", "node-a").models, there.models, driver.models, there.node)
    assert (
        problem == f"node node-b sees different files at trainer.policy.model.path={tmp_path / 'a' / 'model'}: {words}"
    )


def test_missing_model_is_named(tmp_path: Path):
    driver = node(tmp_path / "a")
    here = view_of(driver, "own", "node-a")
    missing = view_of(Paths(models={"trainer.policy.model.path": tmp_path / "nothing"}), "id", "node-b")
    line = f"node node-b cannot see trainer.policy.model.path={tmp_path / 'a' / 'model'}"
    assert differences(here.models, missing.models, driver.models, "node-b") == [line]


def test_checked_paths_are_local_paths_from_settings(tmp_path: Path, tiny_model: str):
    data = tmp_path / "data.jsonl"
    data.write_text("{}")
    values = {
        "run_dir": str(tmp_path / "run"),
        "export_path": str(tmp_path / "elsewhere"),
        "policy": {"model": {"path": tiny_model}},
        "critic": {"model": {"path": "some/name-on-the-hub"}},
        "algorithm": {"use_kl_loss": True},
    }
    paths = paths_of(SkyRLConfig.from_dict({"trainer": values}), [str(data), "hub/name:train"], "abc")
    assert paths.tokens == {
        "trainer.run_dir": tmp_path / "run" / ".node_check_abc",  # the checkpoints are inside of it
        "trainer.export_path": tmp_path / "elsewhere" / ".node_check_abc",
    }
    assert paths.models == {
        "trainer.policy.model.path": Path(tiny_model),
        "trainer.ref.model.path": Path(tiny_model),
    }
    assert list(paths.data.values()) == [data]


def test_bucket_token_is_read_and_written_by_every_node(tmp_path: Path, tiny_model: str):
    """A node without credentials, or whose endpoint is another one, would fail in the first checkpoint."""
    values = {"run_dir": str(tmp_path), "ckpt_path": "memory://bucket/ckpts", "policy": {"model": {"path": tiny_model}}}
    paths = paths_of(SkyRLConfig.from_dict({"trainer": values}), [], "abc")
    assert list(paths.tokens) == ["trainer.run_dir", "trainer.ckpt_path"]
    for path in paths.tokens.values():
        replace_file(path, "token")
    try:
        here = view_of(paths, "own", "node-a")
        assert problems_of(here, view_of(paths, "id", "node-b"), paths, "id") == []
        elsewhere = {"trainer.ckpt_path": location("memory://other/.node_check_abc")}
        blind = replace(paths, tokens=paths.tokens | elsewhere)
        [problem] = problems_of(here, view_of(blind, "blind", "node-b"), paths, "blind")
        assert problem.startswith(
            "node node-b has a different folder, or none, at trainer.ckpt_path=memory://bucket/ckpts than node"
        )
    finally:
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


SCRIPT = """
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ |= dict(RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", RAY_AUTH_MODE="disabled")
import ray
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import ConfigError
from skyrl_train.utils.ray_cluster import build_worker_environment
from skyrl_train.orchestration.bundles import nodes_of_bundles, reserve_bundles
from skyrl_train.orchestration.node_check import check_nodes

folder = Path(sys.argv[1])
for name in ("runs", "runs of the other node"):
    (folder / name).mkdir()
cfg = SkyRLConfig.from_dict({"trainer": {"run_dir": str(folder / "runs" / "first")}})
ray.init(num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[2], log_to_driver=False, _node_ip_address="127.0.0.1",
         object_store_memory=100 << 20, runtime_env={"env_vars": build_worker_environment()})
address = ray.get_runtime_context().gcs_address
# `ray start` notes the cluster's address below /tmp/ray, where every program on the machine looks: hide that, too.
mount = "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray"
mount += f" && mount --bind '{folder}/runs of the other node' '{folder}/runs'"
start = f"exec '{sys.executable}' -m ray.scripts.scripts start --address={address} --num-cpus=1 --block"
start += " --node-ip-address=127.0.0.1 --dashboard-agent-listen-port=0 --object-store-memory=100000000"
with open(folder / "node.log", "w") as log:
    node = subprocess.Popen(["unshare", "-m", "bash", "-c", f"{mount} && {start}"], stdout=log, stderr=log,
                            start_new_session=True)
try:
    deadline = time.monotonic() + 120
    while sum(known["Alive"] for known in ray.nodes()) < 2:
        assert node.poll() is None and time.monotonic() < deadline, (folder / "node.log").read_text()
        time.sleep(0.2)
    group = reserve_bundles(2, "cpu", purpose="two ranks")
    assert len(set(nodes_of_bundles(group))) == 2
    try:
        asyncio.run(check_nodes(cfg, [], folder))
    except ConfigError as error:
        print("refused:", error)
    subprocess.run(["nsenter", "-m", "-t", str(node.pid), "umount", str(folder / "runs")], check=True)
    asyncio.run(check_nodes(cfg, [], folder))
    print("accepted")
    assert not list((folder / "runs" / "first").iterdir()), "tokens are removed"
finally:
    os.killpg(node.pid, signal.SIGKILL)
    ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_second_node_is_refused_until_run_folder_is_shared(tmp_path: Path):
    """The second node is a raylet in a mount namespace of its own, where another folder lies at the path."""
    namespace = ["unshare", "-m", "mount", "--bind", str(tmp_path), str(tmp_path)]
    if os.geteuid() != 0 or shutil.which("unshare") is None or subprocess.run(namespace).returncode != 0:
        pytest.skip("only root can give a process mounts of its own")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:  # paths of sockets are short
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), short]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.stdout.rstrip().endswith("accepted"), finished.stderr[-3000:]
    assert f"has a different folder, or none, at trainer.run_dir={tmp_path / 'runs' / 'first'}" in finished.stdout
