"""The same model in plain transformers: what the log-probs should be.

Shapes: P tokens of a prompt, R of its answer, V words.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from skyrl_train.models.transformers_names import find_cache_argument, get_cache

Weights = Mapping[str, torch.Tensor]


class Reference:
    """A model on the CPU in float32, its weights rounded as the engine's are.

    Args:
        model_path: the engine's model.
        dtype: what the engine computes in.
    """

    def __init__(self, model_path: str, dtype: torch.dtype, *, trust_remote_code: bool = False):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="eager"
        )
        self.dtype = dtype
        self.model: Any = loaded.float().eval().requires_grad_(False)
        self.original: dict[str, torch.Tensor] = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }
        """Parameters by name; tied ones once."""

    def changed(self, seed: int, scale: float = 0.3) -> dict[str, torch.Tensor]:
        """Other weights: each parameter plus noise of `scale` times its own spread, in the engine's precision."""
        draw = torch.Generator().manual_seed(seed)
        return {
            name: (value + scale * _compute_spread(value) * torch.randn(value.shape, generator=draw))
            .to(self.dtype)
            .float()
            for name, value in self.original.items()
        }

    @contextmanager
    def holding(self, weights: Weights | None) -> Iterator[None]:
        """Set these parameters for the block (None: the original ones)."""
        self._take(weights or self.original)
        try:
            yield
        finally:
            self._take(self.original)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), V], after each token."""
        return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    def answer_logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """[R, V], those that each token of the answer was drawn from."""
        return self.logits(prompt + answer)[len(prompt) - 1 : len(prompt) + len(answer) - 1]

    def log_probs(self, prompt: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[R] log softmax(logits / temperature) at the answer's tokens."""
        return at(self.answer_logits(prompt, answer) / temperature, answer)

    def prompt_log_probs(self, prompt: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[P - 1], of every token of a prompt but the first."""
        return at(self.logits(prompt)[:-1] / temperature, prompt[1:])

    def log_probs_across(
        self, prompt: list[int], answer: list[int], num_old: int, old: Weights | None, new: Weights | None
    ) -> torch.Tensor:
        """[R] where the weights changed after the first `num_old` (at least one) tokens of the answer, and keys and
        values of what was computed before stay.

        The last of the old tokens is read by the new weights: its keys are computed when the next token is.
        """
        logits = self._logits_across(prompt + answer, len(prompt) + num_old - 1, old, new)
        return at(logits[len(prompt) - 1 : -1], answer)

    def over_old_keys(self, prompt: list[int], answer: list[int], new: Weights | None) -> torch.Tensor:
        """Compute log-probs [R] of a response by the new weights after a prompt with keys of the old weights (except
        the last token): the result of a stale prefix cache.
        """
        return at(self._logits_across(prompt + answer, len(prompt) - 1, None, new)[len(prompt) - 1 : -1], answer)

    @torch.inference_mode()
    def _logits_across(self, ids: list[int], num_read: int, old: Weights | None, new: Weights | None) -> torch.Tensor:
        """[len(ids), V]: the first `num_read` tokens are read by the old weights, the others by the new ones."""
        rows = torch.tensor([ids])
        with self.holding(old):
            before = self.model(rows[:, :num_read], use_cache=True)
        with self.holding(new):
            held = {find_cache_argument(self.model.forward): get_cache(before)}
            after = self.model(rows[:, num_read:], use_cache=True, **held)
        return torch.cat([before.logits, after.logits], dim=1)[0]

    def _take(self, weights: Weights) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                parameters[name].copy_(value)


def at(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """log softmax(logits) at one id a row. [N, V], N ids -> [N]"""
    return logits.double().log_softmax(-1).gather(1, torch.tensor(ids, dtype=torch.long)[:, None])[:, 0].float()


def _compute_spread(value: torch.Tensor) -> float:
    spread = float(value.std()) if value.numel() > 1 else 0.0
    return spread or 0.1  # norms start as all ones
