"""Server under test: its model, tokens and new adapters."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from tx_conformance.checks import Skip, Violation, expect
from tx_conformance.client import AdapterHandle, Service, text_datum
from tx_conformance.wire import Wire

GENTLE_NATS = 0.1
SOFT_EPS = 1e6
"""Epsilon of Adam so far above any gradient that the first step is plain gradient descent: lr * g / (|g| + eps) = (lr /
eps) * g."""


@dataclass(frozen=True)
class Target:
    """Address and model of the server under test.

    Attributes:
        second_key: another tenant's key
        tokenizer: a folder or hub name; None: what the server says
        vocab_size: token ids below it are safe to send; None: the tokenizer's
    """

    base_url: str
    model: str
    api_key: str = "tml-contract"
    second_key: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None


class ServerUnderTest:
    """Shared by all checks of a run; adapters a check made are unloaded when it ends."""

    def __init__(self, target: Target):
        self.target = target
        self.wire = Wire(target.base_url, target.api_key, target.model)
        self._made: list[str] = []

    @functools.cached_property
    def service(self) -> Service:
        return Service(self.target.base_url, self.target.api_key)

    def adapter(self, **lora: object) -> AdapterHandle:
        """A new one. Same seed, same weights; no `lm_head`, which models with tied embeddings cannot train."""
        lora = {"rank": 4, "seed": 7, "train_unembed": False} | lora
        return self.keep(self.service.adapter(self.target.model, **lora))

    def keep(self, adapter: AdapterHandle) -> AdapterHandle:
        self._made.append(adapter.id)
        return adapter

    def model(self, **changes: object) -> str:
        """A new adapter made without the SDK; its id."""
        model_id = self.wire.model(**changes)
        self._made.append(model_id)
        return model_id

    def clean(self) -> None:
        made, self._made = self._made, []
        for model_id in made:
            self.wire.unload(model_id)

    @functools.cached_property
    def tokenizer(self) -> Any:
        name = self.target.tokenizer
        try:
            if name is None:
                return self.adapter().client.get_tokenizer()
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(name)
        except Exception as error:  # a missing tokenizer skips checks rather than failing them
            raise Skip(f"no tokenizer: {type(error).__name__}: {error}") from error

    @functools.cached_property
    def num_tokens(self) -> int:
        """Token ids below it may be sent."""
        if self.target.vocab_size:
            return self.target.vocab_size
        try:
            return len(self.tokenizer)
        except Skip:
            return 100

    def text(self, length: int, seed: int = 0) -> list[int]:
        """Random tokens, the same for the same seed."""
        draw = np.random.default_rng(seed * 1000 + length)
        return draw.integers(min(4, self.num_tokens - 1), min(self.num_tokens, 5000), size=length).tolist()

    @functools.cached_property
    def max_context(self) -> int:
        for model in self.wire.answer("GET", "get_server_capabilities")["supported_models"]:
            if model.get("model_name") == self.target.model and model.get("max_context_length"):
                return int(model["max_context_length"])
        raise Skip("the server does not say how long its context is")

    @functools.cached_property
    def gentle(self) -> dict[str, float]:
        """Adam made plain descent (see SOFT_EPS), with a rate at which one step on `self.lesson` raises its log-prob
        by about GENTLE_NATS: small enough to be nearly linear, large enough to be seen through rounding."""
        rate, adapter = 1e-4, self.adapter()
        before = float(np.sum(adapter.logprobs(self.lesson)[0]))
        for _ in range(12):
            probe = self.adapter()
            probe.backward([text_datum(self.lesson)])
            probe.step(learning_rate=rate * SOFT_EPS, eps=SOFT_EPS)
            gain = float(np.sum(probe.logprobs(self.lesson)[0])) - before
            if GENTLE_NATS / 3 <= gain <= GENTLE_NATS * 3:
                break
            rate *= min(max(GENTLE_NATS / max(gain, 1e-3), 0.05), 50)
        expect(
            GENTLE_NATS / 10 <= gain <= GENTLE_NATS * 10, f"no rate found at which a step learns a little: {gain:.3g}"
        )
        return {"learning_rate": rate * SOFT_EPS, "eps": SOFT_EPS}

    @functools.cached_property
    def small_rate(self) -> float:
        """A learning rate at which one step of Adam itself on the lesson is small enough to be nearly linear."""
        rate = 1e-3
        for _ in range(8):
            probe = self.adapter()
            probe.backward([text_datum(self.lesson)])
            probe.step(learning_rate=rate)
            if 0 < self.gain(probe) <= 2 * GENTLE_NATS:
                return rate
            rate /= 4
        raise Violation("no learning rate found at which a step of Adam is small")

    @functools.cached_property
    def lesson(self) -> list[int]:
        """Tokens that adapters learn."""
        return self.text(17, seed=1)

    def gain(self, adapter: AdapterHandle, before: np.ndarray | None = None) -> float:
        """Measure the gain in log-prob of the lesson over the base model, in nats."""
        now = float(np.sum(adapter.logprobs(self.lesson)[0]))
        return now - float(np.sum(self.base_logprobs if before is None else before))

    @functools.cached_property
    def base_logprobs(self) -> np.ndarray:
        """Log-probs of the lesson, [16], under an untrained adapter."""
        return self.adapter().logprobs(self.lesson)[0]
