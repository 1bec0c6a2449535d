"""Continuous batching: requests join and leave at every step. Synchronous; knows no thread, asyncio or Ray."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.base import StopReason
from skyrl_train.inference_engines.native.attention import KEY_BLOCK, MIN_ROWS, VECTOR, AttentionStep, round_up
from skyrl_train.inference_engines.native.cache import SlotCache
from skyrl_train.inference_engines.native.lora import Loras
from skyrl_train.inference_engines.native.prompt_scores import ruled, score_prompts
from skyrl_train.inference_engines.native.requests import Completion, Request
from skyrl_train.inference_engines.native.rows import RowTable
from skyrl_train.inference_engines.native.sampling import sample, uniforms
from skyrl_train.inference_engines.native.stop_strings import Decode
from skyrl_train.inference_engines.native.waiting import Waiting
from skyrl_train.models.scoring import logit_rule

MAX_PREFILL_TOKENS = 4096


class NativeEngineCore:
    """A model, its cache, and the requests that wait and run.

    A step computes the newcomers' prompts except their last token, then one token for every running request. So the
    prompt's last token is decoded like any other, samples of one prompt share all of its computation by copying keys
    and values, and only decoding makes logits (and what is asked of a prompt's own tokens).

    How long a step may take is bounded: it lets in new prompts of `max_prefill_tokens` together, or one longer prompt,
    however many wait.

    Args:
        model: loaded with the native attention, on its device, in eval mode
        max_num_seqs: requests that run at the same time; more wait
        max_model_len: tokens of prompt and response together
        eos_ids: tokens that end a response unless a request ignores them
        decode: token ids to text, for stop strings
        max_prefill_tokens: prompt tokens computed in one step (a longer prompt has its own)
        max_loras: adapters that may be loaded at the same time
        max_cache_tokens: places in the cache (rows x longest); requests wait for room to be written to their end. One
            that needs more runs alone. None: no limit
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        decode: Decode,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        max_loras: int = 8,
        max_cache_tokens: int | None = None,
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
        max_cache = math.inf if max_cache_tokens is None else max_cache_tokens
        self._cache = SlotCache(config.num_hidden_layers, most_rows, max_model_len, max_cache)
        self._rows = RowTable(config.vocab_size)
        self._waiting = Waiting()

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
        """Puts a request (its prompt checked by `check_prompt`) at the end of its group's queue."""
        self._waiting.add(request)

    def abort(self, requests: Iterable[Request] | None = None) -> list[Completion]:
        """Ends these requests (None: all) where they are. Those that ended before are passed over."""
        chosen = None if requests is None else set(requests)

        def is_chosen(request: Request) -> bool:
            return chosen is None or request in chosen

        completions = [Completion(request, [], [], [], "abort") for request in self._waiting.remove(is_chosen)]
        rows = [row for row, request in enumerate(self._rows.requests) if is_chosen(request)]
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
        if not self._waiting or len(self._rows) == self.max_num_seqs:
            return
        sources = {
            (request.prefix, request.lora_serial): row
            for row, request in enumerate(self._rows.requests)
            if self._rows.prompt_version[row] == self.weight_version
            and self._rows.prompt_lora[row] == request.lora_serial
        }
        new_prompts: list[int] = []
        copies: list[tuple[int, int]] = []
        room = self._max_prefill_tokens
        while (request := self._waiting.next(self.max_num_seqs - len(self._rows))) is not None:
            if not self._fits(request):
                break
            key = request.prefix, request.lora_serial
            is_copy = key in sources and request.scoring is None  # a prompt that is scored is computed for itself
            if not is_copy:
                room -= round_up(len(request.prompt) - 1, KEY_BLOCK)
                if room < 0 and new_prompts:
                    break
            self._waiting.take(request)
            row = self._add_row(request)
            if is_copy:
                copies.append((sources[key], row))
            elif request.prefix:
                sources[key] = row
                new_prompts.append(row)
        for rows in self._prefill_batches(new_prompts):
            self._prefill(rows)
        for source, row in copies:
            self._cache.copy_row(source, row, int(self._rows.prompt_length[row]) - 1)

    def _fits(self, request: Request) -> bool:
        """Whether the cache can hold this request beside the running ones until all of them are at their end."""
        count = len(self._rows)
        if not count or self._cache.max_tokens == math.inf:
            return True
        longest = max(int(self._rows.max_length[:count].max()), self._limit(request))
        rows, length = self._cache.size_for(self._filled(count + 1), longest)
        return rows * length <= self._cache.max_tokens

    def _limit(self, request: Request) -> int:
        """Tokens of prompt and answer at most."""
        budget = request.params.max_tokens
        return self.max_model_len if budget is None else min(len(request.prompt) + budget, self.max_model_len)

    def _filled(self, num_rows: int) -> int:
        """Rows that are decoded for so many requests, so that company changes no bit."""
        return round_up(max(num_rows, MIN_ROWS), self._row_multiple)

    def _add_row(self, request: Request) -> int:
        row = self._rows.add(
            request,
            version=self.weight_version,
            max_length=self._limit(request),
            eos_ids=self._eos_ids,
            decode=self._decode_text,
        )
        self._cache.reserve(row + 1, int(self._rows.length[: row + 1].max()))
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
        scored: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            scoring = self._rows.requests[row].scoring
            if scoring is not None:
                scored.setdefault(scoring.num_top, []).append(index)
        for indices in scored.values():
            hidden = [output.last_hidden_state[index, : lengths[index]] for index in indices]
            self._score_prompts([rows[index] for index in indices], hidden)

    def _score_prompts(self, rows: list[int], hidden: list[torch.Tensor]) -> None:
        """Writes down what the requests of these rows want to know of their prompts (equally many likeliest tokens).

        Args:
            hidden: a row: [P - 1, D], the states after each token of the prompt but its last
        """
        slots = np.repeat(self._rows.lora_slot[rows], [len(states) for states in hidden])

        def head(states: torch.Tensor, chunk: slice) -> torch.Tensor:
            """The output layer, with every token as a row of its own: the bits of decoding."""
            if self.loras:
                self.loras.begin(filled_up(slots[chunk], len(states)), apart=False)
            output: Any = self.model.get_output_embeddings()
            return ruled(output(states[:, None])[:, 0].float(), self._logit_rule)

        requests = [self._rows.requests[row] for row in rows]
        for row, scores in zip(rows, score_prompts(requests, hidden, head), strict=True):
            self._rows.scores[row] = scores

    def _decode(self) -> torch.Tensor:
        """[rows, V] float32 logits after every row's last token."""
        count = len(self._rows)
        last = np.zeros(self._filled(count), np.int64)
        last[:count] = self._rows.length[:count] - 1
        ids = np.zeros_like(last)
        ids[:count] = self._rows.tokens[np.arange(count), last[:count]]
        longest = int(last.max()) + 1
        self._cache.reserve(len(last), longest)
        positions = torch.from_numpy(last).to(self._device)
        self._cache.begin_decode(positions, round_up(longest, KEY_BLOCK))
        if self.loras:
            self.loras.begin(filled_up(self._rows.lora_slot[:count], len(last)), apart=False)
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
            self._waiting.give_back(self._rows.requests[row])
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
            stop_reason=reason,
            prompt_scores=rows.scores[row],
            error=error,
        )


def filled_up(slots: np.ndarray, num_rows: int) -> np.ndarray:
    """Adapter slots of rows and of those behind them that only fill up, which go with the first."""
    filled = np.full(num_rows, slots[0])
    filled[: len(slots)] = slots
    return filled


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
