"""A causal language model for training: it takes sequences and returns log-probs, never logits.

Shapes: B sequences, T tokens of prompt and response, R of the response, H hidden size, V vocabulary size.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from skyrl_train.distributed.ulysses import SequenceParallel
from skyrl_train.errors import ConfigError
from skyrl_train.expert_routes import no_route, route_dtype
from skyrl_train.models.attention import PACKED_ATTENTION
from skyrl_train.models.experts import Routers, RouterStatistics
from skyrl_train.models.linear_attention import has_delta_nets, replace_delta_nets
from skyrl_train.models.packing import Layout, pack_rows, pad_rows
from skyrl_train.models.routing_replay import KEYWORD, RoutingPass, RoutingReplay
from skyrl_train.models.token_log_probs import KeptIds, LogitRule, compute_candidate_log_probs, compute_top_log_probs


class TokenScores(NamedTuple):
    """Scores of the response tokens, 0 at padding columns. (A tuple, so that FSDP finds the tensors in it.)"""

    log_probs: torch.Tensor
    """[B, R] float32, under softmax(logits / temperature)."""

    entropy: torch.Tensor | None
    """[B, R] float32, in nats, of the same distribution; None if not requested."""

    router: RouterStatistics | None
    """Routing statistics of this rank's tokens, for a mixture of experts."""

    routes: torch.Tensor | None = None
    """[B, T, L, k] experts used by each token, "no route" at padding; None if not requested."""

    candidates: torch.Tensor | None = None
    """[B, R, K] log-probs of the requested candidate tokens, of the same distribution."""

    top: tuple[torch.Tensor, torch.Tensor] | None = None
    """Ids and log-probs [B, R, K] of the most likely tokens, in descending order; None if not requested."""


class ScoringModel(nn.Module):
    """Root module for FSDP, so that the output layer is gathered when the log-probs are computed in its forward.

    Args:
        causal_lm: a transformers model. Its parameters keep their names, under "causal_lm.".
        packing: pack rows without padding; else use the model's attention and padding.
        chunk_size: tokens per chunk of logits.
        compile: compile the computation of log-probs from hidden states.
        sequence_parallel: ranks that share each micro-batch. Needs `packing`.
        replay_setting: setting that requests replay or recording of routes; None: unsupported.
        share_prefixes: compute common prompt prefixes of a micro-batch once. Not in a mixture of experts, whose load
            counts every token, nor with linear attention, where each row would need the state at the end of the prefix.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        *,
        packing: bool = True,
        chunk_size: int = 1024,
        compile: bool = False,
        sequence_parallel: SequenceParallel | None = None,
        replay_setting: str | None = None,
        share_prefixes: bool = False,
    ):
        super().__init__()
        set_attention(causal_lm, packing, sequence_parallel)
        self.causal_lm: Any = causal_lm
        self.packing = packing
        self.chunk_size = chunk_size
        self.compile_scores = compile
        self.sequence_parallel = sequence_parallel
        self.rule = read_logit_rule(self.causal_lm.config)
        self.routers = Routers(causal_lm)
        self.share_prefixes = share_prefixes and not self.routers and not has_delta_nets(self.causal_lm.config)
        self.routing_replay = None if replay_setting is None else RoutingReplay(causal_lm, replay_setting)
        # FSDP and the device planner read it from the root, which is this module.
        self._no_split_modules = getattr(causal_lm, "_no_split_modules", None)
        head = self.causal_lm.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"the output layer of {type(causal_lm).__name__} is a {type(head).__name__}: only linear output "
                "layers are supported. If it is an adapter, remove the output layer from lora.target_modules."
            )

    @property
    def config(self) -> Any:
        """Config of the transformers model."""
        return self.causal_lm.config

    def forward(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        num_response: int,
        temperature: float,
        *,
        with_entropy: bool = False,
        routes: torch.Tensor | None = None,
        record_routes: bool = False,
        candidates: torch.Tensor | None = None,
        num_top: int = 0,
        kept: tuple[torch.Tensor, torch.Tensor] | None = None,
        layout: Layout | None = None,
    ) -> TokenScores:
        """Compute the log-probs of the response tokens under softmax(logits / temperature), and its entropy.

        Args:
            sequences, attention_mask: [B, T]; prompts padded on the left, responses (the last `num_response` columns)
                on the right. Values at padding are ignored. A token without a predecessor gets 0.
            routes: [B, T, L, k] experts to replay (`expert_routes.py`); None: the routers choose.
            record_routes: return the experts used by each token.
            candidates: [B, R, K] ids whose log-probs at each response position are also returned.
            num_top: number of most likely tokens to return for each response token.
            kept: counts [B, R] and ids [B, M] of the tokens that each response token was sampled from
                (`kept_tokens.py`): log-probs and entropy are over these. None: over the vocabulary.
            layout: `build_layout` of the batch, on the model's device; None: built here, which reads values of the
                mask.
        """
        if layout is None:
            layout = self.build_layout(sequences, attention_mask, num_response)
        routing = self._build_routing_pass(layout, routes, record_routes)
        # Padding is routed as well: without the mask its tokens would count as load.
        with self.routers.collect(layout.real, routing) as heard:
            hidden = compute_hidden_states(self.causal_lm, layout, routing)
        # Only states that predict a response token are kept: logits of prompts would be most of the work and memory.
        hidden, labels = layout.select_scored(hidden)
        head = self.causal_lm.get_output_embeddings()
        distribution: dict[str, Any] = dict(
            bias=head.bias, temperature=temperature, rule=self.rule, chunk_size=self.chunk_size
        )
        log_probs, entropy, of_candidates = compute_candidate_log_probs(
            hidden,
            head.weight,
            labels,
            None if candidates is None else layout.select_scored_columns(candidates),
            with_entropy=with_entropy,
            compile=self.compile_scores,
            kept=None if kept is None else _select_kept_ids(layout, *kept),
            **distribution,
        )
        top = compute_top_log_probs(hidden, head.weight, num_top, **distribution) if num_top else None
        return TokenScores(
            layout.scatter_scored(log_probs),
            None if entropy is None else layout.scatter_scored(entropy),
            heard.build_statistics() if self.routers else None,
            self._collect_routes(layout, routing, sequences.shape[1]) if record_routes else None,
            None if of_candidates is None else layout.scatter_scored(of_candidates),
            None if top is None else (layout.scatter_scored(top[0]), layout.scatter_scored(top[1])),
        )

    def build_layout(self, sequences: torch.Tensor, attention_mask: torch.Tensor, num_response: int) -> Layout:
        """Build the layout of a batch for this model, on the batch's device."""
        return build_layout(
            sequences, attention_mask, num_response, self.packing, self.sequence_parallel, self.share_prefixes
        )

    def _build_routing_pass(self, layout: Layout, routes: torch.Tensor | None, record: bool) -> RoutingPass | None:
        """Return the routes of a forward in the order of its tokens, or None without replay or recording."""
        if routes is None and not record:
            return None
        assert self.routing_replay is not None, "the model was created without routing replay"
        return RoutingPass(None if routes is None else layout.gather_from_batch(routes, no_route(routes.dtype)))

    def _collect_routes(self, layout: Layout, routing: RoutingPass | None, num_columns: int) -> torch.Tensor:
        """Return the routes of a forward [B, T, L, k]. A collective with sequence parallelism."""
        assert self.routing_replay is not None and routing is not None
        num_experts = self.routing_replay.shape.num_experts
        kind = route_dtype(num_experts)
        # int64 until gathered: process groups do not send int16.
        return layout.scatter_to_batch(routing.get_routes(), num_columns, no_route(kind)).to(kind)


