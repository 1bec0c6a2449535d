"""Running requests as columns of numpy arrays, so that a step costs a constant number of vector operations."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from skyrl_train.inference_engines.constraints import ConstraintFailed
from skyrl_train.inference_engines.native.attention import KEY_CHUNK, SharedKeys
from skyrl_train.inference_engines.native.device_copies import upload
from skyrl_train.inference_engines.native.requests import Request
from skyrl_train.inference_engines.native.sampling import Biases, SamplingBatch
from skyrl_train.inference_engines.native.speculation import SamplingPositions
from skyrl_train.inference_engines.native.stop_strings import Decode, StopStringFinder

_NO_TOKEN = -1


class RowTable:
    """Table with one row per running request, rows 0 to `len - 1`, in the same order as the cache's rows. Grows on
    demand.

    `tokens[r]` is the prompt followed by the completion; `log_probs` and `versions` have the same positions.
    """

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.requests: list[Request] = []
        self.finders: list[StopStringFinder | None] = []
        self.kept: list[list[np.ndarray] | None] = []
        """Kept tokens of each generated token, ids in int32; None for a row that does not record them."""
        self.top: list[list[tuple[np.ndarray, np.ndarray]]] = []
        """Most likely tokens at each generated position, and their log-probs; empty if not requested."""
        self.failures: dict[Request, ConstraintFailed] = {}
        """Rows with a constraint that became too complex, until they are removed."""
        self.length = np.zeros(0, np.int64)
        """Tokens so far, prompt included."""
        self.prompt_length = np.zeros(0, np.int64)
        self.num_cached = np.zeros(0, np.int64)
        """Number of leading prompt tokens that were not computed for this request."""
        self.num_drafted = np.zeros(0, np.int64)
        self.num_accepted = np.zeros(0, np.int64)
        """Verified draft tokens, and the accepted ones."""
        self.is_current = np.zeros(0, np.bool_)
        """True if all keys and values were computed by the current weights."""
        self.prompt_lora = np.zeros(0, np.int64)
        """Serial of the adapter that computed the prompt; 0: none."""
        self.prompt_updates = np.zeros(0, np.int64)
        """Number of weight updates before the prompt was computed; several updates may have the same version."""
        self.lora_slot = np.zeros(0, np.int64)
        self.num_top = np.zeros(0, np.int64)
        self.is_biased = np.zeros(0, np.bool_)
        self.is_constrained = np.zeros(0, np.bool_)
        self.min_length = np.zeros(0, np.int64)
        self.max_length = np.zeros(0, np.int64)
        self.key = np.zeros(0, np.uint64)
        self.stop_ids = np.zeros((0, 1), np.int64)
        self.tokens = np.zeros((0, 1), np.int64)
        self.log_probs = np.zeros((0, 1), np.float32)
        self.versions = np.zeros((0, 1), np.int64)
        self._sampling: SamplingBatch | None = None
        self._shared_keys: dict[int, SharedKeys | None] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def add(
        self, request: Request, *, num_updates: int, max_length: int, eos_ids: tuple[int, ...], decode: Decode
    ) -> int:
        """Append a request with a prompt computed after `num_updates` weight updates; return its row."""
        row, params = len(self), request.params
        stop_ids = tuple(dict.fromkeys(params.stop_token_ids + (() if params.ignore_eos else eos_ids)))
        self._reserve(row + 1, max_length, len(stop_ids))
        self.requests.append(request)
        self.finders.append(StopStringFinder(params.stop, request.decode or decode) if params.stop else None)
        self.kept.append([] if params.return_kept_tokens else None)
        self.top.append([])
        self.length[row] = self.prompt_length[row] = len(request.prompt)
        self.num_cached[row] = self.num_drafted[row] = self.num_accepted[row] = 0
        self.is_current[row] = True
        self.prompt_lora[row] = request.lora_serial
        self.prompt_updates[row] = num_updates
        self.lora_slot[row] = request.lora_slot
        self.num_top[row] = params.logprobs or 0
        self.is_biased[row] = bool(params.logit_bias) or params.has_penalties
        self.is_constrained[row] = request.matcher is not None
        self.min_length[row] = len(request.prompt) + params.min_tokens
        self.max_length[row] = max_length
        self.key[row] = request.key
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self.tokens[row, : len(request.prompt)] = request.prompt
        self._reset_batch()
        return row

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray, version: np.ndarray | int
    ) -> np.ndarray:
        """Append one token to each of these rows, generated by one weight version, or by one version per row.

        Returns: [rows] True if the token is an end token or completes a stop string.
        """
        positions = self.length[rows]
        self.tokens[rows, positions] = tokens
        self.log_probs[rows, positions] = log_probs
        self.versions[rows, positions] = version
        self.length[rows] += 1
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(1)
        for index, row in enumerate(rows.tolist()):
            finder = self.finders[row]
            if finder is not None and finder.push(int(tokens[index])):
                stopped[index] |= self.length[row] >= self.min_length[row]
            # Also the end token: the matcher must process it.
            if (matcher := self.requests[row].matcher) is not None:
                try:
                    stopped[index] |= matcher.push(int(tokens[index]))
                except ConstraintFailed as failure:
                    self.failures[self.requests[row]] = failure
        return stopped

    def append_top(self, rows: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Store the most likely tokens at the last position of these rows, as many as each row requests.

        Args:
            ids, log_probs: [rows, K], most likely first.
        """
        for index in np.flatnonzero(self.num_top[rows]).tolist():
            num = int(self.num_top[rows[index]])
            self.top[rows[index]].append((ids[index, :num], log_probs[index, :num]))

    def append_kept(self, kept: torch.Tensor) -> None:
        """Store the kept sets of the next token of each recording row.

        Args:
            kept: [recording rows, V] bool.
        """
        # One transfer of only the sets of all rows; `nonzero` sorts by row.
        ids = kept.nonzero()[:, 1].int().cpu().numpy()
        ends = kept.sum(-1).cumsum(-1).tolist()
        sets = np.split(ids, ends[:-1])
        for own, new in zip((own for own in self.kept if own is not None), sets, strict=True):
            own.append(new.copy())  # a view would keep the ids of all rows alive

    def remove_last(self) -> None:
        """Drop the last row."""
        for column in (self.requests, self.finders, self.kept, self.top):
            column.pop()
        self._reset_batch()

    def move(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        self.requests[target], self.finders[target] = self.requests[source], self.finders[source]
        self.kept[target], self.top[target] = self.kept[source], self.top[source]
        for column in self._get_columns():
            column[target] = column[source]

    def get_sampling_batch(self, device: torch.device) -> SamplingBatch:
        """Return the rows' sampling settings as tensors, cached until rows are added or removed."""
        if self._sampling is None:
            self._sampling = self._build_sampling_batch(device)
        return self._sampling

    def get_shared_keys(self, count: int) -> SharedKeys | None:
        """Return the keys shared by groups of the first `count` rows, cached until rows are added or removed; None if
        sharing would save less than half of the reads.
        """
        if count not in self._shared_keys:
            self._shared_keys[count] = self._find_shared_keys(count)
        return self._shared_keys[count]

    def compute_forbidden(
        self, places: SamplingPositions, drafts: Sequence[np.ndarray], lengths: np.ndarray, device: torch.device
    ) -> torch.Tensor | None:
        """Compute [N, V], True at tokens that must not be sampled at positions [N]: stop tokens of rows below
        `min_tokens` at these lengths [N], and tokens excluded by constraints. If a constraint permits only stop tokens,
        it overrides `min_tokens`. None if no row is affected.
        """
        rows = places.rows
        early, constrained = lengths < self.min_length[rows], self.is_constrained[rows]
        if not early.any() and not constrained.any():
            return None
        mask = np.zeros((len(rows), self.vocabulary), dtype=bool)
        stop_ids = self.stop_ids[rows]
        own, columns = np.nonzero((stop_ids != _NO_TOKEN) & early[:, None])
        mask[own, stop_ids[own, columns]] = True
        for row in np.unique(rows[constrained]).tolist():
            request = self.requests[row]
            assert request.matcher is not None
            # Positions of a row are adjacent: after its tokens, then after each draft.
            own = slice(*np.searchsorted(rows, [row, row + 1]).tolist())
            try:
                outside = ~request.matcher.compute_allowed(drafts[row])
            except ConstraintFailed as failure:
                self.failures[request] = failure
                continue
            # A row without permitted tokens would sample from NaN: permit the end token.
            together = mask[own] | outside
            mask[own] = np.where(together.all(-1, keepdims=True), outside, together)
        return upload(mask, device)

    def compute_biases(self, rows: np.ndarray, device: torch.device) -> Biases | None:
        """Compute the values that `logit_bias`, `frequency_penalty` and `presence_penalty` add to the logits [N, V] of
        rows [N]; None if no row is affected.

            logit[t] += logit_bias[t] - frequency_penalty * count[t] - presence_penalty * (count[t] > 0)

        with the number of occurrences of token t in the completion (https://platform.openai.com/docs/api-reference).
        """
        if not self.is_biased[rows].any():
            return None
        entries: list[tuple[int, int, float]] = []
        for place in np.flatnonzero(self.is_biased[rows]).tolist():
            row = int(rows[place])
            params = self.requests[row].params
            entries += [(place, token, value) for token, value in params.logit_bias]
            if params.has_penalties:
                start = self.prompt_length[row] - params.num_answer_tokens
                # Only of the completion, including its part in the prompt of an interrupted request.
                ids, counts = np.unique(self.tokens[row, start : self.length[row]], return_counts=True)
                values = -params.frequency_penalty * counts - params.presence_penalty
                entries += [(place, *entry) for entry in zip(ids.tolist(), values.tolist(), strict=True)]
        places, tokens, values = zip(*entries, strict=True) if entries else ((), (), ())
        return Biases(
            upload(np.array(places, np.int64), device),
            upload(np.array(tokens, np.int64), device),
            upload(np.array(values, np.float32), device),
        )

    def collect_penalized_tokens(self, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        """Collect the tokens so far of rows [N], [N, P], padded with the row's first token."""
        longest = int(self.length[rows].max())
        inside = np.arange(longest) < self.length[rows, None]
        tokens = np.where(inside, self.tokens[rows, :longest], self.tokens[rows, :1])
        return upload(tokens, device)

    def _build_sampling_batch(self, device: torch.device) -> SamplingBatch:
        params = [request.params for request in self.requests]

        def column(values: Sequence[float], off: float, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device) if any(v != off for v in values) else None

        greedy = [p.is_greedy for p in params]
        temperatures = [0.0 if p.is_greedy else p.temperature for p in params]
        rows = [row for row, p in enumerate(params) if (p.top_p, max(p.top_k, 0), p.min_p) != (1.0, 0, 0.0)]
        truncated = [params[row] for row in rows]
        recorded = [row for row, p in enumerate(params) if p.return_kept_tokens]
        top_k = [min(p.top_k, self.vocabulary) if p.top_k > 0 else self.vocabulary for p in truncated]
        return SamplingBatch(
            temperature=torch.tensor(temperatures, dtype=torch.float32, device=device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            top_p=column([p.top_p for p in truncated], 1.0),
            top_k=column(top_k, self.vocabulary, torch.long),
            min_p=column([p.min_p for p in truncated], 0.0),
            truncated=torch.tensor(rows, device=device) if 0 < len(rows) < len(params) else None,
            repetition_penalty=column([p.repetition_penalty for p in params], 1.0),
            recorded=torch.tensor(recorded, device=device) if recorded else None,
        )

    def _find_shared_keys(self, count: int) -> SharedKeys | None:
        # The last prompt token may be computed in a decoding batch; all keys before it are from the same weights.
        if np.count_nonzero(self.prompt_length[:count] > KEY_CHUNK) < 2:
            return None
        prompts = [request.prompt[:-1] for request in self.requests[:count]]
        computed = list(zip(self.prompt_lora[:count].tolist(), self.prompt_updates[:count].tolist(), strict=True))
        order = sorted(range(count), key=lambda row: (computed[row], self.requests[row].prefix))
        common = [
            _count_common_tokens(prompts[a], prompts[b]) // KEY_CHUNK * KEY_CHUNK if computed[a] == computed[b] else 0
            for a, b in pairwise(order)
        ]
        length = max(set(common), key=lambda each: each * sum(other >= each for other in common))
        ends = [place for place, each in enumerate(common, start=1) if each < length] + [count]
        if not length or 2 * len(ends) > count:
            return None
        groups = [sorted(order[start:end]) for start, end in pairwise([0, *ends])]
        return SharedKeys(length, tuple(map(torch.tensor, groups)))

    def _reset_batch(self) -> None:
        """Reset values cached for the current rows."""
        self._sampling = None
        self._shared_keys.clear()

    def _get_columns(self) -> tuple[np.ndarray, ...]:
        return tuple(getattr(self, name) for name in self._get_column_names())

    @staticmethod
    def _get_column_names() -> tuple[str, ...]:
        flat = ("length", "prompt_length", "num_cached", "num_drafted", "num_accepted", "is_current")
        flat += (
            "prompt_lora",
            "prompt_updates",
            "lora_slot",
            "num_top",
            "is_biased",
            "is_constrained",
            "min_length",
            "max_length",
            "key",
        )
        return (*flat, "stop_ids", "tokens", "log_probs", "versions")

    def _reserve(self, num_rows: int, length: int, num_stop_ids: int) -> None:
        """Grow the columns if needed, in powers of two."""
        if num_rows <= len(self.length) and length <= self.tokens.shape[1] and num_stop_ids <= self.stop_ids.shape[1]:
            return
        widths = {"stop_ids": num_stop_ids, "tokens": length, "log_probs": length, "versions": length}
        for name in self._get_column_names():
            column: np.ndarray = getattr(self, name)
            shape = (max(num_rows, column.shape[0]), *(max(widths[name], width) for width in column.shape[1:]))
            if shape != column.shape:
                shape = tuple(
                    old if new == old else 1 << (new - 1).bit_length()
                    for new, old in zip(shape, column.shape, strict=True)
                )
                grown = np.full(shape, _NO_TOKEN, column.dtype) if name == "stop_ids" else np.zeros(shape, column.dtype)
                grown[tuple(slice(size) for size in column.shape)] = column
                setattr(self, name, grown)


def _count_common_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two prompts."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
