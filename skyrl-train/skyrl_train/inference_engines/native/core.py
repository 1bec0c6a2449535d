"""Continuous batching: requests join and leave at every step. Synchronous; knows no thread, asyncio or Ray."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.base import StopReason
from skyrl_train.inference_engines.native.attention import KEY_BLOCK, MIN_ROWS, VECTOR, AttentionStep, round_up
from skyrl_train.inference_engines.native.cache import SlotCache
from skyrl_train.inference_engines.native.lora import Loras
from skyrl_train.inference_engines.native.requests import Completion, Request
from skyrl_train.inference_engines.native.rows import RowTable
from skyrl_train.inference_engines.native.sampling import sample, uniforms
from skyrl_train.inference_engines.native.stop_strings import Decode
from skyrl_train.models.scoring import logit_rule
from skyrl_train.models.token_log_probs import token_log_probs

PROMPT_SCORE_CHUNK = 256
"""Tokens of a prompt whose logits are in memory at a time, where its log-probs are asked for."""


class NativeEngineCore:
    """A model, its cache, and the requests that wait and run.

    A step computes the newcomers' prompts except their last token, then one token for every running request. So the
    prompt's last token is decoded like any other, samples of one prompt share all of its computation by copying keys
    and values, and only decoding makes logits.

    Args:
        model: loaded with the native attention, on its device, in eval mode
        max_num_seqs: requests that run at the same time; more wait
        max_model_len: tokens of prompt and response together
        eos_ids: tokens that end a response unless a request ignores them
        decode: token ids to text, for stop strings
        max_prefill_tokens: prompt tokens computed in one forward pass (a longer prompt has its own)
        max_loras: adapters that may be loaded at the same time
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        decode: Decode,
        max_prefill_tokens: int = 2048,
        max_loras: int = 8,
    ):
        self.model = model
        self.loras = Loras(model, max_loras=max_loras)
        self.weight_version = 0
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.num_prompt_tokens_computed = 0
        """Prompt tokens that went through the model, for measuring what sharing saves."""
        self._eos_ids = eos_ids
        self._decode_text = decode
        self._max_prefill_tokens = max_prefill_tokens
        self._device = next(model.parameters()).device
        self._row_multiple = row_multiple_of(model)
        self._logit_rule = logit_rule(model.config)
        config = model.config.get_text_config()
        most_rows = round_up(max(max_num_seqs, MIN_ROWS), self._row_multiple)
        self._cache = SlotCache(config.num_hidden_layers, most_rows, max_model_len)
        self._rows = RowTable(config.vocab_size)
        self._waiting: deque[Request] = deque()

    @property
    def vocabulary(self) -> int:
        return self._rows.vocabulary

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_prompt(self, prompt: list[int]) -> np.ndarray:
        """The prompt as an array.

        Raises:
            ValueError: it is empty, as long as the context, or holds an id outside the vocabulary.
        """
        if not prompt:
            raise ValueError("prompt_token_ids must hold at least one token; got an empty prompt")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"prompt_token_ids must be shorter than max_model_len={self.max_model_len}, to leave room to answer; "
                f"got {len(prompt)} tokens. Shorten the prompt or raise max_model_len"
            )
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt_token_ids must be a list of integers; got {prompt[:8]!r} ...")
        outside = ids[(ids < 0) | (ids >= self.vocabulary)]
        if outside.size:
            raise ValueError(
                f"prompt_token_ids must be in the vocabulary, 0 to {self.vocabulary - 1}; got {int(outside[0])}; "
                "is the tokenizer the model's?"
            )
        return ids.astype(np.int64)

    def add_request(self, request: Request) -> None:
        """Puts a request (its prompt checked by `check_prompt`) at the end of the queue."""
        self._waiting.append(request)

    def abort(self, requests: Iterable[Request] | None = None) -> list[Completion]:
        """Ends these requests (None: all) where they are. Those that ended before are passed over."""
        chosen = None if requests is None else set(requests)
        aborted = [request for request in self._waiting if chosen is None or request in chosen]
        self._waiting = deque(request for request in self._waiting if request not in set(aborted))
        completions = [Completion(request, [], [], [], [], "abort") for request in aborted]
        rows = [row for row, request in enumerate(self._rows.requests) if chosen is None or request in chosen]
        return completions + self._finish(rows, lambda _row: "abort")

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> list[Completion]:
        """One token for every running request, after letting in those that wait (unless `admit` is False).

        Returns: the requests that ended in this step.
        """
        if admit:
            self._admit()
        if not self._rows:
            return []
        tokens, log_probs = self._sample(self._decode())
        slots = self._rows.lora_slot[: len(tokens)]
        self._rows.append(tokens, log_probs, self.loras.versions(slots, self.weight_version))
        return self._finish_done(tokens, log_probs)

    def release_cache(self) -> None:
        """Gives the cache's memory back. Only while nothing runs."""
        assert not self._rows, "the cache is in use"
        self._cache.release()

    def _admit(self) -> None:
        """Moves waiting requests into free rows and computes their prompts, equal ones once."""
        count = min(len(self._waiting), self.max_num_seqs - len(self._rows))
        if not count:
            return
        sources = {
            (request.prefix, request.lora_serial): row
            for row, request in enumerate(self._rows.requests)
            if self._rows.prompt_version[row] == self.weight_version
            and self._rows.prompt_lora[row] == request.lora_serial
        }
        new_prompts: list[int] = []
        copies: list[tuple[int, int]] = []
        for _ in range(count):
            row = self._add_row(self._waiting.popleft())
            request = self._rows.requests[row]
            scored = request.params.prompt_logprobs is not None  # such a prompt is computed for itself
            key = request.prefix, request.lora_serial
            if key in sources and not scored:
                copies.append((sources[key], row))
            elif request.prefix:
                sources[key] = row
                new_prompts.append(row)
        for rows in self._prefill_batches(new_prompts):
            self._prefill(rows)
        for source, row in copies:
            self._cache.copy_row(source, row, int(self._rows.prompt_length[row]) - 1)

    def _add_row(self, request: Request) -> int:
        prompt, budget = len(request.prompt), request.params.max_tokens
        limit = self.max_model_len if budget is None else min(prompt + budget, self.max_model_len)
        row = self._rows.add(
            request, version=self.weight_version, max_length=limit, eos_ids=self._eos_ids, decode=self._decode_text
        )
        self._cache.reserve(row + 1, prompt)
        return row

    def _prefill_batches(self, rows: list[int]) -> Iterable[list[int]]:
        """Rows in batches of similar length, each within `max_prefill_tokens` of padded prompt or of one row."""
        rows = sorted(rows, key=lambda row: self._rows.prompt_length[row])
        batch: list[int] = []
        for row in rows:
            padded = round_up(int(self._rows.prompt_length[row]) - 1, KEY_BLOCK)
            if batch and padded * (len(batch) + 1) > self._max_prefill_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _prefill(self, rows: list[int]) -> None:
        """Fills the cache with the prompts of these rows, without their last token. Shorter ones are padded behind."""
        lengths = [int(self._rows.prompt_length[row]) - 1 for row in rows]
        width = round_up(max(lengths), KEY_BLOCK)
        ids = np.zeros((len(rows), width), np.int64)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids[index, :length] = self._rows.tokens[row, :length]
        positions = torch.arange(width, device=self._device).expand(len(rows), -1)
        self._cache.begin_prefill(rows, lengths)
        if self.loras:
            self.loras.begin(self._rows.lora_slot[rows], apart=True)
        self.num_prompt_tokens_computed += sum(lengths)
        output = self.model.base_model(  # no head: the prompt's last token is decoded like any other
            input_ids=torch.from_numpy(ids).to(self._device),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            native_step=AttentionStep(positions),
        )
        for index, row in enumerate(rows):
            if self._rows.requests[row].params.prompt_logprobs is not None:
                self._score_prompt(row, output.last_hidden_state[index, : lengths[index]])

    def _score_prompt(self, row: int, hidden: torch.Tensor) -> None:
        """Writes down the log-probs of a row's prompt.

        Args:
            hidden: [P - 1, D], the states after each token of the prompt but its last
        """
        request = self._rows.requests[row]
        params, prompt = request.params, request.prompt
        head: Any = self.model.get_output_embeddings()
        log_probs, _ = token_log_probs(
            hidden,
            self.loras.merged_weight(head, request.lora),
            torch.from_numpy(prompt[1:]).to(self._device),
            bias=head.bias,
            temperature=1.0 if params.is_greedy else params.temperature,
            rule=self._logit_rule,
            chunk_size=PROMPT_SCORE_CHUNK,
        )
        self._rows.log_probs[row, 1 : len(prompt)] = log_probs.cpu().numpy()

    def _decode(self) -> torch.Tensor:
        """[rows, V] float32 logits after every row's last token. Rows are filled up so that company changes no bit."""
        count = len(self._rows)
        last = np.zeros(round_up(max(count, MIN_ROWS), self._row_multiple), np.int64)
        last[:count] = self._rows.length[:count] - 1
        ids = np.zeros_like(last)
        ids[:count] = self._rows.tokens[np.arange(count), last[:count]]
        longest = int(last.max()) + 1
        self._cache.reserve(len(last), longest)
        positions = torch.from_numpy(last).to(self._device)
        self._cache.begin_decode(positions, round_up(longest, KEY_BLOCK))
        if self.loras:
            slots = np.full(len(last), self._rows.lora_slot[0])  # what fills up goes with the first
            slots[:count] = self._rows.lora_slot[:count]
            self.loras.begin(slots, apart=False)
        output = self.model(
            input_ids=torch.from_numpy(ids).to(self._device)[:, None],
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
            native_step=AttentionStep(positions[:, None]),
        )
        return output.logits[:count, -1].float()

    def _sample(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        rows, count = self._rows, len(self._rows)
        batch = rows.sampling(self._device)
        uniform = None
        if not batch.all_greedy:
            uniform = torch.from_numpy(uniforms(rows.key[:count], rows.length[:count])).to(self._device)
        penalized = batch.repetition_penalty is not None
        tokens, log_probs = sample(
            logits,
            batch,
            uniform,
            tokens=rows.penalized_tokens(self._device) if penalized else None,
            forbidden=rows.forbidden(self._device),
        )
        return tokens.cpu().numpy(), log_probs.cpu().numpy()

    def _finish_done(self, tokens: np.ndarray, log_probs: np.ndarray) -> list[Completion]:
        rows, count = self._rows, len(self._rows)
        stopped = rows.stopped(tokens)
        finite = np.isfinite(log_probs)
        ended = np.flatnonzero(stopped | ~finite | (rows.length[:count] >= rows.max_length[:count]))
        errors = {row: _not_finite(rows.requests[row]) for row in np.flatnonzero(~finite).tolist()}
        for row in errors:
            self._cache.clear_row(row)
        return self._finish(ended.tolist(), lambda row: "stop" if stopped[row] else "length", errors)

    def _finish(
        self,
        ended: list[int],
        reason: Callable[[int], StopReason],
        errors: dict[int, Exception] | None = None,
    ) -> list[Completion]:
        """Takes rows (ascending) out; the last row moves into each hole, so that rows stay dense."""
        completions = [self._completion(row, reason(row), (errors or {}).get(row)) for row in ended]
        for row in reversed(ended):
            last = len(self._rows) - 1
            if row != last:
                self._cache.copy_row(last, row, int(self._rows.length[last]) - 1)
                self._rows.move(last, row)
            self._rows.remove_last()
        return completions

    def _completion(self, row: int, reason: StopReason, error: Exception | None) -> Completion:
        rows = self._rows
        written = slice(int(rows.prompt_length[row]), int(rows.length[row]))
        return Completion(
            request=rows.requests[row],
            token_ids=rows.tokens[row, written].tolist(),
            log_probs=rows.log_probs[row, written].tolist(),
            weight_versions=rows.versions[row, written].tolist(),
            prompt_log_probs=[]
            if rows.requests[row].params.prompt_logprobs is None
            else rows.log_probs[row, 1 : written.start].tolist(),
            stop_reason=reason,
            error=error,
        )


def row_multiple_of(model: torch.nn.Module) -> int:
    """Rows whose activations fill whole vectors in every layer: 1 for widths that are multiples of 32, as usual."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    return VECTOR // math.gcd(VECTOR, *(layer.out_features for layer in layers))


def _not_finite(request: Request) -> Exception:
    return FloatingPointError(
        f"the model's log-probabilities are not finite after a prompt of {len(request.prompt)} tokens: "
        "its weights hold NaN or infinity, or overflow in this dtype"
    )
