"""Check at loading that a model in its training form matches transformers' forward.

Training never uses that forward: rows are packed, attention is replaced, logits are computed in chunks. A model with a
component that this ignores would silently train on wrong numbers, so each model is compared once at loading.

The reference is transformers' `eager` attention. If its forward calls a fused kernel nevertheless, that kernel would be
compared with itself, so it is rejected as a reference. A model with custom attention functions, not registered with
transformers, has no other definition: all of its functions must give the same numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from skyrl_train.errors import ConfigError
from skyrl_train.models.linear_attention import LINEAR_ATTENTION, find_delta_nets
from skyrl_train.models.packing import PackedRows
from skyrl_train.models.scoring import ScoringModel, build_layout, compute_hidden_states
from skyrl_train.models.value_model import ValueModel

_LENGTHS = ((4, 6), (1, 3), (5, 1), (17, 2), (17, 4))
"""Prompt and response tokens of the trial rows: ragged, so that attention across rows is detected. The last two share a
prompt, which is computed once with prefix sharing."""

_TEMPERATURE = 1.3

_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""Largest accepted difference of log-probs [nats], by number format. A wrong computation differs by 0.1 and more;
different kernels of one number format differ by less than this over many layers."""

_ATTENTION_OF_SETTINGS = {
    "trainer.use_sample_packing=false": "sdpa",
    "trainer.flash_attn=false": "eager",
}

_NO_REFERENCE = (
    "its forward calls a fused attention kernel although eager attention is set, so there is no reference to compare "
    "with"
)


def check_scoring(model: ScoringModel | ValueModel, name: str) -> None:
    """Compare the scores of a few random tokens. Call it before sharding; runs identically on every rank, no
    collective.

    Args:
        name: name of the model, for the error.

    Raises:
        ConfigError: the numbers differ, or the settings do not support the model; names supporting settings, if any.
    """
    problem = _find_problem(model)
    if problem is None:
        return
    choices = ["trainer.use_sample_packing=false"] if model.packing else []
    choices += ["trainer.flash_attn=false"]
    solved = {None} if _get_transformers_model(model).config._attn_implementation == "eager" else {None, _NO_REFERENCE}
    # (A model may choose its attention at construction: loaded as eager it is compared again.)
    working = [setting for setting in choices if _find_problem(model, _ATTENTION_OF_SETTINGS[setting]) in solved]
    advice = f"Set {working[0]}." if working else "No setting changes this: the model cannot be trained here."
    raise ConfigError(f"{name} cannot be trained with these settings: {problem}. {advice}")


@torch.no_grad()
def _find_problem(model: ScoringModel | ValueModel, attention: str | None = None) -> str | None:
    """Describe the difference to transformers, or return None; with another attention implementation (padded)
    if given."""
    try:
        with _build_copy_with_attention(model, attention):
            return _find_unknown_parts(model) or _compute_difference(model)
    except ValueError as error:  # transformers' or our attention does not support the model's arguments
        return str(error)
    except Exception as error:  # any error of a model's code with an unsupported layout
        return f"its forward fails ({type(error).__name__}: {error})"


@contextmanager
def _build_copy_with_attention(model: ScoringModel | ValueModel, attention: str | None) -> Iterator[None]:
    inner, before = _get_transformers_model(model), (model.packing, model.sequence_parallel)
    implementation = inner.config._attn_implementation
    if attention is None and implementation.startswith("flash"):  # which does not support float32
        attention = "sdpa"
    try:
        model.sequence_parallel = None
        if attention is not None:
            model.packing = False
            _set_attention(inner, attention)
        yield
    finally:
        model.packing, model.sequence_parallel = before
        _set_attention(inner, implementation)


def _set_attention(inner: Any, implementation: str) -> None:
    if inner._can_set_attn_implementation():
        inner.set_attn_implementation(implementation)
    else:  # an older model, whose layers read this at each call
        inner.config._attn_implementation_internal = implementation


def _get_transformers_model(model: ScoringModel | ValueModel) -> Any:
    return model.causal_lm if isinstance(model, ScoringModel) else model.backbone


def _find_unknown_parts(model: ScoringModel | ValueModel) -> str | None:
    """List properties that a few tokens would not reveal: caps on small scores, windows longer than the trial rows."""
    config = model.config.get_text_config()
    if not model.packing:
        cap = getattr(config, "attn_logit_softcapping", None)
        is_capped = cap and config._attn_implementation != "eager"
        return f"its attention caps scores (attn_logit_softcapping={cap})" if is_capped else None
    sequences, mask, num_response = _build_trial(model)
    layout = build_layout(sequences, mask, num_response, True, None)
    inner = _get_transformers_model(model)
    if unknown := find_unknown_layers(inner):
        return f"it has layers of another kind ({unknown}), whose state would leak between packed rows"
    compute_hidden_states(inner, layout)
    assert layout.rows is not None
    return find_differing_rules(config, layout.rows)


