"""Forward passes of the model: prefill of prompts, then one token per row; the results are logits. Handles cache rows
and adapter slots; independent of requests and scheduling.

Dimensions: n rows, P tokens of a prompt, T tokens it is padded to, D hidden width, V vocabulary.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from skyrl_train.expert_routes import route_dtype
from skyrl_train.inference_engines.native.attention import (
    KEY_BLOCK,
    MIN_ROWS,
    VECTOR,
    AttentionStep,
    SharedKeys,
    round_up,
)
from skyrl_train.inference_engines.native.cache import SlotCache
from skyrl_train.inference_engines.native.decode_graphs import DecodeGraphs, DecodeShape, pad_size
from skyrl_train.inference_engines.native.device_copies import upload
from skyrl_train.inference_engines.native.lora import Loras
from skyrl_train.inference_engines.native.prompt_scores import Head, apply_logit_rules
from skyrl_train.inference_engines.native.requests import NO_LORA
from skyrl_train.models.linear_attention import replace_delta_nets
from skyrl_train.models.routing_replay import KEYWORD, RoutingPass, RoutingReplay
from skyrl_train.models.scoring import read_logit_rule
from skyrl_train.models.transformers_names import find_cache_argument

logger = logging.getLogger(__name__)

MIN_GRAPH_KEYS = 8 * KEY_BLOCK
"""Smallest padded number of keys of a decoding pass by graphs."""


class ModelRunner:
    """A model with its cache and adapters.

    `prefill` and `decode` compute the same logits for a prompt's last token, bit-exactly if they do not depend on
    co-batched rows (`attention.py`): the output layer processes last tokens only, as separate rows.

    Args:
        model: loaded with the native attention, on its device, in eval mode
        max_num_seqs: maximum number of rows in use
        max_length: maximum length of a row
        max_cache_tokens: capacity of the cache (rows x length); None: no limit
        max_loras: maximum number of loaded adapters
        routing: expert routing of a mixture with recorded routes; None: not recorded
        use_graphs: decode by `DecodeGraphs`, if the model can be
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_length: int,
        max_cache_tokens: int | None,
        max_loras: int,
        routing: RoutingReplay | None = None,
        use_graphs: bool = False,
    ):
        self.model = model
        self.routes = np.zeros((0, 0, 0), np.uint8)
        """[tokens, L, k] experts of the last pass, row by row, if recorded."""
        self._routing = routing
        self.num_forwards = 0
        self.device = next(model.parameters()).device
        self.loras = Loras(model, max_loras=max_loras)
        self.has_states = replace_delta_nets(model) > 0
        """True if the model has linear attention: a row's past is a state, known only after its last token."""
        self.graphs: DecodeGraphs | None = None
        """Captured decoding passes; None: the model's kernels are launched one by one."""
        if use_graphs and (obstacle := self._find_graph_obstacle()):
            logger.info("decoding runs without CUDA graphs: %s", obstacle)
        elif use_graphs:
            vocabulary = model.get_output_embeddings().out_features  # pyright: ignore
            self.graphs = DecodeGraphs(self._compute_decode, vocabulary, self.device)
        on_cpu = self.device.type == "cpu" and model.dtype == torch.float32
        self.shares_keys = on_cpu and not self.has_states and self.graphs is None
        """True if decoding reads shared keys once: requires that equal tokens have bit-identical keys."""
        self._row_multiple = get_row_multiple(model)
        self._cache_argument = find_cache_argument(model.forward)
        self._logit_rule = read_logit_rule(model.config)
        num_layers = model.config.get_text_config().num_hidden_layers
        max_cache = math.inf if max_cache_tokens is None else max_cache_tokens
        self.cache = SlotCache(num_layers, self.round_up_rows(max_num_seqs), max_length, max_cache)
        self._prompts_end: torch.Tensor | None = None
        self._hidden = torch.empty(0)
        self._slots = np.empty(0, np.int64)
        output_layer: Any = model.get_output_embeddings()
        output_layer.register_forward_pre_hook(self._select_last_tokens)

    def round_up_rows(self, num_rows: int) -> int:
        """Round up the number of computed rows for `num_rows` sequences, so that a row does not depend on co-batched
        ones.
        """
        return round_up(max(num_rows, MIN_ROWS), self._row_multiple)

    def pad_decode_rows(self, num_rows: int) -> int:
        """Return the number of computed rows of a decoding pass over `num_rows` sequences."""
        own = self.round_up_rows(num_rows)
        if self.graphs is None:
            return own
        return min(round_up(pad_size(own, MIN_ROWS), self._row_multiple), self.cache.max_rows)

    def release(self) -> None:
        """Free the memory of cache and graphs. Graphs also hold the addresses of weights, which a sleep replaces."""
        self.cache.release()
        if self.graphs is not None:
            self.graphs.clear()

    def prefill(
        self, rows: list[int], prompts: Sequence[np.ndarray], starts: Sequence[int], slots: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute prompts into rows of the cache, which already have the first `starts[i]` tokens. Shorter suffixes are
        padded at the end.

        Args:
            slots: [n], adapter slots
        Returns:
            states of the computed tokens before the output layer [n, T, D], and float32 logits after the last ones
            [n, V]
        """
        rests = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        # The length is rounded up so that products have enough rows and elementwise kernels see full vectors; the
        # padding is at the end, hidden by causality.
        ids = np.zeros((len(rows), round_up(max(map(len, rests)), KEY_BLOCK)), np.int64)
        for index, rest in enumerate(rests):
            ids[index, : len(rest)] = rest
        is_whole = not any(starts)
        own = np.array([0] if is_whole else starts, np.int64)  # rows that all begin at 0 share a mask
        positions = upload(own[:, None] + np.arange(ids.shape[1]), self.device)
        self.cache.begin_prefill(rows, list(starts), [len(prompt) for prompt in prompts])
        if self.loras:
            # A prompt has enough tokens for its own product; rows are not gathered.
            self.loras.begin(slots, apart=True)
        self._prompts_end = upload(np.array([len(rest) - 1 for rest in rests], np.int64), self.device)
        self._slots = slots
        try:
            logits = self._forward(ids, AttentionStep(positions, is_whole))
            return self._hidden, logits[: len(rows), 0]
        finally:
            self._prompts_end, self._hidden = None, torch.empty(0)

    def decode(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        num_new: int,
        shared: SharedKeys | None = None,
    ) -> torch.Tensor:
        """Compute logits of the next token of the first rows of the cache, also after drafts.

        Args:
            ids, positions: [n, T], the last token of each row and its drafts, and their positions; the cache must have
                space
            slots: [n]
            num_new: number of leading rows with uncomputed tokens; the others are padding
            shared: keys shared by some of these rows
        Returns: [n, T, V] float32 logits
        """
        count, width = ids.shape
        if self.graphs is not None and width == 1:
            return self._replay_decode(self.graphs, ids[:, 0], positions[:, 0], slots)[:count, None]
        # Padding rows have token 0 at the first positions and write into unused rows of the cache.
        num_filling = self.round_up_rows(count) - count
        filling = np.broadcast_to(np.arange(width), (num_filling, width))
        where = upload(np.concatenate([positions, filling]), self.device)
        self.cache.begin_decode(where, round_up(int(positions.max()) + 1, KEY_BLOCK), num_new)
        if self.loras:
            self.loras.begin(pad_slots(slots, len(where)), apart=False)
        tokens = np.pad(ids, ((0, num_filling), (0, 0)))
        if shared is not None and num_filling:  # in the first group: their keys are finite
            with_filling = torch.cat([shared.groups[0], torch.arange(count, len(where))])
            shared = replace(shared, groups=(with_filling, *shared.groups[1:]))
        return self._forward(tokens, AttentionStep(where, is_decode=True, shared=shared))[:count]

    def _replay_decode(
        self, graphs: DecodeGraphs, ids: np.ndarray, positions: np.ndarray, slots: np.ndarray
    ) -> torch.Tensor:
        """Compute `decode` for one token [n] of each row, by a pass of a padded shape: [padded n, V]."""
        # Padding rows have token 0 at position 0 of unused rows of the cache, and no adapter.
        inputs = np.zeros((self.pad_decode_rows(len(ids)), 3), np.int64)
        inputs[:, 2] = NO_LORA
        inputs[: len(ids)] = np.stack([ids, positions, slots], axis=1)
        num_keys = min(pad_size(int(positions.max()) + 1, MIN_GRAPH_KEYS), self.cache.length)
        shape = DecodeShape(len(inputs), num_keys, is_adapted=bool((slots != NO_LORA).any()))
        self.num_forwards += 1
        state = self.cache.generation, self.loras.layout
        return graphs.run(inputs, shape, max_rows=self.cache.num_rows, state=state)

    def _compute_decode(self, inputs: torch.Tensor, shape: DecodeShape) -> torch.Tensor:
        """Compute logits [rows, V] of inputs [rows, 3], without reading values on the host: it may be captured."""
        positions = inputs[:, 1:2]
        self.cache.begin_decode(positions, shape.num_keys, shape.num_rows)
        self.loras.begin_by_row(inputs[:, 2] if shape.is_adapted else None)
        return self._call_model(inputs[:, :1], AttentionStep(positions, is_decode=True))[:, 0]

    def _find_graph_obstacle(self) -> str | None:
        """Return why decoding passes of this model cannot be captured; None if they can."""
        if self.has_states:
            return "states of linear attention advance in a number of rows that changes with every pass"
        if self._routing is not None:
            return "routes of experts are copied to the host in every pass (return_expert_routes)"
        if any(hasattr(module, "_is_expert_parallel") for module in self.model.modules()):
            return "the shapes of a mixture's products depend on the routes of its tokens"
        return None

    def build_head(self, slots: np.ndarray) -> Head:
        """Build the output layer for tokens of rows with these adapters [n]. Every token is a separate row, so results
        equal decoding bit-exactly.
        """
        output_layer: Any = self.model.get_output_embeddings()

        def logits(states: torch.Tensor, chunk: slice) -> torch.Tensor:
            if self.loras:
                self.loras.begin(pad_slots(slots[chunk], len(states)), apart=False)
            return apply_logit_rules(output_layer(states[:, None])[:, 0].float(), self._logit_rule)

        return logits

    def _forward(self, ids: np.ndarray, step: AttentionStep) -> torch.Tensor:
        """Compute float32 logits [rows, T, V] of the tokens that reach the output layer."""
        inputs: dict[str, Any] = {} if self._routing is None else {KEYWORD: RoutingPass()}
        logits = self._call_model(upload(ids, self.device), step, **inputs)
        self.num_forwards += 1
        if self._routing is not None:
            self.routes = _collect_routes(inputs[KEYWORD], self._routing)
        return logits.float()

    def _call_model(self, ids: torch.Tensor, step: AttentionStep, **inputs: Any) -> torch.Tensor:
        """Compute logits [rows, T, V] in the model's dtype, with the cache."""
        return self.model(
            input_ids=ids,
            position_ids=step.positions.expand(len(ids), -1),
            use_cache=True,
            native_step=step,
            **{self._cache_argument: self.cache},
            **inputs,
        ).logits

    def _select_last_tokens(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> object:
        """Reduce the input of the output layer from prompts [n, T, D] to their last tokens [filled n, 1, D]."""
        ends = self._prompts_end
        if ends is None:
            return None
        # Save the states of all tokens for prompt log-probs before all but the last are dropped.
        self._hidden = inputs[0]
        count, num_rows = len(ends), self.round_up_rows(len(ends))
        if self.loras:
            self.loras.begin(pad_slots(self._slots, num_rows), apart=False)
        last = self._hidden[torch.arange(count, device=ends.device), ends]
        return F.pad(last, (0, 0, 0, num_rows - count))[:, None]


def _collect_routes(routing: RoutingPass, replay: RoutingReplay) -> np.ndarray:
    """Return the routes of a pass, [tokens, L, k] in their compact type."""
    return routing.get_routes().to(route_dtype(replay.shape.num_experts)).cpu().numpy()


def pad_slots(slots: np.ndarray, num_rows: int) -> np.ndarray:
    """Pad the adapter slots of rows; padding rows use the first row's slot."""
    filled = np.full(num_rows, slots[0])
    filled[: len(slots)] = slots
    return filled


def get_row_multiple(model: torch.nn.Module) -> int:
    """Return the number of rows that fill vectors in every layer: 1 for multiples of 32, the usual widths."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    return VECTOR // math.gcd(VECTOR, *(layer.out_features for layer in layers))
