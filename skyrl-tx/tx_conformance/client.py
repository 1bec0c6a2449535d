"""Adapter for any version of the SDK, with plain numbers as inputs and outputs. Versions differ in which calls return
futures, in how the REST client is created, and in result types. Features are detected by inspection, not by version
number.
"""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker  # pyright: ignore[reportMissingImports]
from tinker import types  # pyright: ignore[reportMissingImports]

WAIT_SECONDS = 90.0

Tokens = Sequence[int]


def done(thing: Any, timeout: float = WAIT_SECONDS) -> Any:
    """Resolve the result of an SDK call: the value of a future, or the value itself where a version returns it
    directly."""
    result = getattr(thing, "result", None)
    return result(timeout) if callable(result) else thing


def tensor(values: object, dtype: str) -> Any:
    array = np.asarray(values, dtype=np.int64 if dtype == "int64" else np.float32)
    return types.TensorData(data=array.ravel().tolist(), dtype=dtype, shape=list(array.shape))  # pyright: ignore


def datum(tokens: Tokens, targets: object, **floats: object) -> Any:
    """`tokens` [N] in, `targets` [N] or [N, K] and whatever else the loss needs, each of that shape."""
    inputs = {"target_tokens": tensor(targets, "int64")} | {k: tensor(v, "float32") for k, v in floats.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def text_datum(tokens: Tokens, weights: object = None) -> Any:
    """Predict each of tokens[1:] from those before it. weights: [len(tokens) - 1], 1 if None."""
    weights = np.ones(len(tokens) - 1) if weights is None else weights
    return datum(tokens[:-1], list(tokens[1:]), weights=weights)


@dataclass(frozen=True)
class Pass:
    """Result of a forward or forward-backward pass."""

    logprobs: list[np.ndarray]
    """A datum: [N] or [N, K]"""
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        return self.metrics["loss:sum"]

    @classmethod
    def of(cls, output: Any) -> "Pass":
        return cls([array(one["logprobs"]) for one in output.loss_fn_outputs], dict(output.metrics))


def array(data: Any) -> np.ndarray:
    values = np.asarray(data.data, dtype=np.float64)
    return values.reshape(data.shape) if data.shape is not None else values


class AdapterHandle:
    """A training client."""

    def __init__(self, client: Any):
        self.client = client

    @property
    def id(self) -> str:
        return self.client.model_id

    def submit(self, data: list[Any], loss: str = "cross_entropy", config: dict[str, float] | None = None) -> Any:
        """Submit a forward-backward without waiting."""
        return self.client.forward_backward(data, loss, config)

    def backward(self, data: list[Any], loss: str = "cross_entropy", config: dict[str, float] | None = None) -> Pass:
        return Pass.of(done(self.submit(data, loss, config)))

    def forward(self, data: list[Any], loss: str = "cross_entropy", config: dict[str, float] | None = None) -> Pass:
        return Pass.of(done(self.client.forward(data, loss, config)))

    def logprobs(self, *texts: Tokens) -> list[np.ndarray]:
        """A text: [len - 1], log p of each token but the first. Changes nothing."""
        return self.forward([text_datum(text) for text in texts]).logprobs

    def submit_step(self, **adam: float) -> Any:
        return self.client.optim_step(types.AdamParams(**adam))  # pyright: ignore

    def step(self, **adam: float) -> dict[str, float]:
        return dict(done(self.submit_step(**adam)).metrics or {})

    def info(self) -> Any:
        return done(self.client.get_info())

    def save(self, name: str, **options: object) -> str:
        return done(self.client.save_state(name, **options)).path

    def load(self, path: str, optimizer: bool = False) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions would rather make a new client
            load = self.client.load_state_with_optimizer if optimizer else self.client.load_state
            done(load(path))

    def save_for_sampler(self, name: str) -> str:
        return done(self.client.save_weights_for_sampler(name)).path

    def sampler(self) -> "SamplerHandle":
        """Create an unnamed sampler of the present weights."""
        return SamplerHandle(done(self.client.save_weights_and_get_sampling_client()))


@dataclass(frozen=True)
class Sampled:
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


@dataclass(frozen=True)
class SampleResult:
    """Result of a sample request."""

    samples: list[Sampled]
    prompt_logprobs: list[float | None] | None
    topk: list[list[tuple[int, float]] | None] | None = field(repr=False)

    @property
    def tokens(self) -> list[list[int]]:
        return [sample.tokens for sample in self.samples]


class SamplerHandle:
    """A sampling client."""

    def __init__(self, client: Any):
        self.client = client

    def submit(
        self, prompt: Tokens, n: int = 1, *, prompt_logprobs: bool = False, topk: int = 0, **params: object
    ) -> Any:
        """Submit a sample request without waiting; `read` reads its result."""
        return self.client.sample(
            types.ModelInput.from_ints(list(prompt)),
            n,
            types.SamplingParams(**params),
            include_prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk,
        )

    def ask(self, prompt: Tokens, n: int = 1, **options: Any) -> SampleResult:
        return read(self.submit(prompt, n, **options))

    def logprobs(self, prompt: Tokens) -> list[float | None]:
        """[len(prompt)], None first."""
        return list(done(self.client.compute_logprobs(types.ModelInput.from_ints(list(prompt)))))


def read(future: Any) -> SampleResult:
    response = done(future)
    samples = [Sampled(list(s.tokens), list(s.logprobs or []), str(s.stop_reason)) for s in response.sequences]
    topk = response.topk_prompt_logprobs
    pairs = None if topk is None else [None if at is None else [(int(t), float(p)) for t, p in at] for at in topk]
    return SampleResult(samples, response.prompt_logprobs, pairs)


class Service:
    """A service client: one session of one tenant.

    Args:
        base_url: of the server, without `/api/v1`
        api_key: must begin with `tml-` for the SDK
    """

    def __init__(self, base_url: str, api_key: str, **options: object):
        self.client = tinker.ServiceClient(base_url=base_url, api_key=api_key, **options)
        self.base_url, self.api_key = base_url, api_key

    def adapter(self, model: str, **lora: object) -> AdapterHandle:
        return AdapterHandle(done(self.client.create_lora_training_client(model, **lora)))

    def resume(self, path: str, optimizer: bool = False) -> AdapterHandle:
        """A new adapter that begins as a saved one."""
        name = "create_training_client_from_state" + ("_with_optimizer" if optimizer else "")
        return AdapterHandle(done(getattr(self.client, name)(path)))

    def sampler(self, path: str | None = None, base_model: str | None = None) -> SamplerHandle:
        return SamplerHandle(done(self.client.create_sampling_client(model_path=path, base_model=base_model)))

    def rest(self) -> Any:
        rest_client: Any = getattr(tinker, "RestClient", None)
        if rest_client is not None and "base_url" in inspect.signature(rest_client.__init__).parameters:
            return rest_client(base_url=self.base_url, api_key=self.api_key)
        return self.client.create_rest_client()

    def model_names(self) -> list[str | None]:
        rest = self.rest()
        owner = rest if hasattr(rest, "get_server_capabilities") else self.client
        return [model.model_name for model in done(owner.get_server_capabilities()).supported_models]