def _select_kept_ids(layout: Layout, counts: torch.Tensor, ids: torch.Tensor) -> KeptIds:
    """Return the kept tokens of this rank's scored tokens, from counts [B, R] and ids [B, M]."""
    counts = counts.long()
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    starts = rows * ids.shape[1] + counts.cumsum(1) - counts
    return KeptIds(ids.flatten(), layout.select_scored_columns(starts), layout.select_scored_columns(counts))


def build_layout(
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    num_response: int,
    packing: bool,
    sequence_parallel: SequenceParallel | None,
    share_prefixes: bool = False,
) -> Layout:
    """Build the layout of a micro-batch for the model."""
    if packing:
        return pack_rows(sequences, attention_mask, num_response, sequence_parallel, share_prefixes=share_prefixes)
    return pad_rows(sequences, attention_mask, num_response)


def compute_hidden_states(model: Any, layout: Layout, routing: RoutingPass | None = None) -> torch.Tensor:
    """Run a transformers model up to its output layer, if it has one: [b, n, H].

    Raises:
        ValueError: the model does not expose its hidden states, or its routing (`RoutingPass`) does not reach its
            routers.
    """
    inputs = layout.build_inputs() if routing is None else layout.build_inputs() | {KEYWORD: routing}
    # Only the decoder: the output layer of a transformers model would compute all logits at once, [b, n, V].
    output = model.get_decoder()(**inputs, use_cache=False)
    if getattr(output, "last_hidden_state", None) is None:
        raise ValueError(f"{type(model).__name__} does not return the hidden states before its output layer")
    if routing is not None and len(routing.taken) == 0:
        raise ValueError(f"{type(model).__name__} does not pass the routes to replay on to its layers")
    return output.last_hidden_state


def set_attention(model: Any, packing: bool, sequence_parallel: SequenceParallel | None) -> None:
    """Set the attention of a transformers model for packed rows, if rows are packed."""
    if sequence_parallel is not None:
        # Ulysses distributes heads over the ranks, so their number must be divisible; checked here and not in the first
        # forward.
        sequence_parallel.check_heads(model.config.get_text_config().num_attention_heads)
        if has_delta_nets(model.config):
            raise ConfigError(
                f"sequence_parallel_size={sequence_parallel.size} cannot be used with {model.config.model_type}: its "
                "linear attention needs full rows. Set it to 1"
            )
    if packing:
        model.set_attn_implementation(PACKED_ATTENTION)
        replace_delta_nets(model)
    elif sequence_parallel is not None:
        raise ConfigError(
            f"sequence_parallel_size={sequence_parallel.size} needs packed rows: set trainer.use_sample_packing=true "
            "and trainer.flash_attn=true"
        )


def read_logit_rule(config: Any) -> LogitRule:
    """Read the model's transformation of its logits from its config."""
    text = config.get_text_config()
    # Two families have opposite conventions: Cohere multiplies by logit_scale, Granite divides by logits_scaling.
    multiplier = getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1)
    return LogitRule(float(multiplier), getattr(text, "final_logit_softcapping", None))
