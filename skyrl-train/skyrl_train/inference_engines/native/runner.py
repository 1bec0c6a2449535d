"""Forward passes of the model: prompts into the cache, then one token a row; the results are logits. Knows rows of the
cache and slots of adapters, but no requests and no scheduling.

Dimensions: n rows, P tokens of a prompt, T tokens it is padded to, D hidden width, V vocabulary.
"""

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
from skyrl_train.inference_engines.native.lora import Loras
from skyrl_train.inference_engines.native.prompt_scores import Head, apply_logit_rules
from skyrl_train.models.linear_attention import use_delta_nets
from skyrl_train.models.routing_replay import KEYWORD, RoutingPass, RoutingReplay
from skyrl_train.models.scoring import logit_rule


class ModelRunner:
    """A model with its cache and adapters.

    A prompt's last token gets the same logits by `prefill` as by `decode`, to the bit where these do not depend on
    co-batched rows (`attention.py`): the output layer sees last tokens alone, as rows of their own.

    Args:
        model: loaded with the native attention, on its device, in eval mode
        max_num_seqs: rows that are used at the same time
        max_length: of a row
        max_cache_tokens: places in the cache; None: no limit
        max_loras: adapters that may be loaded at the same time
        routing: of a mixture whose routes are recorded; None: they are not
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
    ):
        self.model = model
        self.routes = np.zeros((0, 0, 0), np.uint8)
        """[tokens, L, k] experts of the last pass, row after row; of an engine that records them."""
        self._routing = routing
        self.num_forwards = 0
        self.device = next(model.parameters()).device
        self.loras = Loras(model, max_loras=max_loras)
        self.has_states = use_delta_nets(model) > 0
        """True if the model has linear attention: a row's past is a state, known behind its last token alone."""
        self.shares_keys = self.device.type == "cpu" and model.dtype == torch.float32 and not self.has_states
        """True if decoding reads keys that rows have in common once: where equal tokens have equal keys to the bit."""
        self._row_multiple = get_row_multiple(model)
        self._logit_rule = logit_rule(model.config)
        num_layers = model.config.get_text_config().num_hidden_layers
        max_cache = math.inf if max_cache_tokens is None else max_cache_tokens
        self.cache = SlotCache(num_layers, self.round_up_rows(max_num_seqs), max_length, max_cache)
        self._prompts_end: torch.Tensor | None = None
        self._hidden = torch.empty(0)
        self._slots = np.empty(0, np.int64)
        output_layer: Any = model.get_output_embeddings()
        output_layer.register_forward_pre_hook(self._select_last_tokens)

    def round_up_rows(self, num_rows: int) -> int:
        """Return the number of rows that are computed for `num_rows` sequences: rounded up, so that the numbers of a
        row do not depend on co-batched ones.
        """
        return round_up(max(num_rows, MIN_ROWS), self._row_multiple)

    def prefill(
        self, rows: list[int], prompts: Sequence[np.ndarray], starts: Sequence[int], slots: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill rows of the cache with prompts, of which they hold the first `starts[i]` tokens. Shorter rests are
        padded behind.

        Args:
            slots: [n], of the adapters that take part
        Returns:
            states of the computed tokens before the output layer [n, T, D], and float32 logits after the last ones
            [n, V]
        """
        rests = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        # The length is rounded up so that products have enough rows and elementwise kernels see whole vectors; the
        # padding is behind, where causality hides it.
        ids = np.zeros((len(rows), round_up(max(map(len, rests)), KEY_BLOCK)), np.int64)
        for index, rest in enumerate(rests):
            ids[index, : len(rest)] = rest
        is_whole = not any(starts)
        own = [0] if is_whole else starts  # rows that all begin at 0 share a mask
        positions = torch.tensor(own, device=self.device)[:, None] + torch.arange(ids.shape[1], device=self.device)
        self.cache.begin_prefill(rows, list(starts), [len(prompt) for prompt in prompts])
        if self.loras:
            # A prompt has many tokens, enough rows for a product of its own; no gathering of rows.
            self.loras.begin(slots, apart=True)
        self._prompts_end = torch.tensor([len(rest) - 1 for rest in rests], device=self.device)
        self._slots = slots
        try:
            logits = self._forward(torch.from_numpy(ids), AttentionStep(positions, is_whole))
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
        """The next token of the first rows of the cache, and those behind drafts.

        Args:
            ids, positions: [n, T], the token that each row ends with and its drafts, and where they stand; there is
                room in the cache
            slots: [n]
            num_new: first rows whose token was not computed before; the others only fill up
            shared: keys that some of these rows have in common
        Returns: [n, T, V] float32 logits
        """
        count, width = ids.shape
        # Dummy rows stand at the first positions with token 0 and write into rows of the cache beyond those in use.
        num_filling = self.round_up_rows(count) - count
        filling = np.broadcast_to(np.arange(width), (num_filling, width))
        where = torch.from_numpy(np.concatenate([positions, filling])).to(self.device)
        self.cache.begin_decode(where, round_up(int(positions.max()) + 1, KEY_BLOCK), num_new)
        if self.loras:
            self.loras.begin(pad_slots(slots, len(where)), apart=False)
        tokens = torch.from_numpy(np.pad(ids, ((0, num_filling), (0, 0))))
        if shared is not None and num_filling:  # with the first group: whatever they see is finite
            with_filling = torch.cat([shared.groups[0], torch.arange(count, len(where))])
            shared = replace(shared, groups=(with_filling, *shared.groups[1:]))
        return self._forward(tokens, AttentionStep(where, is_decode=True, shared=shared))[:count]

    def build_head(self, slots: np.ndarray) -> Head:
        """The output layer for tokens of rows with these adapters [n], every token as a row of its own: the bits of
        decoding."""
        output_layer: Any = self.model.get_output_embeddings()

        def logits(states: torch.Tensor, chunk: slice) -> torch.Tensor:
            if self.loras:
                self.loras.begin(pad_slots(slots[chunk], len(states)), apart=False)
            return apply_logit_rules(output_layer(states[:, None])[:, 0].float(), self._logit_rule)

        return logits

    def _forward(self, ids: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """[rows, T, V] float32 logits of the tokens that reach the output layer."""
        inputs: dict[str, Any] = {} if self._routing is None else {KEYWORD: RoutingPass()}
        output = self.model(
            input_ids=ids.to(self.device),
            position_ids=step.positions.expand(len(ids), -1),
            past_key_values=self.cache,
            use_cache=True,
            native_step=step,
            **inputs,
        )
        self.num_forwards += 1
        if self._routing is not None:
            self.routes = _collect_routes(inputs[KEYWORD], self._routing)
        return output.logits.float()

    def _select_last_tokens(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> object:
        """Reduce the input of the output layer from prompts [n, T, D] to their last tokens [filled n, 1, D]."""
        ends = self._prompts_end
        if ends is None:
            return None
        # Kept for prompt log-probs: the states of all tokens, before all but the last are dropped.
        self._hidden = inputs[0]
        count, num_rows = len(ends), self.round_up_rows(len(ends))
        if self.loras:
            self.loras.begin(pad_slots(self._slots, num_rows), apart=False)
        last = self._hidden[torch.arange(count, device=ends.device), ends]
        return F.pad(last, (0, 0, 0, num_rows - count))[:, None]


def _collect_routes(routing: RoutingPass, replay: RoutingReplay) -> np.ndarray:
    """Return the routes of a pass, [tokens, L, k] in their compact type."""
    return routing.routes().to(route_dtype(replay.shape.num_experts)).cpu().numpy()


def pad_slots(slots: np.ndarray, num_rows: int) -> np.ndarray:
    """Adapter slots of rows and of those behind them that only fill up, which go with the first."""
    filled = np.full(num_rows, slots[0])
    filled[: len(slots)] = slots
    return filled


def get_row_multiple(model: torch.nn.Module) -> int:
    """Rows whose activations fill whole vectors in every layer: 1 for widths that are multiples of 32, as usual."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    return VECTOR // math.gcd(VECTOR, *(layer.out_features for layer in layers))
