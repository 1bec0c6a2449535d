"""The protocol without the SDK: what it would never send, and what only a retry sends."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import httpx

from tx_conformance.checks import Violation, expect, shorten

PROTOBUF = "application/x-protobuf"
DONE_SECONDS = 60.0


def text(tokens: Sequence[int]) -> dict[str, Any]:
    """A model input as JSON."""
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def tensor(data: Sequence[float], dtype: str = "float32", shape: Sequence[int] | None = None) -> dict[str, Any]:
    return {"data": list(data), "dtype": dtype, "shape": [len(data)] if shape is None else list(shape)}


def text_datum(tokens: Sequence[int]) -> dict[str, Any]:
    """Predict each of tokens[1:], as JSON."""
    inputs = {"target_tokens": tensor(tokens[1:], "int64"), "weights": tensor([1.0] * (len(tokens) - 1))}
    return {"model_input": text(tokens[:-1]), "loss_fn_inputs": inputs}


class Wire:
    """One tenant's raw requests.

    Args:
        base_url: of the server, without `/api/v1`
        model: the base model's name
    """

    def __init__(self, base_url: str, api_key: str, model: str):
        self.base_url = base_url.rstrip("/")
        self.model_name = model
        self.http = httpx.Client(headers={"X-API-Key": api_key}, timeout=30, trust_env=False)
        self._counter = itertools.count()

    def call(self, method: str, path: str, body: object = None, **options: Any) -> httpx.Response:
        """Send one request. `path`: without the prefix `/api/v1/`; `body`: sent as JSON. A 429 response is retried
        after its delay, as clients do.
        """
        if body is not None:
            options["json"] = body
        for _ in range(20):
            answer = self.http.request(method, f"{self.base_url}/api/v1/{path}", **options)
            if answer.status_code != 429:
                return answer
            time.sleep(min(float(answer.headers.get("Retry-After", 1)), 5))
        raise Violation(f"{path} was answered 429 twenty times")

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return self.call("POST", path, body, **options)

    def answer(self, method: str, path: str, body: object = None) -> Any:
        """The JSON of a request that must succeed."""
        response = self.call(method, path, body)
        expect(response.status_code in (200, 202), f"{path}: {response.status_code} {shorten(response.text)}")
        return response.json()

    def accepted(self, response: httpx.Response) -> str:
        """The request id of something that was taken on."""
        expect(response.status_code in (200, 202), f"not accepted: {response.status_code} {shorten(response.text)}")
        return str(response.json()["request_id"])

    def poll(self, request_id: str, seconds: float = 45) -> httpx.Response | None:
        """Poll once; None: no response within `seconds`."""
        try:
            return self.post("retrieve_future", {"request_id": request_id}, timeout=seconds)
        except httpx.ReadTimeout:
            return None

    def outcome(self, request_id: str) -> dict[str, Any]:
        """Polls until the request is done; its result as JSON, which has `error` when it failed."""
        deadline = time.monotonic() + DONE_SECONDS
        while time.monotonic() < deadline:
            response = self.poll(request_id)
            if response is None or response.status_code == 408:
                continue
            expect(response.status_code == 200, f"poll: {response.status_code} {shorten(response.text)}")
            result = response.json()
            if result.get("type") != "try_again":
                return result
        raise Violation(f"not done after {DONE_SECONDS:.0f} s")

    def result(self, response: httpx.Response) -> dict[str, Any]:
        """Wait for the result of an accepted request, which must succeed."""
        result = self.outcome(self.accepted(response))
        expect("error" not in result, f"failed: {shorten(result)}")
        return result

    def waits(self, request_id: str, seconds: float = 1.5) -> bool:
        """Return True if the request is not finished after this time."""
        response = self.poll(request_id, seconds)
        return response is None or response.status_code == 408 or response.json().get("type") == "try_again"

    def session(self) -> str:
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"}
        return self.answer("POST", "create_session", body)["session_id"]

    def create_model(self, session_id: str, model_seq_id: int = 0, **changes: object) -> httpx.Response:
        body = {"session_id": session_id, "model_seq_id": model_seq_id, "base_model": self.model_name}
        lora = {"rank": 4, "seed": 7, "train_unembed": False, "train_mlp": True, "train_attn": True}
        return self.post("create_model", body | {"lora_config": lora, "type": "create_model"} | changes)

    def model(self, **changes: Any) -> str:
        """Create an adapter in a new session; return its id."""
        return self.result(self.create_model(self.session(), **changes))["model_id"]

    def unload(self, model_id: str) -> None:
        response = self.post("unload_model", {"model_id": model_id, "type": "unload_model"})
        if response.status_code == 200 and "request_id" in response.json():
            self.outcome(str(response.json()["request_id"]))

    def backward(
        self,
        model_id: str,
        seq: int,
        data: list[dict[str, Any]],
        loss: str = "cross_entropy",
        config: dict[str, Any] | None = None,
    ) -> httpx.Response:
        inputs = {"data": data, "loss_fn": loss} | ({"loss_fn_config": config} if config else {})
        return self.post("forward_backward", {"model_id": model_id, "seq_id": seq, "forward_backward_input": inputs})

    def step(self, model_id: str, seq: int, **adam: object) -> httpx.Response:
        params = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12} | adam
        return self.post(
            "optim_step", {"model_id": model_id, "seq_id": seq, "adam_params": params, "type": "optim_step"}
        )

    def save(self, model_id: str, seq: int, name: str | None, **changes: object) -> httpx.Response:
        body = {"model_id": model_id, "seq_id": seq, "type": "save_weights"} | ({"path": name} if name else {})
        return self.post("save_weights", body | changes)

    def save_for_sampler(self, model_id: str, seq: int, **changes: object) -> httpx.Response:
        body = {"model_id": model_id, "seq_id": seq, "type": "save_weights_for_sampler"}
        return self.post("save_weights_for_sampler", body | changes)

    def load(self, model_id: str, seq: int, path: str, optimizer: bool = False) -> httpx.Response:
        body = {"model_id": model_id, "seq_id": seq, "path": path, "optimizer": optimizer, "type": "load_weights"}
        return self.post("load_weights", body)

    def sampling_session(self, session_id: str, seq: int = 0, **changes: object) -> httpx.Response:
        body = {"session_id": session_id, "sampling_session_seq_id": seq, "type": "create_sampling_session"}
        return self.post("create_sampling_session", body | (changes or {"base_model": self.model_name}))

    def sample(
        self, prompt: Any, sampling_params: dict[str, object] | None = None, **changes: object
    ) -> httpx.Response:
        """`prompt`: tokens, or a model input. From the base model unless `changes` say otherwise."""
        params = {"max_tokens": 2, "seed": 1, "temperature": 1.0} | (sampling_params or {})
        body = {
            "prompt": prompt if isinstance(prompt, dict) else text(prompt),
            "sampling_params": params,
            "num_samples": 1,
        }
        if not {"sampling_session_id", "model_path", "base_model"} & set(changes):
            body["base_model"] = self.model_name
        return self.post("asample", body | {"type": "sample"} | changes)

    def logprobs(self, model_id: str, seq: int, tokens: Sequence[int]) -> list[float]:
        """Log p of tokens[1:], by a forward-backward of no weight."""
        silent = text_datum(tokens)
        silent["loss_fn_inputs"]["weights"] = tensor([0.0] * (len(tokens) - 1))
        result = self.result(self.backward(model_id, seq, [silent]))
        return result["loss_fn_outputs"][0]["logprobs"]["data"]

    def fresh(self, name: str) -> str:
        """Return a unique name."""
        return f"{name}-{time.time_ns() % 10**9}-{next(self._counter)}"
