"""The running requests as columns of numpy arrays: a step costs a few vector operations, whatever their number."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from skyrl_train.inference_engines.constraints import ConstraintFailed
from skyrl_train.inference_engines.native.attention import KEY_CHUNK, SharedKeys
from skyrl_train.inference_engines.native.requests import Request
from skyrl_train.inference_engines.native.sampling import Biases, SamplingBatch
from skyrl_train.inference_engines.native.speculation import Places
from skyrl_train.inference_engines.native.stop_strings import Decode, StopStringFinder

_NO_TOKEN = -1


class RowTable:
    """One row a running request, rows 0 to `len - 1`, in step with the cache's rows. Grows as needed.

    `tokens[r]` is the prompt followed by the response; `log_probs` and `versions` lie at the same positions.
    """

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.requests: list[Request] = []
        self.finders: list[StopStringFinder | None] = []
        self.kept: list[list[np.ndarray] | None] = []
        """Kept tokens of each generated token, ids in int32; None for a row that does not record them."""
        self.top: list[list[tuple[np.ndarray, np.ndarray]]] = []
        """Likeliest tokens in the place of each generated token, and their log-probs; empty if a row wants none."""
        self.failures: dict[Request, ConstraintFailed] = {}
        """Rows whose constraint became too complex, until they are removed."""
        self.length = np.zeros(0, np.int64)
        """Tokens so far, prompt included."""
        self.prompt_length = np.zeros(0, np.int64)
        self.num_cached = np.zeros(0, np.int64)
        """Tokens at the beginning of the prompt that were not computed for this request."""
        self.num_drafted = np.zeros(0, np.int64)
        self.num_accepted = np.zeros(0, np.int64)
        """Draft tokens that were verified, and those of them in the answer."""
        self.is_current = np.zeros(0, np.bool_)
        """True if all keys and values are of the present weights."""
        self.prompt_lora = np.zeros(0, np.int64)
        """Serial of the adapter that computed the prompt; 0: none."""
        self.prompt_updates = np.zeros(0, np.int64)
        """Updates of the weights before the prompt was computed: two of them may have one version."""
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
        """Append a request whose prompt the weights compute after so many updates; return its row."""
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
        """Append one token to each of these rows, written by weights of one version or of one each.

        Returns: [rows] True where the token ends the response by itself or completes a stop string.
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
            # Also the token that ends the answer: a matcher has to see it for what it is.
            if (matcher := self.requests[row].matcher) is not None:
                try:
                    stopped[index] |= matcher.push(int(tokens[index]))
                except ConstraintFailed as failure:
                    self.failures[self.requests[row]] = failure
        return stopped

    def append_top(self, rows: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Keep the likeliest tokens in the place of the last token of these rows, as many as each row wants.

        Args:
            ids, log_probs: [rows, K], likeliest first.
        """
        for index in np.flatnonzero(self.num_top[rows]).tolist():
            num = int(self.num_top[rows[index]])
            self.top[rows[index]].append((ids[index, :num], log_probs[index, :num]))

    def append_kept(self, kept: torch.Tensor) -> None:
        """Keep the sets of the next token of each row that records them.

        Args:
            kept: [rows that record, V] bool.
        """
        # One transfer for all rows, of no more than their sets; `nonzero` sorts by row.
        ids = kept.nonzero()[:, 1].int().cpu().numpy()
        ends = kept.sum(-1).cumsum(-1).tolist()
        sets = np.split(ids, ends[:-1])
        for own, new in zip((own for own in self.kept if own is not None), sets, strict=True):
            own.append(new.copy())  # a view would hold the ids of all rows

    def remove_last(self) -> None:
        """Drop the last row."""
        for column in (self.requests, self.finders, self.kept, self.top):
            column.pop()
        self._reset_batch()

    def move(self, source: int, target: int) -> None:
        """Overwrite row `target` by row `source`."""
        self.requests[target], self.finders[target] = self.requests[source], self.finders[source]
        self.kept[target], self.top[target] = self.kept[source], self.top[source]
        for column in self._get_columns():
            column[target] = column[source]

    def get_sampling_batch(self, device: torch.device) -> SamplingBatch:
        """The rows' sampling settings as tensors, made anew only when rows came or went."""
        if self._sampling is None:
            self._sampling = self._build_sampling_batch(device)
        return self._sampling

    def get_shared_keys(self, count: int) -> SharedKeys | None:
        """Return the keys that groups of the first `count` rows have in common, found anew only when rows came or went;
        None where reading them once a group would not halve the reading."""
        if count not in self._shared_keys:
            self._shared_keys[count] = self._find_shared_keys(count)
        return self._shared_keys[count]

    def compute_forbidden(
        self, places: Places, drafts: Sequence[np.ndarray], lengths: np.ndarray, device: torch.device
    ) -> torch.Tensor | None:
        """[N, V] True on tokens that may not be drawn at places [N]: the stop tokens of rows that are below their
        `min_tokens` at these lengths [N], and what constraints rule out. A constraint that leaves nothing but those
        stop tokens goes before `min_tokens`. None if there are no such rows."""
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
            # Places of a row stand side by side: behind its tokens, then behind each draft.
            own = slice(*np.searchsorted(rows, [row, row + 1]).tolist())
            try:
                outside = ~request.matcher.allowed(drafts[row])
            except ConstraintFailed as failure:
                self.failures[request] = failure
                continue
            # A row without a token to draw would get one of probability NaN: the ban of the end gives way.
            together = mask[own] | outside
            mask[own] = np.where(together.all(-1, keepdims=True), outside, together)
        return torch.from_numpy(mask).to(device)

    def compute_biases(self, rows: np.ndarray, device: torch.device) -> Biases | None:
        """Return what `logit_bias`, `frequency_penalty` and `presence_penalty` add to the logits [N, V] of rows [N];
        None if there are no such rows.

            logit[t] += logit_bias[t] - frequency_penalty * count[t] - presence_penalty * (count[t] > 0)

        with the number of times that token t stands in the answer (https://platform.openai.com/docs/api-reference).
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
                # Of the answer alone, with the part of it that an interrupted request has in its prompt.
                ids, counts = np.unique(self.tokens[row, start : self.length[row]], return_counts=True)
                values = -params.frequency_penalty * counts - params.presence_penalty
                entries += [(place, *entry) for entry in zip(ids.tolist(), values.tolist(), strict=True)]
        places, tokens, values = zip(*entries, strict=True) if entries else ((), (), ())
        return Biases(
            torch.tensor(places, dtype=torch.long, device=device),
            torch.tensor(tokens, dtype=torch.long, device=device),
            torch.tensor(values, dtype=torch.float32, device=device),
        )

    def collect_penalized_tokens(self, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        """[N, P] tokens so far of rows [N], padded with a row's own first token."""
        longest = int(self.length[rows].max())
        inside = np.arange(longest) < self.length[rows, None]
        tokens = np.where(inside, self.tokens[rows, :longest], self.tokens[rows, :1])
        return torch.from_numpy(tokens).to(device)

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
        # The last token of a prompt may be computed beside others' answers; before it all keys are of the same weights.
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
        """Forget what was derived from the rows that there are."""
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
        """Make the columns large enough. They grow in powers of two."""
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
    """Return the number of tokens that two prompts begin with alike."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
