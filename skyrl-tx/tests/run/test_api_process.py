"""The server as a process: how it starts, what it serves, how it ends."""

import asyncio
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pyrage
import pytest
from starlette.testclient import TestClient
from tx_server import ServerProcess

from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.server import make_app
from skyrl_inspect.defaults import Defaults
from skyrl_inspect.explain.evidence import observe
from tx.errors import ConfigError
from tx.run.console import Console
from tx.tinker.api import serve
from tx.tinker.config import EngineConfig
from tx.tinker.http.api_keys import ApiKeys


def server_in(folder: Path, base_model: Path) -> ServerProcess:
    options = ("--base-model", str(base_model), "--served-model-name", "tiny", "--max-body-mb", "4")
    return ServerProcess(folder, *options, "--no-standby-engine", port=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServerProcess]:
    with server_in(tmp_path_factory.mktemp("server"), tiny_model) as server:
        yield server


def test_api_process_imports_no_torch():
    program = "import sys, tx.tinker.api, tx.run.main; print(*{'torch', 'transformers', 'ray'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert output.stdout.split() == []


def test_wrong_settings_end_server_with_plain_error():
    argv = [sys.executable, "-m", "tx.tinker.api", "--bse-model", "x"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr == "ConfigError: unknown option --bse-model; did you mean --base-model?\n"


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"base_model": "/nowhere/at/all"}, "no folder"),
        ({"base_model": "x", "host": "0.0.0.0"}, "--api-keys-file"),
        ({"host": "203.0.113.7", "api_keys_file": "keys"}, "cannot listen on 203.0.113.7"),
        ({"checkpoints_base": "/proc/nowhere"}, "checkpoints_base"),
        ({"database_url": "mysql://x/y"}, "(?i)database"),
    ],
)
async def test_impossible_settings_are_found_before_anything_starts(tmp_path, tiny_model, monkeypatch, settings, says):
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("anna tml-anna-key")
    base = {
        "base_model": str(tiny_model),
        "state_dir": tmp_path / "state",
        "checkpoints_base": "checkpoints",
        "port": 0,
    }
    with pytest.raises(ConfigError, match=says):
        await serve(EngineConfig(**base | settings))


@pytest.mark.process
def test_occupied_port_is_reported_before_startup(tmp_path, tiny_model, server):
    port = server.url.rsplit(":", 1)[1]
    argv = [sys.executable, "-m", "tx.tinker.api", "--base-model", str(tiny_model), "--port", port]
    ended = subprocess.run([*argv, "--state-dir", str(tmp_path / "x")], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, "choose another --port" in ended.stderr) == (2, True)


@pytest.mark.process
@pytest.mark.slow
def test_server_ends_in_order_and_soon_while_clients_wait(tmp_path, tiny_model):
    with server_in(tmp_path, tiny_model) as server:
        stop_while_a_client_polls(server)  # its engine is starting
        server.start()
        server.wait_until_listening()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            one = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}
            result_of(client, client.post("/api/v1/asample", json=one))
        stop_while_a_client_polls(server)


def stop_while_a_client_polls(server: ServerProcess) -> None:
    async def poll_and_stop() -> tuple[int, float, int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            request = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [5] * 8}]}, "num_samples": 64}
            request["sampling_params"] = {"max_tokens": 500, "stop": []}
            accepted = (await client.post("/api/v1/asample", json=request)).json()
            body = {"request_id": accepted["request_id"]}
            poll = asyncio.create_task(client.post("/api/v1/retrieve_future", json=body))
            await asyncio.sleep(0.2)
            started = time.monotonic()
            code = await asyncio.to_thread(server.stop)
            return code, time.monotonic() - started, (await poll).status_code

    code, seconds, status = asyncio.run(poll_and_stop())
    assert code == 0, server.log.read_text()
    assert status in (200, 408)
    assert seconds < 30  # 3 on a quiet machine, also while its engine is starting
    assert "Traceback" not in server.log.read_text()


@pytest.mark.process
def test_body_of_100_mb_is_refused_immediately(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for content in (b"x" * 100_000_000, (b"x" * 1_000_000 for _ in range(100))):
            headers = {"content-type": "application/x-protobuf"}
            answer = client.post("/api/v1/forward_backward", content=content, headers=headers)
            assert answer.status_code == 413
            assert "--max-body-mb" in answer.json()["detail"]
        assert client.get("/healthz").status_code == 200
    rss_mb = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[1]) / 1024
    assert rss_mb < 400


