"""The shared key of servers started elsewhere: the door, the trainer's side, and the command that starts a server."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from loguru import logger
from pretenders import like_vllm, serving, spelled
from pydantic import SecretStr
from server_process import KEY
from transformers import AutoTokenizer

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.engines import read_remote_api_key, start_engines
from skyrl_train.entrypoints.serve_vllm import build_server_command
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.remote.key_guard import KeyGuard
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine
from skyrl_train.inference_engines.remote.vllm import start_command
from skyrl_train_testing.engine_conformance.model import VOCABULARY

WRONG = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}]


@pytest.fixture
def guarded(served_model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The routes of a vLLM server behind the guard, which has `KEY`."""
    monkeypatch.setenv("SKYRL_ENGINE_API_KEY", KEY)
    app = KeyGuard(like_vllm(served_model, vocab_size=len(VOCABULARY), tokenize=spelled))
    monkeypatch.delenv("SKYRL_ENGINE_API_KEY")
    return app


@pytest.fixture
def log() -> Any:
    lines: list[str] = []
    number = logger.add(lines.append, diagnose=True)
    yield lines
    logger.remove(number)


def config(url: str, model: str, **generator: Any) -> SkyRLConfig:
    engines = {"run_engines_locally": False, "remote_inference_engine_urls": [url], "model_name": model}
    return SkyRLConfig.from_dict({"generator": engines | generator})


async def test_routes_require_key(guarded: Any) -> None:
    transport = httpx.ASGITransport(guarded, client=("127.0.0.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for headers in WRONG:
            answer = await client.get("/server_info", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await client.get("/health", headers=headers)).status_code == 200
        assert (await client.get("/server_info", headers={"Authorization": f"Bearer {KEY}"})).status_code == 200


@pytest.mark.parametrize("address, status", [("127.0.0.1", 200), ("::1", 200), ("10.0.0.9", 401)])
async def test_server_without_key_serves_loopback_only(
    served_model: str, monkeypatch: pytest.MonkeyPatch, address: str, status: int
) -> None:
    monkeypatch.delenv("SKYRL_ENGINE_API_KEY", raising=False)
    app = KeyGuard(like_vllm(served_model, vocab_size=len(VOCABULARY), tokenize=spelled))
    transport = httpx.ASGITransport(app, client=(address, 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.get("/server_info")).status_code == status


def test_trainer_reads_server_key_from_file_or_environment(
    guarded: Any, served_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    file, wrong = tmp_path / "key", tmp_path / "wrong"
    file.write_text(f"{KEY}\n")
    wrong.write_text("another")
    with serving(guarded) as url:
        with pytest.raises(ConfigError, match=r"requires a key, but none is set .*_api_key_file, or set SKYRL_ENGINE"):
            start_engines(config(url, served_model), tokenizer)
        with pytest.raises(ConfigError, match="key"):
            start_engines(config(url, served_model, remote_inference_engine_api_key_file=str(wrong)), tokenizer)
        cfg = config(url, served_model, remote_inference_engine_api_key_file=str(file))
        [engine] = start_engines(cfg, tokenizer).engines
        monkeypatch.setenv("SKYRL_ENGINE_API_KEY", KEY)
        start_engines(config(url, served_model), tokenizer)

        logger.warning(f"{engine} {vars(engine)} {vars(engine._server)} {cfg}")
    assert not any(KEY in line for line in log)
    assert not any("does not require a key" in line for line in log)


def test_server_without_access_control_logs_warning(served_model: str, log: list[str]) -> None:
    with serving(like_vllm(served_model, vocab_size=len(VOCABULARY), tokenize=spelled)) as url:
        RemoteInferenceEngine(url, served_model)
        assert log == []  # on loopback, and no key set: as the documented command does
        RemoteInferenceEngine(url, served_model, api_key=SecretStr(KEY))
    assert any("does not require a key on its control routes" in line for line in log)


@pytest.mark.parametrize("text", [None, "", "two words", "naïve"])
def test_empty_key_file_raises_config_error(text: str | None, served_model: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
    cfg = config("127.0.0.1:1", served_model, remote_inference_engine_api_key_file=str(file))
    with pytest.raises(ConfigError, match=r"generator\.remote_inference_engine_api_key_file=.* must") as raised:
        read_remote_api_key(cfg.generator)
    assert not text or text not in str(raised.value)


def test_server_command_requires_key_beyond_loopback(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    command, environment = build_server_command(["--model", "tiny", "--port", "8001"], {"HOME": "/"})
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-4:] == ["--model", "tiny", "--port", "8001"]
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and "SKYRL_ENGINE_API_KEY" not in environment
    for host in ("0.0.0.0", "10.0.0.7", "::", "example.org"):
        with pytest.raises(ConfigError, match=f"--host={host} .*--api-key-file"):
            build_server_command([f"--host={host}"], {})
        command, environment = build_server_command(["--host", host, "--api-key-file", str(file)], {})
        assert command[command.index("--host") + 1] == host
        assert environment["SKYRL_ENGINE_API_KEY"] == KEY and not any(KEY in word for word in command)
    assert build_server_command(["--host", "0.0.0.0"], {"SKYRL_ENGINE_API_KEY": KEY})


def test_suggested_command_has_key_for_remote_server() -> None:
    assert start_command("m", "http://127.0.0.1:8001") == (
        "python -m skyrl_train.entrypoints.serve_vllm --model m --port 8001"
    )
    assert start_command("m", "http://10.0.0.7:9").endswith("--port 9 --host 0.0.0.0 --api-key-file FILE")
