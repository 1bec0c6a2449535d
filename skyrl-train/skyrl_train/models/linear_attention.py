"""Gated delta nets (https://arxiv.org/abs/2412.06464), the linear attention of Qwen3-Next and Qwen3.5, over packed rows
and over the rows of a cache.

transformers computes them over padded batch rows; in packed rows, a row would start with the state of its neighbour.
Here projections see all tokens, while the convolution and the delta rule (transformers' functions, or the kernels of
`flash-linear-attention` and `causal_conv1d` that these call) process separate rows.

Shapes: B rows, T tokens of each, N tokens of all, H heads of values, K and V the sizes of a head's keys and values, C
channels of the convolution, W its width.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from skyrl_train.models.packing import PackedRows
from skyrl_train.models.transformers_names import find_cache_argument

LINEAR_ATTENTION = "linear_attention"
"""Name of such layers in `layer_types` of a config."""
MODEL_TYPES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Types of (text) configs whose linear attention is supported."""
_CHUNK = 64
"""Chunk size in transformers' function [tokens]."""
_PARTS = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")


class DeltaState(NamedTuple):
    """State of rows after their last token."""

    conv: torch.Tensor
    """[B, C, W - 1] last inputs of the convolution, 0 before the first token."""
    recurrent: torch.Tensor
    """[B, H, K, V] float32"""


class DeltaCache(Protocol):
    """Cache of the states of running rows (`inference_engines/native/cache.py`)."""

    def delta_state(self, layer: int) -> DeltaState | None:
        """Return the states of the rows of the next pass; None: rows start from the beginning."""
        ...

    def put_delta_state(self, layer: int, state: DeltaState) -> None:
        """Store the states after the pass."""
        ...

    def delta_lengths(self) -> list[int] | None:
        """Return the number of non-padding tokens of each row of the pass; None: no padding."""
        ...