def result_of(client: httpx.Client, accepted: httpx.Response) -> dict:
    """Polls as clients do."""
    assert accepted.status_code == 200, accepted.text
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        answer = client.post("/api/v1/retrieve_future", json={"request_id": accepted.json()["request_id"]}, timeout=60)
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            return answer.json()
    raise AssertionError("no result")


def check_external_weights(client: httpx.Client, post: Callable[..., httpx.Response], model: str, adapter: bytes):
    """Weights saved for download equal the sampler's, plain or encrypted; seq 6 to 8."""
    identity, ssh = pyrage.x25519.Identity.generate(), "ssh-rsa AAAA"
    save = partial(post, "save_weights_external", model_id=model)
    refused = save(seq_id=6, path="private", age_encryption_recipients=[str(identity.to_public()), ssh])
    assert refused.status_code == 400
    assert "age_encryption_recipients[1] must be a public key" in refused.text
    recipients = [str(identity.to_public())]
    for seq, name, keys in ((7, "plain", None), (8, "private", recipients)):
        saved = result_of(client, save(seq_id=seq, path=name, age_encryption_recipients=keys, ttl_seconds=3600))
        assert saved == {"type": "save_weights_external", "path": f"tinker://{model}/external_weights/{name}"}
    checkpoints = f"/api/v1/training_runs/{model}/checkpoints"
    plain, private = (
        client.get(f"{checkpoints}/external_weights/{name}/external_weights_urls").json()["urls"]
        for name in ("plain", "private")
    )
    assert client.get(plain["adapter_model.safetensors"]).content == adapter
    assert set(private) == {f"{name}.age" for name in plain}
    assert pyrage.decrypt(client.get(private["adapter_model.safetensors.age"]).content, [identity]) == adapter
    listed = {one["checkpoint_id"]: one for one in client.get(checkpoints).json()["checkpoints"]}
    assert listed["external_weights/plain"]["checkpoint_type"] == "external"
    assert listed["external_weights/plain"]["expires_at"] is not None
    loaded = post("load_weights", session_id=model.split(":")[0], model_seq_id=1, path=saved["path"])
    assert loaded.status_code == 400
    assert "external weights can only be downloaded" in loaded.text
    assert client.delete(f"{checkpoints}/external_weights/private").is_success
    assert client.get(f"{checkpoints}/external_weights/private/external_weights_urls").status_code == 404