def find_unknown_layers(model: Any) -> str:
    """Name the layer kinds of a transformers model that packed rows do not support; "" for none."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    known = {"full_attention", "sliding_attention"}
    if kinds.count(LINEAR_ATTENTION) == len(list(find_delta_nets(model))):
        known.add(LINEAR_ATTENTION)
    return ", ".join(sorted(set(kinds) - known))


def find_differing_rules(config: Any, rows: PackedRows) -> str | None:
    """Describe differences between windows and caps requested by attention layers and the model's (text) config, or
    return None."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    # Only layers with an attention function record their requests.
    kinds = [kind for kind in kinds if kind != LINEAR_ATTENTION]
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    if not rows.windows:
        return "its attention cannot be replaced by attention for packed rows"
    if rows.windows != expected:
        return f"its config has the sliding windows {expected}, its layers use {rows.windows}"
    cap = getattr(config, "attn_logit_softcapping", None)
    if rows.softcaps != [cap] * len(rows.softcaps):
        return f"its config caps scores (attn_logit_softcapping={cap}), its layers use {rows.softcaps}"
    return None


def _compute_difference(model: ScoringModel | ValueModel) -> str | None:
    sequences, mask, num_response = _build_trial(model)
    if isinstance(model, ScoringModel):
        ours = model(sequences, mask, num_response, _TEMPERATURE).log_probs
    else:
        ours = model(sequences, mask, num_response)
    tolerance = _TOLERANCE[next(model.parameters()).dtype]
    for attention in _select_reference_attention(_get_transformers_model(model)):
        fused = _FusedAttention()
        with fused:
            expected = _compute_expected(model, attention, ours, sequences, mask)
        if attention == "eager" and fused.calls:
            return _NO_REFERENCE
        difference = (ours - expected).abs().max().item()
        if not difference <= tolerance:
            what = "log-probs" if isinstance(model, ScoringModel) else "values"
            return (
                f"{what} of random tokens differ from the model's own forward by {difference:.3g} (> {tolerance}) "
                f"with its {attention} attention"
            )
    return None


def _select_reference_attention(inner: Any) -> Sequence[str]:
    """Return implementations of attention that must all give the numbers of training."""
    written_by_the_model = not inner._can_set_attn_implementation()
    return ("eager", "sdpa") if written_by_the_model and inner._supports_sdpa else ("eager",)


def _compute_expected(
    model: ScoringModel | ValueModel, attention: str, ours: torch.Tensor, sequences: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Compute scores in the form of `ours` with the model's own forward, row by row."""
    expected = torch.zeros_like(ours)
    inner, reference = _get_transformers_model(model), _build_reference(model)
    implementation = inner.config._attn_implementation
    _set_attention(inner, attention)
    try:
        for row, (num_prompt, length) in enumerate(_LENGTHS):
            ids = sequences[row][mask[row].bool()]
            expected[row, :length] = reference(ids)[num_prompt - 1 :]
    finally:
        _set_attention(inner, implementation)
    return expected


class _FusedAttention(TorchFunctionMode):
    """Counter of calls of fused attention kernels: torch's, or operators of an extension."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = str(getattr(func, "__name__", func))
        self.calls += "attention" in name or "attn" in name
        return func(*args, **(kwargs or {}))


def _build_reference(model: ScoringModel | ValueModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build a scorer from the model's own forward: tokens [L] of a row -> scores of all but the first [L - 1]."""

    def log_probs(ids: torch.Tensor) -> torch.Tensor:
        logits = _get_transformers_model(model)(input_ids=ids[None], use_cache=False).logits[0, :-1]
        return (logits.float() / _TEMPERATURE).log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]

    def compute_values(ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, ValueModel)
        hidden = model.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        return model.head(hidden)[:, 0].float()

    return log_probs if isinstance(model, ScoringModel) else compute_values


def _build_trial(model: ScoringModel | ValueModel) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Build random sequences [B, T], their mask, padded like a training batch, and R."""
    num_prompt, num_response = (max(lengths) for lengths in zip(*_LENGTHS, strict=True))
    table = _get_transformers_model(model).get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    shape = (len(_LENGTHS), num_prompt + num_response)
    sequences = torch.randint(table.shape[0], shape, generator=generator)
    sequences[-1, :num_prompt] = sequences[-2, :num_prompt]
    columns = torch.arange(shape[1])
    lengths = torch.tensor(_LENGTHS)
    mask = (columns >= num_prompt - lengths[:, :1]) & (columns < num_prompt + lengths[:, 1:])
    return sequences.to(table.device), mask.long().to(table.device), num_response