def find_delta_nets(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the supported linear-attention layers, in the model's order."""
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet") and _is_known(module):
            yield module


def has_delta_nets(config: Any) -> bool:
    """Return whether a model has layers of linear attention, according to its config."""
    return LINEAR_ATTENTION in (getattr(config.get_text_config(), "layer_types", None) or [])


def replace_delta_nets(model: nn.Module) -> int:
    """Replace the forward of these layers, in place, for packed rows and rows of a cache; padded rows with a mask still
    use transformers' forward. Returns the number of layers."""
    layers = list(find_delta_nets(model))
    for layer in layers:
        if not isinstance(layer.forward, DeltaNet):
            layer.forward = DeltaNet(layer)
    return len(layers)


def _is_known(module: nn.Module) -> bool:
    has_projections = hasattr(module, "in_proj_qkv") or hasattr(module, "fix_query_key_value_ordering")
    return has_projections and all(hasattr(module, name) for name in _PARTS)


class DeltaNet:
    """Replacement of one layer's forward."""

    def __init__(self, module: nn.Module):
        # Read at each pass: weights of a sharded model are gathered only then.
        self._module: Any = module
        # transformers' functions decide themselves whether to use a kernel of another library.
        self._own = module.forward
        self._cache_argument = find_cache_argument(module.forward, "cache_params")
        self._functions: Any = sys.modules[type(module).__module__]

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        *,
        cache: Any = None,
        packed_rows: PackedRows | None = None,
        native_step: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Compute the layer, with transformers' calling convention.

        Args:
            hidden_states: [1, N, D] of packed rows, else [B, T, D].
            cache, cache_params: a `DeltaCache` with a `native_step`, by either name.
        """
        cache_params = cache if cache_params is None else cache_params
        if packed_rows is None and native_step is None:
            given = {self._cache_argument: cache_params}
            return self._own(hidden_states, attention_mask=attention_mask, **given, **others)
        if attention_mask is not None:
            raise ValueError(f"{type(self._module).__name__} received a mask together with packed rows")
        # Projections see all tokens in one product, as adapters on them expect; only later operations depend on rows.
        mixed, z, b, a = self._project(hidden_states)
        beta = b.sigmoid()
        # In log space and float32, as in transformers: exp(A_log) overflows in half precision.
        decay = -self._module.A_log.float().exp() * F.softplus(a.float() + self._module.dt_bias)
        if packed_rows is not None:
            if packed_rows.prefixes or packed_rows.sequence_parallel is not None:
                raise ValueError(
                    "linear attention needs full rows: shared prefixes and sequence parallelism are not supported"
                )
            answer = packed_rows.apply_by_rows(self._compute_rows, mixed[0], decay[0], beta[0])[None]
        elif hidden_states.shape[1] == 1:
            answer = self._compute_next_token(mixed, decay, beta, cache_params)
        else:
            answer = self._compute_prompts(mixed, decay, beta, cache_params)
        module = self._module
        normed = module.norm(answer.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
        return module.out_proj(normed.reshape(*hidden_states.shape[:-1], -1))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute inputs of the convolution [..., C], gates of the output, and b and a [..., H]."""
        module = self._module
        if hasattr(module, "in_proj_qkv"):
            return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
        q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
        return torch.cat([each.flatten(2) for each in (q, k, v)], dim=-1), z, b, a

    def _compute_rows(self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Compute rows from their beginning: [B, T, C], [B, T, H], [B, T, H] -> [B, T, H, V]."""
        answer, _ = self._apply_rule(self._convolve(mixed.transpose(1, 2)), decay, beta, None)
        return answer

    def _compute_prompts(
        self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, cache: DeltaCache
    ) -> torch.Tensor:
        """Compute rows from their beginning, padded at the end, and store their states."""
        lengths = cache.delta_lengths()
        # A row starts here: states within a prompt are never stored, so none can be continued.
        assert lengths is not None and cache.delta_state(self._module.layer_idx) is None
        ends = torch.tensor(lengths, device=mixed.device)
        x, width = mixed.transpose(1, 2), self._module.conv1d.kernel_size[0]
        # Padding neither decays the state nor adds to it.
        real = (torch.arange(x.shape[2], device=x.device) < ends[:, None])[:, :, None]
        answer, recurrent = self._apply_rule(self._convolve(x), decay * real, beta * real, None)
        places = ends[:, None] + torch.arange(width - 1, device=x.device)  # in the row after W - 1 zeros
        before = F.pad(x, (width - 1, 0)).gather(2, places[:, None].expand(-1, x.shape[1], -1))
        cache.put_delta_state(self._module.layer_idx, DeltaState(before, recurrent))
        return answer

    def _compute_next_token(
        self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, cache: DeltaCache
    ) -> torch.Tensor:
        """Compute one token of each row from its state: T = 1."""
        state = cache.delta_state(self._module.layer_idx)
        assert state is not None
        # The same convolution as over a prompt, so that both give the same numbers; its first outputs are unused.
        x = torch.cat([state.conv, mixed.transpose(1, 2)], dim=2)
        answer, recurrent = self._apply_rule(self._convolve(x)[:, :, -1:], decay, beta, state.recurrent)
        cache.put_delta_state(self._module.layer_idx, DeltaState(x[:, :, 1:], recurrent))
        return answer

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the causal convolution, [B, C, T] -> [B, C, T]."""
        module = self._module
        weight = module.conv1d.weight.squeeze(1)
        return self._functions.causal_conv1d_fn(x, weight, module.conv1d.bias, activation=module.activation)

    def _apply_rule(
        self, x: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the delta rule, [B, C, T], [B, T, H] twice, [B, H, K, V] -> [B, T, H, V] and the final state."""
        module, num_tokens = self._module, x.shape[2]
        if state is None and x.device.type == "cpu" and num_tokens % _CHUNK == 0:
            # Without padding, a single row has gradients with other bits than in a batch: always add some.
            x, decay, beta = F.pad(x, (0, 1)), F.pad(decay, (0, 0, 0, 1)), F.pad(beta, (0, 0, 0, 1))
        num_keys, num_values = module.num_k_heads, module.num_v_heads
        sizes = [num_keys * module.head_k_dim, num_keys * module.head_k_dim, num_values * module.head_v_dim]
        q, k, v = x.transpose(1, 2).split(sizes, dim=-1)
        # Consecutive heads of values share a head of keys.
        q, k = (each.unflatten(2, (num_keys, -1)).repeat_interleave(num_values // num_keys, dim=2) for each in (q, k))
        # Chunks for many tokens, a recurrence for a single one: results agree up to rounding, not bit-exactly.
        rule = (
            self._functions.torch_chunk_gated_delta_rule
            if state is None
            else self._functions.torch_recurrent_gated_delta_rule
        )
        answer, state = rule(
            *(q, k, v.unflatten(2, (num_values, -1))),
            g=decay,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert state is not None
        return answer[:, :num_tokens], state
