"""Continuous batching: requests join and leave at every step. Synchronous; independent of threads, asyncio and Ray."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from skyrl_train.expert_routes import ExpertRoutes
from skyrl_train.inference_engines.base import DraftCounts, StopReason, TokenDelta, TopLogProbs
from skyrl_train.inference_engines.constraints import ConstraintFailed
from skyrl_train.inference_engines.native.attention import KEY_BLOCK, round_up
from skyrl_train.inference_engines.native.device_copies import download, upload
from skyrl_train.inference_engines.native.draft_model import DraftModel
from skyrl_train.inference_engines.native.prefix_cache import PrefixCache
from skyrl_train.inference_engines.native.prompt_scores import score_prompts
from skyrl_train.inference_engines.native.requests import Request
from skyrl_train.inference_engines.native.route_table import build_route_table
from skyrl_train.inference_engines.native.rows import RowTable
from skyrl_train.inference_engines.native.runner import ModelRunner
from skyrl_train.inference_engines.native.sampling import Draw, compute_uniforms, sample
from skyrl_train.inference_engines.native.speculation import SamplingPositions, find_drafts
from skyrl_train.inference_engines.native.stop_strings import Decode
from skyrl_train.inference_engines.native.waiting import Waiting
from skyrl_train.inference_engines.request import Completion, stack_top_log_probs
from skyrl_train.kept_tokens import KeptTokens
from skyrl_train.models.routing_replay import RoutingReplay

MAX_PREFILL_TOKENS = 4096
KEYS_OF_A_PREFILL_TOKEN = 8
"""Maximum number of keys (cached ones included) of a prefill batch per token of `max_prefill_tokens`, since attention
gathers the keys of all its prompts.
"""
MAX_PREFIX_TOKENS = 2**16
MAX_DRAFTING = 16

Outcome = Completion | FloatingPointError | ConstraintFailed
"""Completion of a request (without text), or the error of non-finite model output or of a constraint that became too
complex.
"""

Outcomes = dict[Request, Outcome]
"""Outcomes of finished requests."""


class NativeEngineCore:
    """Model, cache, and waiting and running requests.

    A step prefills the prompts of new requests, which yields their first tokens, and decodes one token for every other
    running request. Samples of one prompt submitted together share its computation. Keys and values of prompts and
    completions are cached (`prefix_cache.py`): later turns, samples, branches and retries compute only the uncached
    suffix of their prompt.

    The duration of a step is bounded: it prefills at most `max_prefill_tokens` tokens of new prompts; a longer prompt
        takes several steps.

    Args:
        model: loaded with the native attention, on its device, in eval mode
        max_num_seqs: maximum number of running requests; more wait
        max_model_len: tokens of prompt and response together
        eos_ids: tokens that end a response unless a request ignores them
        decode: token ids to text, for stop strings
        max_prefill_tokens: maximum prompt tokens computed in one step
        chunked_prefill: whether a longer prompt is computed in chunks (requires a prefix cache large enough for it), or
            at once
        max_prefix_tokens: capacity of the prefix cache in tokens; 0: disabled
        max_loras: maximum number of loaded adapters
        max_cache_tokens: capacity of the cache (rows x longest row); requests wait until they fit with their full
            budget. One that needs more runs alone. None: no limit
        num_draft_tokens: maximum drafts per request and pass (`speculation.py`); 0: disabled
        max_drafting: maximum number of running requests with drafting
        draft_model: model that proposes drafts; None: prompt lookup
        routing: expert routing of a mixture, if completions include routes; None: no routes
        use_graphs: decode by replay of captured passes (`decode_graphs.py`)
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
        chunked_prefill: bool = True,
        max_prefix_tokens: int = MAX_PREFIX_TOKENS,
        max_loras: int = 8,
        max_cache_tokens: int | None = None,
        num_draft_tokens: int = 0,
        max_drafting: int = MAX_DRAFTING,
        draft_model: DraftModel | None = None,
        routing: RoutingReplay | None = None,
        use_graphs: bool = False,
    ):
        self._runner = ModelRunner(
            model,
            max_num_seqs=max_num_seqs,
            max_length=max_model_len,
            max_cache_tokens=max_cache_tokens,
            max_loras=max_loras,
            routing=routing,
            use_graphs=use_graphs,
        )
        if self._runner.has_states:  # states within a row are unknown: no prefix to start from or to roll back to
            max_prefix_tokens = num_draft_tokens = 0
        self._routes = None if routing is None else build_route_table(routing)
        self.model, self.loras = model, self._runner.loras
        self.weight_version = 0
        self._num_updates = 0
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.num_prompt_tokens_computed = 0
        """Prompt tokens computed by the model; the others were shared or cached."""
        self._num_draft_tokens, self._max_drafting = num_draft_tokens, max_drafting
        self.draft_model = draft_model
        self._eos_ids = eos_ids
        self._decode_text = decode
        self._max_prefill_tokens = max_prefill_tokens
        self._device, self._cache = self._runner.device, self._runner.cache
        self._prefixes = PrefixCache(self._cache, max_prefix_tokens, self._routes)
        self._chunked_prefill = chunked_prefill
        self._chunk: tuple[Request | None, int] = None, 0
        self._rows = RowTable(model.config.get_text_config().vocab_size)
        self._waiting = Waiting()

    @property
    def vocabulary(self) -> int:
        return self._rows.vocabulary

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_forwards(self) -> int:
        """Number of passes through the model so far."""
        return self._runner.num_forwards

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_prompt(self, prompt: list[int]) -> np.ndarray:
        """Return the prompt as an array.

        Raises:
            ValueError: empty, as long as the context, or with an id outside the vocabulary.
        """
        if not prompt:
            raise ValueError("prompt_token_ids must hold at least one token; got an empty prompt")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"prompt_token_ids must be shorter than max_model_len={self.max_model_len}, so that at least one "
                f"token can be generated; got {len(prompt)} tokens. Shorten the prompt or raise max_model_len"
            )
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt_token_ids must be a list of integers; got {prompt[:8]!r} ...")
        outside = ids[(ids < 0) | (ids >= self.vocabulary)]
        if outside.size:
            raise ValueError(
                f"prompt_token_ids must be in the vocabulary, 0 to {self.vocabulary - 1}; got {int(outside[0])}; "
                "check that the tokenizer belongs to the model"
            )
        return ids.astype(np.int64)

    def add_request(self, request: Request) -> None:
        """Append a request (its prompt checked by `check_prompt`) to its group's queue."""
        self._waiting.add(request)

    @torch.inference_mode()
    def abort(self, requests: Iterable[Request] | None = None) -> Outcomes:
        """Abort these requests (None: all) with their tokens so far. Finished requests are ignored."""
        chosen = None if requests is None else set(requests)

        def is_chosen(request: Request) -> bool:
            return chosen is None or request in chosen

        never_ran = self._waiting.remove(is_chosen)
        rows = [row for row, request in enumerate(self._rows.requests) if is_chosen(request)]
        outcomes: Outcomes = {request: _build_completion(request, [], [], [], "abort") for request in never_ran}
        return outcomes | self._finish(rows, lambda _row: "abort")

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> Outcomes:
        """Generate one token for every running request, after admitting waiting ones (unless `admit` is False).

        Returns: the requests that finished in this step.
        """
        new_prompts, copies = self._admit() if admit else ([], {})
        known: dict[int, torch.Tensor] = {}
        for wave in self._iter_prefill_waves(new_prompts):
            for rows in self._split_into_prefill_batches(wave):
                requests = [self._rows.requests[row] for row in rows]
                prompts = [request.prompt for request in requests]
                starts, slots = self._rows.num_cached[rows].tolist(), self._rows.lora_slot[rows]
                hidden, logits = self._runner.prefill(rows, prompts, starts, slots)
                self._store_prompts(rows, requests, prompts, starts)
                self._score_prompts(requests, slots, hidden)
                known.update(zip(rows, logits, strict=True))
                del hidden  # its memory is needed for decoding
        self._copy_prompts(copies, known)
        added = [*new_prompts, *copies]
        self.num_prompt_tokens_computed += int((self._rows.prompt_length - self._rows.num_cached)[added].sum())
        if not self._rows:
            return {}
        drafts = self._propose_drafts(known)
        places = SamplingPositions.from_drafts(drafts)
        draw = self._sample(self._compute_logits(known, drafts, places), places, drafts)
        if draw.kept is not None:
            self._rows.append_kept(draw.kept)
        return self._append(places, drafts, draw)

    def hand_out_tokens(self) -> None:
        """Send the new tokens of streaming requests to their callbacks."""
        # Finished rows are removed: their last tokens are part of their outcomes.
        rows = self._rows
        for row, request in enumerate(rows.requests):
            if request.on_tokens is None:
                continue
            first, begin = int(rows.prompt_length[row]), request.num_handed_out
            own = slice(first + begin, int(rows.length[row]))
            if own.start >= own.stop:
                continue
            delta = TokenDelta(
                token_ids=rows.tokens[row, own].tolist(),
                log_probs=None if request.params.logprobs is None else rows.log_probs[row, own].tolist(),
                weight_versions=rows.versions[row, own].tolist(),
                top=stack_top_log_probs(rows.top[row][begin:], int(rows.num_top[row])),
            )
            request.num_handed_out += len(delta.token_ids)
            request.on_tokens(delta)

    def update_version(self, version: int) -> None:
        """Set the version of changed weights. Running requests keep their keys and values, which are not shared with
        new ones.
        """
        self.weight_version = version
        self._num_updates += 1
        self._rows.is_current[:] = False
        self.clear_prefixes()

    def clear_prefixes(self) -> None:
        """Clear the prefix cache."""
        self._prefixes.clear()
        self._chunk = None, 0

    def release_cache(self) -> None:
        """Free the memory of the cache. Only while nothing runs."""
        assert not self._rows, "the cache is in use"
        self._runner.release()
        self.clear_prefixes()
        self._prefixes.release()
        if self.draft_model is not None:
            self.draft_model.release()
        if self._routes is not None:
            self._routes.release()

    def _admit(self) -> tuple[list[int], dict[int, int]]:
        """Move waiting requests into free rows.

        Returns: rows with prompts to compute; row -> row with the same prompt to copy keys and values from.
        """
        if not self._waiting or len(self._rows) == self.max_num_seqs:
            return [], {}
        new_prompts: list[int] = []
        sources: dict[tuple[bytes, int], int] = {}
        copies: dict[int, int] = {}
        room = self._max_prefill_tokens
        while (request := self._waiting.get_next(self.max_num_seqs - len(self._rows))) is not None:
            if not self._has_cache_space(request):
                break
            # A state cannot be rolled back to all but the last token: only rows with an equal prompt copy it.
            prefix = request.prompt.tobytes() if self._runner.has_states else request.prefix
            key = prefix, request.lora_serial
            is_copy = key in sources and request.scoring is None  # a scored prompt is computed separately
            if not is_copy:
                start = 0 if request.scoring else self._prefixes.tree.get_match_length(request.prompt[:-1], key[1])
                room -= round_up(len(request.prompt) - start, KEY_BLOCK)
                if room < 0 and new_prompts:
                    break
                if room < 0 and self._prefill_chunk(request, start):
                    break
            self._waiting.take(request)
            row = self._add_row(request)
            if is_copy:
                copies[row] = sources[key]
            else:
                sources[key] = row
                new_prompts.append(row)
        return new_prompts, copies

    def _prefill_chunk(self, request: Request, start: int) -> bool:
        """Compute `max_prefill_tokens` tokens of a waiting request's prompt after the `start` cached ones, and store
        them in the prefix cache.

        Returns: False if the prompt must be computed at once instead.
        """
        fits = self._chunked_prefill and len(request.prompt) <= self._prefixes.tree.max_tokens
        # Less is cached than was computed last time: it was evicted, and would be again.
        is_lost = self._chunk[0] is request and start < self._chunk[1]
        if not fits or is_lost or request.scoring is not None:
            return False
        # The first unused row: the prefix cache stores the result, and the row is free afterwards.
        row, end = len(self._rows), start + self._max_prefill_tokens
        # With a limited cache, the excess over the requested length may be truncated.
        self._cache.reserve(row + 1, max(end, int(self._rows.length[:row].max(initial=0))))
        if self._routes is not None:
            self._routes.reserve(row + 1, end)
        self._prefixes.load([row], [self._prefixes.tree.match(request.prompt[:start], request.lora_serial)])
        self._runner.prefill([row], [request.prompt[:end]], [start], np.array([request.lora_slot]))
        self._store_prompts([row], [request], [request.prompt[:end]], [start])
        # Non-finite values (of non-finite weights) would reach the next request in this row.
        self._cache.clear_row(row)
        self._chunk = request, end
        request.num_chunked += end - start
        self.num_prompt_tokens_computed += end - start
        return True

    def _iter_prefill_waves(self, rows: list[int]) -> Iterator[list[int]]:
        """Yield the rows in waves, after loading the cached prefixes of their prompts. Of rows that share an uncached
        prefix, all but the first wait for a later wave. Rows with only the last token uncached are left to decoding.
        """
        known_before: dict[int, int] = {}
        while rows:
            wave: dict[int, np.ndarray] = {}
            beginnings: set[tuple[int, bytes]] = set()
            for row in rows:
                request = self._rows.requests[row]
                # A scored prompt needs the states of all its tokens, so it is computed entirely.
                prompt = request.prompt[: -1 if request.scoring is None else 0]
                slots = self._prefixes.tree.match(prompt, request.lora_serial)
                beginning = request.lora_serial, prompt[: len(slots) + KEY_BLOCK].tobytes()
                # If waiting did not help, the shared prefix is too long for the cache.
                may_wait = self._prefixes.is_enabled and len(prompt) > len(slots) > known_before.get(row, -1)
                known_before[row] = len(slots)
                if not may_wait or beginning not in beginnings:
                    beginnings.add(beginning)
                    wave[row] = slots
            self._prefixes.load(list(wave), list(wave.values()))
            self._rows.num_cached[list(wave)] = [len(slots) for slots in wave.values()]
            rest = self._rows.prompt_length - self._rows.num_cached
            yield [row for row in wave if rest[row] > 1 or self._rows.num_cached[row] == 0]
            rows = [row for row in rows if row not in wave]

    def _store_prompts(
        self, rows: list[int], requests: list[Request], prompts: list[np.ndarray], starts: list[int]
    ) -> None:
        """Store the computed part of prompts from `starts[i]` on: routes, and keys and values for other requests."""
        if self._routes is not None:
            self._routes.put_prompts(rows, starts, [len(prompt) for prompt in prompts], self._runner.routes)
        self._prefixes.store(rows, prompts, [request.lora_serial for request in requests])

    def _copy_prompts(self, copies: Mapping[int, int], known: dict[int, torch.Tensor]) -> None:
        """Copy keys and values of equal prompts, and add the source's logits to `known` if they apply."""
        for row, source in copies.items():
            prompt = self._rows.requests[row].prompt
            self._cache.copy_row(source, row, len(prompt))
            if self._routes is not None:  # if the last tokens differ, decoding computes the one of this row
                self._routes.copy(source, row, len(prompt))
            self._rows.num_cached[row] = len(prompt) - 1
            if source in known and self._rows.requests[source].prompt[-1] == prompt[-1]:
                known[row] = known[source]
                self._rows.num_cached[row] = len(prompt)

    def _has_cache_space(self, request: Request) -> bool:
        """Return whether the cache can hold this request and the running ones up to their full budgets."""
        count = len(self._rows)
        if not count or self._cache.max_tokens == math.inf:
            return True
        longest = max(int(self._rows.max_length[:count].max()), self._get_token_limit(request))
        rows, length = self._cache.compute_size(self._runner.pad_decode_rows(count + 1), longest)
        return rows * length <= self._cache.max_tokens

    def _get_token_limit(self, request: Request) -> int:
        """Return a request's maximum number of tokens of prompt and response."""
        budget = request.params.max_tokens
        return self.max_model_len if budget is None else min(len(request.prompt) + budget, self.max_model_len)

    def _add_row(self, request: Request) -> int:
        row = self._rows.add(
            request,
            num_updates=self._num_updates,
            max_length=self._get_token_limit(request),
            eos_ids=self._eos_ids,
            decode=self._decode_text,
        )
        self._cache.reserve(row + 1, int(self._rows.length[: row + 1].max()))
        if self._routes is not None:
            self._routes.reserve(row + 1, int(self._rows.max_length[row]))
        return row

    def _split_into_prefill_batches(self, rows: list[int]) -> Iterable[list[int]]:
        """Yield batches of rows with similar numbers of tokens to compute. Each has at most `max_prefill_tokens` tokens
        with padding and a bounded number of keys, or a single row.
        """
        rest = self._rows.prompt_length - self._rows.num_cached
        most = self._max_prefill_tokens
        batch: list[int] = []
        num_keys = 0  # of the longest prompt of the batch
        for row in sorted(rows, key=lambda row: rest[row]):
            padded = round_up(int(rest[row]), KEY_BLOCK)
            keys = max(num_keys, int(self._rows.prompt_length[row]))
            size = len(batch) + 1
            if batch and (padded * size > most or keys * size > KEYS_OF_A_PREFILL_TOKEN * most):
                yield batch
                batch, keys = [], int(self._rows.prompt_length[row])
            batch.append(row)
            num_keys = keys
        if batch:
            yield batch

    def _score_prompts(self, requests: Sequence[Request], slots: np.ndarray, hidden: torch.Tensor) -> None:
        """Compute requested prompt log-probs, together for requests with the same number of top tokens.

        Args:
            slots: [n], adapter slots
            hidden: [n, T, D], states of the prompts' tokens
        """
        groups: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            if request.scoring is not None and request.prefix:
                groups.setdefault(request.scoring.num_top, []).append(index)
        for indices in groups.values():
            scored = [requests[index] for index in indices]
            states = [hidden[index, : len(requests[index].prompt) - 1] for index in indices]  # [P - 1, D] each
            head = self._runner.build_head(np.repeat(slots[indices], [len(each) for each in states]))
            for request, scores in zip(scored, score_prompts(scored, states, head), strict=True):
                request.prompt_scores = scores

    def _propose_drafts(self, known: Mapping[int, torch.Tensor]) -> list[np.ndarray]:
        """Return the drafts of each row. Either most rows have drafts or none has, since all are computed with the
        longest width.
        """
        rows, count = self._rows, len(self._rows)
        none = [rows.tokens[0, :0]] * count
        # Logits of a prompt cover a single position.
        if not self._num_draft_tokens or known or count > self._max_drafting:
            return none
        # Rows in the cache end at the maximum length.
        room = int(rows.max_length[:count].max() - rows.length[:count].max())
        nums = np.minimum(min(self._num_draft_tokens, room), rows.max_length[:count] - rows.length[:count] - 1)
        # Settings that depend on earlier tokens have no drafts.
        nums = [
            int(num)
            if params.repetition_penalty == 1 and not (params.has_penalties or params.return_kept_tokens)
            else 0
            for num, params in zip(nums, (request.params for request in rows.requests), strict=True)
        ]
        if self.draft_model is not None:
            drafts = self.draft_model.generate_drafts(rows, nums) if 2 * sum(map(bool, nums)) >= count else none
        else:
            drafts = [find_drafts(rows.tokens[row, : rows.length[row]], num) for row, num in enumerate(nums)]
        return drafts if 2 * sum(map(bool, map(len, drafts))) >= count else none

    def _compute_logits(
        self, known: Mapping[int, torch.Tensor], drafts: Sequence[np.ndarray], places: SamplingPositions
    ) -> torch.Tensor:
        """Compute [N, V] float32 logits after every row's last token and after each draft.

        Args:
            known: row -> logits [V] from prefill, if no drafts exist. These trailing rows need no decoding.
        """
        count = len(self._rows)
        if len(places.rows) > count:
            return self._decode(count, drafts, count)[places.rows, places.offsets]
        num_decoded = 1 + max((row for row in range(count) if row not in known), default=-1)
        parts = [known[row] for row in range(num_decoded, count)]
        if not num_decoded:
            return torch.stack(parts)
        # Padding rows write to the cache too: none may belong to a request.
        num_computed = min(self._runner.pad_decode_rows(num_decoded), count)
        decoded = self._decode(num_computed, drafts[:num_computed], num_decoded)[:, 0]
        return torch.cat([decoded[:num_decoded], torch.stack(parts)]) if parts else decoded

    def _decode(self, count: int, drafts: Sequence[np.ndarray], num_new: int) -> torch.Tensor:
        """Compute [count, T, V] float32 logits after the last token of the first rows and after their drafts; entries
        after a row's last draft are invalid. Rows from `num_new` on were computed before and are padding.
        """
        rows, width = self._rows, 1 + max(map(len, drafts))
        last = rows.length[:count] - 1
        self._cache.reserve(self._runner.pad_decode_rows(count), int(rows.length[: len(rows)].max()) + width - 1)
        ids = np.zeros((count, width), np.int64)
        ids[:, 0] = rows.tokens[np.arange(count), last]
        for row, own in enumerate(drafts):
            ids[row, 1 : 1 + len(own)] = own
        positions = last[:, None] + np.arange(width)
        shared = rows.get_shared_keys(count) if self._runner.shares_keys else None
        logits = self._runner.decode(ids, positions, rows.lora_slot[:count], num_new, shared)
        if self._routes is not None:
            self._routes.put_tokens(positions, self._runner.routes)
        return logits

    def _sample(self, logits: torch.Tensor, places: SamplingPositions, drafts: Sequence[np.ndarray]) -> Draw:
        """Sample a token at each position."""
        rows, own = self._rows, places.rows
        batch, lengths = rows.get_sampling_batch(self._device), rows.length[own] + places.offsets
        if len(own) > len(rows):
            batch = batch.select_rows(upload(own, self._device))
        uniform = None
        if not batch.all_greedy:
            uniform = upload(compute_uniforms(rows.key[own], lengths), self._device)
        penalized = batch.repetition_penalty is not None
        return sample(
            logits,
            batch,
            uniform,
            tokens=rows.collect_penalized_tokens(own, self._device) if penalized else None,
            biases=rows.compute_biases(own, self._device),
            forbidden=rows.compute_forbidden(places, drafts, lengths, self._device),
            num_top=int(rows.num_top[own].max()),
        )

    def _append(self, places: SamplingPositions, drafts: Sequence[np.ndarray], draw: Draw) -> Outcomes:
        """Append the tokens sampled at accepted positions, up to the one that ends a row.

        Returns: the finished requests.
        """
        rows, count = self._rows, len(self._rows)
        top = [] if draw.top_ids is None or draw.top_log_probs is None else [draw.top_ids, draw.top_log_probs]
        tokens, log_probs, *tops = download([draw.tokens, draw.log_probs, *top])
        is_accepted = places.compute_accepted(drafts, tokens)
        rows.num_drafted[:count] += np.bincount(places.rows) - 1
        stopped, finite, ended = np.zeros((3, count), np.bool_)
        finite[:] = True
        for offset in range(int(places.offsets.max()) + 1):
            chosen = np.flatnonzero((places.offsets == offset) & is_accepted & ~ended[places.rows])
            own = places.rows[chosen]
            versions = self.loras.get_versions(rows.lora_slot[own], self.weight_version)
            stopped[own] = rows.append(own, tokens[chosen], log_probs[chosen], versions)
            if tops:
                rows.append_top(own, tops[0][chosen], tops[1][chosen])
            finite[own] = np.isfinite(log_probs[chosen])
            # A failed row is dropped here; its tokens would look like a completion truncated by its budget.
            unmatched = [rows.requests[row] in rows.failures for row in own.tolist()] if rows.failures else False
            ended[own] = stopped[own] | ~finite[own] | (rows.length[own] >= rows.max_length[own]) | unmatched
            if offset:
                rows.num_accepted[own] += 1
        failed = [rows.requests[row] for row in np.flatnonzero(~finite).tolist()]
        for row in np.flatnonzero(~finite).tolist():
            self._cache.clear_row(row)
        if failed:  # cached prefixes may contain non-finite values
            self.clear_prefixes()
            rows.is_current[np.flatnonzero(~finite)] = False
        outcomes = self._finish(np.flatnonzero(ended).tolist(), lambda row: "stop" if stopped[row] else "length")
        unmatched, rows.failures = rows.failures, {}
        return outcomes | unmatched | {request: _build_not_finite_error(request) for request in failed}

    def _finish(self, ended: list[int], reason: Callable[[int], StopReason]) -> Outcomes:
        """Remove finished rows (ascending); the last row moves into each gap, so that rows stay dense."""
        rows = self._rows
        self._store_prefixes(ended)
        outcomes: Outcomes = {}
        for row in ended:
            request, generated = rows.requests[row], slice(int(rows.prompt_length[row]), int(rows.length[row]))
            tokens, log_probs = rows.tokens[row, generated].tolist(), rows.log_probs[row, generated].tolist()
            versions = rows.versions[row, generated].tolist()
            # The last token was drawn and not yet computed.
            routes = None if self._routes is None else self._routes.get_row(row, int(rows.length[row]) - 1)
            sets = rows.kept[row]
            kept = None if sets is None else KeptTokens.of(sets)
            completion = _build_completion(request, tokens, log_probs, versions, reason(row), routes, kept)
            num_cached = max(0, int(rows.num_cached[row]) - request.num_chunked)
            drafts = DraftCounts(int(rows.num_drafted[row]), int(rows.num_accepted[row]))
            top = stack_top_log_probs(rows.top[row], int(rows.num_top[row]))
            outcomes[request] = replace(completion, num_cached_prompt_tokens=num_cached, drafts=drafts, top=top)
        for row in reversed(ended):
            last = len(rows) - 1
            self._waiting.release_row(rows.requests[row])
            if row != last:
                self._cache.copy_row(last, row, int(rows.length[last]) - 1)
                if self._routes is not None:
                    self._routes.copy(last, row, int(rows.length[last]) - 1)
                rows.move(last, row)
            rows.remove_last()
        # A new batch may need less memory than one of long completions.
        if not rows and not self._waiting and self._cache.trim():
            if self.draft_model is not None:
                self.draft_model.release()
            if self._routes is not None:
                self._routes.release()
        return outcomes

    def _store_prefixes(self, ended: list[int]) -> None:
        """Store keys and values of finished rows in the prefix cache, unless other weights computed a part."""
        rows = self._rows
        kept = [
            row for row in ended if rows.is_current[row] and rows.prompt_lora[row] == rows.requests[row].lora_serial
        ]
        # The last token was drawn and not yet computed.
        tokens = [rows.tokens[row, : rows.length[row] - 1] for row in kept]
        self._prefixes.store(kept, tokens, [rows.requests[row].lora_serial for row in kept])


def _build_completion(
    request: Request,
    token_ids: list[int],
    log_probs: list[float],
    versions: list[int],
    reason: StopReason,
    routes: ExpertRoutes | None = None,
    kept: KeptTokens | None = None,
) -> Completion:
    found, num_top = request.prompt_scores, request.params.prompt_logprobs
    scores = [] if found is None else found.log_probs.tolist()
    return Completion(
        token_ids=token_ids,
        stop_reason=reason,
        weight_versions=versions,
        log_probs=log_probs,
        prompt_log_probs=None if request.scoring is None else scores,
        prompt_top=TopLogProbs(found.top_ids, found.top_log_probs) if found is not None and num_top else None,
        routes=routes,
        kept_tokens=kept,
    )


def _build_not_finite_error(request: Request) -> FloatingPointError:
    return FloatingPointError(
        f"the model's log-probabilities are not finite after a prompt of {len(request.prompt)} tokens: its weights "
        "contain NaN or infinity, or overflow in this dtype"
    )