def check_damage_is_named(
    client: httpx.Client,
    post: Callable[..., httpx.Response],
    server: ServerProcess,
    model: str,
    sample: Callable[..., httpx.Response],
) -> None:
    """A flipped byte in a checkpoint is detected on load, sampling and download; seq 9 to 11."""
    saved = {}
    for seq, endpoint in ((9, "save_weights"), (10, "save_weights_for_sampler")):
        saved[endpoint] = result_of(client, post(endpoint, model_id=model, seq_id=seq, path="torn"))["path"]
    for file in (server.checkpoints / model).glob("*/torn@*/*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    download = f"/api/v1/training_runs/{model}/checkpoints/weights/torn"
    for accepted, file in (
        (post("load_weights", model_id=model, seq_id=11, path=saved["save_weights"], optimizer=True), "optimizer"),
        (sample(model_path=saved["save_weights_for_sampler"]), "adapter_model"),
        (client.get(client.get(f"{download}/archive").headers["location"]), "optimizer"),
        (client.get(f"{download}/external_weights_urls"), "optimizer"),
    ):
        if accepted.status_code == 200:
            asked = {"request_id": accepted.json()["request_id"]}
            accepted = client.post("/api/v1/retrieve_future", json=asked, timeout=60)
        assert f"{file}.safetensors is damaged (its sha256" in accepted.text
        assert str(server.folder) not in accepted.text


@pytest.mark.process
def test_user_trains_samples_and_downloads_adapter(server, tmp_path):
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def post(endpoint: str, **body) -> httpx.Response:
            return client.post(f"/api/v1/{endpoint}", json=body)

        session = post("create_session", tags=[], sdk_version="0.24.1").json()["session_id"]
        created = post(
            "create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config={"rank": 4, "seed": 1}
        )
        model = result_of(client, created)["model_id"]
        assert model == f"{session}:train:0"
        tokens = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}}
        datum = tokens | {"loss_fn_inputs": {"target_tokens": {"data": [6, 7, 8], "dtype": "int64"}}}
        batch = {"data": [datum], "loss_fn": "cross_entropy"}
        refused = post("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": -1})
        assert refused.status_code == 422  # and its seq is consumed: the next request continues
        first = result_of(client, post("forward_backward", model_id=model, seq_id=2, forward_backward_input=batch))
        assert len(first["loss_fn_outputs"][0]["logprobs"]["data"]) == 3
        result_of(client, post("optim_step", model_id=model, seq_id=3, adam_params={"learning_rate": 0.01}))
        second = result_of(client, post("forward", model_id=model, seq_id=4, forward_input=batch))
        assert second["metrics"]["loss:sum"] < first["metrics"]["loss:sum"]

        saved = result_of(client, post("save_weights_for_sampler", model_id=model, seq_id=5, path="mine"))
        assert saved["path"] == f"tinker://{model}/sampler_weights/mine"
        archive = client.get(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/mine/archive")
        assert archive.status_code == 302
        assert archive.headers["expires"]
        packed = client.get(archive.headers["location"])  # the signed URL needs no key
        with tarfile.open(fileobj=io.BytesIO(packed.content)) as tar:
            names = set(tar.getnames())
        assert {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"} <= names
        urls = client.get(
            f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/mine/external_weights_urls"
        ).json()
        assert json.loads(client.get(urls["urls"]["adapter_config.json"]).content)["r"] == 4
        assert client.get(archive.headers["location"] + "0").status_code == 403
        adapter = client.get(urls["urls"]["adapter_model.safetensors"]).content
        check_external_weights(client, post, model, adapter)

        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
        params = {"max_tokens": 4, "temperature": 0.0}
        sampled = result_of(
            client, post("asample", model_path=saved["path"], prompt=prompt, num_samples=2, sampling_params=params)
        )
        assert len(sampled["sequences"]) == 2
        text = client.post(
            "/oai/api/v1/completions",
            json={"model": saved["path"], "prompt": [5, 6], "max_tokens": 4, "temperature": 0},
        ).json()
        assert text["usage"]["completion_tokens"] == len(sampled["sequences"][0]["tokens"])
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "logprobs": True}
        choice = client.post("/oai/api/v1/chat/completions", json=chat).json()["choices"][0]
        assert choice["message"]["role"] == "assistant"
        assert len(choice["logprobs"]["content"]) <= 3

        check_damage_is_named(
            client, post, server, model, partial(post, "asample", prompt=prompt, sampling_params=params)
        )

        numbers = client.get("/metrics").text
        assert 'tx_models{tenant="local"} 1.0' in numbers

        processes = {process.role: process for process in observe(server.state / "runs" / "server").processes}
        assert set(processes) == {"server", "engine"}
        assert all(process.stacks for process in processes.values()), processes
        assert "the next call" in {wait.what for wait in processes["engine"].waits if not wait.ended}

        app = Console(server.state / "runs", ApiKeys(), server.url)
        with TestClient(app, base_url="http://127.0.0.1") as console:
            console.get("/", params={"token": app.token})
            listed = console.get("/playground/checkpoints").json()["checkpoints"]
            assert saved["path"] in {one["tinker_path"] for one in listed}
            asked = {"model": saved["path"], "prompt": "Hi", "max_tokens": 4, "temperature": 0, "n": 2}
            choices = console.post("/playground/completions", json=asked).json()["choices"]
            assert len(choices) == 2 and choices[0]["text"] == choices[1]["text"]
            assert (
                "no checkpoint"
                in console.post("/playground/completions", json=asked | {"model": "tinker://x/weights/y"}).text
            )

        # The same training, from a copy of the server's files alone.
        shutil.copytree(server.state / "runs", tmp_path / "copy")
        look_at_the_runs_in_the_dashboard(tmp_path / "copy", model, first["metrics"]["loss:sum"] / 3)


def look_at_the_runs_in_the_dashboard(folder: Path, model: str, loss: float) -> None:
    with TestClient(make_app(RunsFolder(folder), Defaults(), hosts=["testserver"])) as dashboard:
        runs = {row["name"]: row for row in dashboard.get("/api/runs").json()["runs"]}
        assert set(runs) == {"server", model}
        run = runs[model]
        assert (run["state"], run["step"], run["metric"]) == ("running", 1, "train/loss")
        assert run["curve"] == [[1], [pytest.approx(loss, rel=1e-4)]]
        asked = {"run": run["run"], "name": "trainer.log", "query": "checkpoint saved: tinker"}
        saved = [line.rpartition("/")[2] for _, line in dashboard.get("/api/log", params=asked).json()["hits"]]
        assert saved == ["mine", "plain", "private", "torn", "torn"]
        asked = {"run": "server", "name": "server.log", "query": "engine 1 is ready"}
        assert len(dashboard.get("/api/log", params=asked).json()["hits"]) == 1
        curves = {"run": "server", "name": ["server/sessions"]}
        assert dashboard.get("/api/curves", params=curves).json()["curves"]["server/sessions"][0] == [1]
