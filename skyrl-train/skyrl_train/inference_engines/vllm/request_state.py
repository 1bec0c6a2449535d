"""State of a request in vLLM: its tokens so far."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skyrl_train.inference_engines.base import StopReason, TopLogProbs
from skyrl_train.inference_engines.request import Completion, build_top_log_probs

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

UNLABELLED = "default"
"""vLLM's label of its initial weights (`vllm/v1/engine/core.py`), version 0."""


@dataclass(eq=False)
class RequestState:
    """State of one request, updated by `take` until `stop_reason` is set.

    Args:
        request_id: vLLM's name for the request; empty for one that never reached vLLM.
        lora_version: version of the request's adapter, if any; its tokens get this version.
        num_top: number of most likely tokens to return at each prompt position.
        num_answer_top: number of most likely tokens to return at each position of the completion.
    """

    request_id: str = ""
    lora_version: int | None = None
    num_top: int = 0
    num_answer_top: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """Most likely tokens and log-probs at each position, including the position's own token."""
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top: TopLogProbs | None = None
    weight_versions: list[int] = field(default_factory=list)
    num_cached_prompt_tokens: int | None = None
    stop_reason: StopReason | None = None
    withdrawn: bool = False
    """Cancelled before its first token to be sent again; this result is not returned."""

    @property
    def has_begun(self) -> bool:
        return bool(self.token_ids)

    def build_completion(self) -> Completion:
        return Completion(
            token_ids=self.token_ids,
            stop_reason=self.stop_reason or "abort",
            weight_versions=self.weight_versions,
            log_probs=self.log_probs,
            top=build_top_log_probs(self.top, self.num_answer_top) if self.num_answer_top else None,
            prompt_log_probs=self.prompt_log_probs,
            prompt_top=self.prompt_top,
            num_cached_prompt_tokens=self.num_cached_prompt_tokens,
        )

    def take(self, output: "RequestOutput") -> None:
        """Add new output of vLLM."""
        (completion,) = output.outputs
        self.num_cached_prompt_tokens = output.num_cached_tokens
        self.token_ids += completion.token_ids
        if completion.logprobs:
            log_probs = completion.logprobs[-len(completion.token_ids) :] if completion.token_ids else []
            self.log_probs += [
                position[token].logprob
                for position, token in zip(log_probs, completion.token_ids, strict=True)
                if position is not None  # permitted by vLLM's type; generated tokens always have one
            ]
            if self.num_answer_top:
                self.top += [
                    [(token, entry.logprob) for token, entry in position.items()] for position in log_probs if position
                ]
        if output.prompt_logprobs:
            tokens = output.prompt_token_ids or []
            self.prompt_log_probs = [
                position[token].logprob
                for position, token in zip(output.prompt_logprobs, tokens, strict=True)
                if position  # the first token has none
            ]
            if self.num_top:
                places = [
                    [(token, entry.logprob) for token, entry in position.items()]
                    for position in output.prompt_logprobs
                    if position
                ]
                self.prompt_top = build_top_log_probs(places, self.num_top)
        if output.finished:
            self._end(completion.finish_reason)
            self._get_label(completion.weight_versions or [])

    def _end(self, finish_reason: str | None) -> None:
        if finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM finished a request with {finish_reason!r}")
        self.stop_reason = finish_reason

    def _get_label(self, spans: list) -> None:
        if self.lora_version is not None:
            self.weight_versions = [self.lora_version] * len(self.token_ids)
            return
        self.weight_versions = [parse_version(span.version) for span in spans for _ in range(span.start, span.end)]
        if len(self.weight_versions) != len(self.token_ids):
            raise RuntimeError(
                f"vLLM reported the weight versions of {len(self.weight_versions)} of {len(self.token_ids)} tokens"
            )


def parse_version(label: str) -> int:
    """Convert vLLM's label to a version number."""
    return 0 if label == UNLABELLED else int(label)
