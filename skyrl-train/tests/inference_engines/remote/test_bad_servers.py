"""A URL that is not what the run needs is refused at the start, with what to do about it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse
from pretenders import forever, like_vllm, serving, something_else, spelled
from transformers import AutoTokenizer

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.errors import ConfigError, UnsupportedByEngine, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.remote.check import check_server
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine
from skyrl_train.weight_sync.base import WeightSyncInitInfo
from skyrl_train_testing.engine_conformance.model import VOCABULARY

SIZE = len(VOCABULARY)
ANSWER = {
    "choices": [
        {
            "token_ids": [5, 6],
            "finish_reason": "length",
            "logprobs": {"content": [{"logprob": -1.5}, {"logprob": -2.5}]},
            "weight_versions": [{"version": "default", "start": 0, "end": 2}],
        }
    ]
}


def connect(url: str, model: str, **timeouts: float) -> RemoteInferenceEngine:
    tokenizer = AutoTokenizer.from_pretrained(model)
    timeouts = {"request_timeout_seconds": 20.0, "control_timeout_seconds": 20.0} | timeouts
    return RemoteInferenceEngine(url, model, tokenizer=tokenizer, **timeouts)


def request(prompt: list[int], **params: object) -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=[prompt], sampling_params={"max_tokens": 2, **params})


def check(url: str, model: str) -> None:
    check_server(connect(url, model), AutoTokenizer.from_pretrained(model))


def test_check_accepts_valid_server(served_model: str) -> None:
    with serving(like_vllm(served_model, vocab_size=SIZE, tokenize=spelled)) as url:
        check(url, served_model)
        check(url.removeprefix("http://"), served_model)


@pytest.mark.parametrize("address", ["", "ftp://host:1", "http://", "http://[::1"])
def test_check_rejects_malformed_address(address: str, served_model: str) -> None:
    with pytest.raises(ConfigError, match=r"generator\.remote_inference_engine_urls"):
        connect(address, served_model)


def test_check_names_unreachable_server(served_model: str) -> None:
    port = find_free_port()
    with pytest.raises(WorkerError, match=f"127.0.0.1:{port} cannot be reached"):
        connect(f"127.0.0.1:{port}", served_model)


def test_check_rejects_server_without_engine_api(served_model: str) -> None:
    with serving(something_else()) as url, pytest.raises(ConfigError, match=f"{url} responds, but is neither a vLLM"):
        connect(url, served_model)


def test_check_suggests_fix_when_server_info_fails(served_model: str) -> None:
    app = like_vllm(served_model, vocab_size=SIZE, tokenize=spelled, dev_mode=False)
    app.get("/server_info")(lambda: JSONResponse({"error": {"message": "no 'splitlines'"}}, 500))
    with serving(app) as url, pytest.raises(ConfigError, match=r"no 'splitlines'(?s:.*)uv pip install pip"):
        connect(url, served_model)


def test_silent_server_times_out_at_deadline(served_model: str) -> None:
    app = something_else()
    app.get("/version")(forever)
    start = time.monotonic()
    with serving(app) as url, pytest.raises(WorkerError, match=f"{url} did not answer GET /version within 1 s"):
        connect(url, served_model, control_timeout_seconds=1.0)
    assert time.monotonic() - start < 10


def test_wrong_model_error_suggests_server_command(served_model: str) -> None:
    app = like_vllm("/models/llama-8b", vocab_size=SIZE, tokenize=spelled)
    with serving(app) as url, pytest.raises(ConfigError) as refusal:
        check(url, served_model)
    text = str(refusal.value)
    assert all(part in text for part in (url, "/models/llama-8b", served_model, f"--model {served_model}", "--port"))


def test_check_accepts_same_model_in_other_folder(served_model: str) -> None:
    elsewhere = f"/mnt/other/{Path(served_model).name}"
    with serving(like_vllm(elsewhere, vocab_size=SIZE, tokenize=spelled)) as url:
        check(url, served_model)


def test_check_detects_wrong_model_by_vocabulary_size(served_model: str) -> None:
    app = like_vllm("/models/llama-8b", served_name=served_model, vocab_size=128256, tokenize=spelled)
    with serving(app) as url, pytest.raises(ConfigError, match=rf"below 128256; the vocabulary .* has {SIZE}"):
        check(url, served_model)


def test_tokenizer_mismatch_error_shows_differing_text(served_model: str) -> None:
    def shifted(text: str) -> list[int]:
        return [(token + 1) % SIZE for token in spelled(text)]

    with (
        serving(like_vllm(served_model, vocab_size=SIZE, tokenize=shifted)) as url,
        pytest.raises(
            ConfigError, match=r"'Hello, world!' is \[1, 7, 14, 14, 17.* there and \[0, 6, 13, 13, 16.* here"
        ),
    ):
        check(url, served_model)


def test_check_detects_differing_special_token(served_model: str) -> None:
    def without_special(text: str) -> list[int]:
        return [0] * len(text) if text == "<eos>" else spelled(text)

    with (
        serving(like_vllm(served_model, vocab_size=SIZE, tokenize=without_special)) as url,
        pytest.raises(ConfigError, match="'<eos>' is"),
    ):
        check(url, served_model)


@pytest.mark.parametrize(
    ("missing", "named"),
    [({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"), ({"scale_out": False}, "--enable-scale-out")],
)
def test_missing_server_flag_error_names_flag(missing: dict[str, bool], named: str, served_model: str) -> None:
    app = like_vllm(served_model, vocab_size=SIZE, tokenize=spelled, **missing)
    with serving(app) as url, pytest.raises(ConfigError, match=f"start it with {named}"):
        connect(url, served_model)


async def test_server_without_extension_rejects_unsupported_requests(served_model: str) -> None:
    app = like_vllm(served_model, vocab_size=SIZE, tokenize=spelled, generate=lambda: ANSWER)
    with serving(app) as url:
        engine = connect(url, served_model)
        output = await engine.generate_batch(request([3, 4]))
        assert output["response_ids"] == [[5, 6]]
        assert output["response_logprobs"] == [[-1.5, -2.5]]
        assert output["weight_versions"] == [[0, 0]]
        with pytest.raises(UnsupportedByEngine, match=r"raw_logprobs.*--worker-extension-cls"):
            await engine.generate_batch(request([3, 4], temperature=0.7))
        with pytest.raises(UnsupportedByEngine, match="shared_memory"):
            await engine.init_weight_update_communicator(WeightSyncInitInfo(transport="shared_memory"))
        await engine.teardown()


async def test_unanswered_request_times_out_at_deadline(served_model: str) -> None:
    app = like_vllm(served_model, vocab_size=SIZE, tokenize=spelled, generate=forever)
    with serving(app) as url:
        engine = connect(url, served_model, request_timeout_seconds=0.5)
        with pytest.raises(WorkerError, match=r"generator\.request_timeout_seconds"):
            await engine.generate_batch(request([3, 4]))
        await engine.teardown()


@pytest.mark.slow
async def test_server_crash_during_request_is_named_then_unreachable(served_model: str) -> None:
    """A process of its own, which ends at the first request."""
    port = find_free_port()
    script = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "import time\nfrom pretenders import die, like_vllm, serving\n"
        f"app = like_vllm({served_model!r}, vocab_size={SIZE}, tokenize=lambda text: [], generate=die)\n"
        f"with serving(app, {port}): print('up', flush=True); time.sleep(300)"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        engine = connect(f"127.0.0.1:{port}", served_model)
        with pytest.raises(WorkerError, match=f"127.0.0.1:{port} ended the connection during POST"):
            await engine.generate_batch(request([3, 4]))
        server.wait(10)
        with pytest.raises(WorkerError, match=r"cannot be reached|ended the connection"):
            await engine.check_health()
        await engine.teardown()
    finally:
        server.kill()
        server.communicate()
