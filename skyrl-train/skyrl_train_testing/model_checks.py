"""Invariances of a model's forward and gradient: the numbers of the plainest forward there is, however rows lie.

Shapes: B rows, T columns (prompts padded on the left, responses on the right), R response columns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.training_batch import TensorBatch
from skyrl_train_testing.findings import Findings
from skyrl_train_testing.loss_checks import Outputs

_NUM_RESPONSE = 6
_MICRO_SIZES = (1, 2, 4)


def check_model_forward(
    causal_lm: nn.Module | str,
    *,
    scoring: Callable[..., nn.Module] = ScoringModel,
    packing: Sequence[bool] = (True, False),
    temperature: float = 0.7,
    name: str | None = None,
    exempt: Mapping[str, str] | None = None,
) -> None:
    """Compare log-probs, entropy and every parameter's gradient with a plain float64 forward pass: row by row, without
    padding, from whole logits. Then repeat with padding on either side, other micro-batches, another row order and
    other padding tokens.

    Args:
        causal_lm: a small transformers model on the CPU, or the folder of one.
        scoring: makes what is checked, of such a model: `scoring(causal_lm, packing=...)`, called as `ScoringModel` is.
        packing: the values of that argument to check.
        temperature: of the log-probs; not 1, so that a missing temperature is detected.
        name: what to call it in the error. None: the type of the model.
        exempt: invariances that do not apply to this model, each with the reason.

    Raises:
        InvarianceError: lists all violations with numbers.
    """
    if isinstance(causal_lm, str):
        causal_lm = load_causal_lm(causal_lm, device=torch.device("cpu"))
    findings = Findings(f"the forward of {name or type(causal_lm).__name__}", exempt)
    batch = make_model_batch(_count_words(causal_lm))
    kept = batch.tensor("attention_mask")[:, -_NUM_RESPONSE:] != 0
    plain = _compute_plain_outputs(deepcopy(causal_lm).double(), batch, temperature)
    for packed in packing:
        model = scoring(deepcopy(causal_lm), packing=packed)
        layout = "packed" if packed else "padded"
        for invariance, words, variant, parts, back in _build_variants(batch):
            words = f"{layout} rows{words}"
            with findings.attempt(invariance, words):
                outputs = _compute_outputs(model, variant, parts, back, temperature)
                for what, value in plain.items():
                    largest = value.abs().max().item()
                    mask = kept if value.shape == kept.shape else None
                    findings.compare(invariance, words, what, value, outputs[what], mask, absolute=2e-5 * largest)
                    if mask is not None:
                        got = outputs[what]
                        findings.compare("masked_output", words, what, torch.zeros_like(got), got, ~mask, absolute=0)
    findings.finish()


def make_model_batch(num_words: int) -> TensorBatch:
    """Make sequences [7, 11] of prompts of 1 to 5 tokens and responses of 1 to 6, and weights [7, 6] of their
    tokens."""
    draw = torch.Generator().manual_seed(0)
    num_prompt = torch.tensor([5, 1, 3, 4, 2, 5, 1])
    num_response = torch.tensor([6, 4, 1, 6, 3, 2, 5])
    columns = torch.arange(-5, _NUM_RESPONSE)
    mask = (columns >= -num_prompt[:, None]) & (columns < num_response[:, None])
    sequences = torch.randint(num_words, mask.shape, generator=draw)
    weights = torch.randn(7, 2, _NUM_RESPONSE, generator=draw)
    return TensorBatch(
        sequences=torch.where(mask, sequences, 0),
        attention_mask=mask.long(),
        log_prob_weights=weights[:, 0],
        entropy_weights=weights[:, 1],
    )


Back = Callable[[torch.Tensor], torch.Tensor]


def _build_variants(batch: TensorBatch) -> Iterator[tuple[str, str, TensorBatch, list[torch.Tensor], Back]]:
    """(invariance, words, the batch, rows of each micro-batch, how its outputs become the original's [B, R])."""
    rows = torch.arange(len(batch))
    sequences, mask = batch.tensor("sequences"), batch.tensor("attention_mask")

    def same(output: torch.Tensor) -> torch.Tensor:
        return output

    yield "agreement", "", batch, [rows], same
    for size in _MICRO_SIZES:
        yield "micro_batches", f" in micro-batches of {size}", batch, list(rows.split(size)), same
    order = torch.tensor([3, 6, 0, 5, 2, 4, 1])
    yield "row_order", ", shuffled", batch.rows(order), [rows], lambda output: output[order.argsort()]
    rubbish = torch.where(mask != 0, sequences, sequences.max())
    words = " with another word at padding"
    yield "masked_garbage", words, TensorBatch(dict(batch), sequences=rubbish), [rows], same
    for left, right in ((3, 0), (0, 2), (4, 5)):
        wider = dict(batch)
        for column in ("sequences", "attention_mask"):
            wider[column] = nn.functional.pad(batch.tensor(column), (left, right))
        for column in ("log_prob_weights", "entropy_weights"):
            wider[column] = nn.functional.pad(batch.tensor(column), (0, right))
        words = f" with {left} columns of padding on the left and {right} on the right"
        yield "padding", words, TensorBatch(wider), [rows], lambda output: output[:, :_NUM_RESPONSE]


def _compute_outputs(
    model: nn.Module, batch: TensorBatch, parts: list[torch.Tensor], back: Back, temperature: float
) -> Outputs:
    num_response = batch.tensor("log_prob_weights").shape[1]
    log_probs, entropy = (torch.zeros_like(batch.tensor("log_prob_weights")) for _ in range(2))
    model.zero_grad()
    for rows in parts:
        part = batch.rows(rows)
        inputs = part.tensor("sequences"), part.tensor("attention_mask")
        scores = model(*inputs, num_response, temperature, with_entropy=True)
        weighted = _compute_weighted_sum(part, scores.log_probs, scores.entropy)
        weighted.backward()
        log_probs[rows], entropy[rows] = scores.log_probs.detach(), scores.entropy.detach()
    return {"the log-prob": back(log_probs), "the entropy": back(entropy), **_collect_gradients(model)}


def _compute_plain_outputs(causal_lm: nn.Module, batch: TensorBatch, temperature: float) -> Outputs:
    size = len(batch), _NUM_RESPONSE
    log_probs, entropy = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for row, (ids, mask) in enumerate(zip(batch.tensor("sequences"), batch.tensor("attention_mask"), strict=True)):
        own = ids[mask != 0]
        num_own = int(mask[-_NUM_RESPONSE:].sum())
        logits = causal_lm(input_ids=own[None]).logits[0, -num_own - 1 : -1].double() / temperature
        distribution = logits.log_softmax(-1)
        log_probs[row, :num_own] = distribution.gather(1, own[-num_own:, None])[:, 0]
        entropy[row, :num_own] = -(distribution.exp() * distribution).sum(-1)
    _compute_weighted_sum(batch, log_probs, entropy).backward()
    return {"the log-prob": log_probs.detach(), "the entropy": entropy.detach(), **_collect_gradients(causal_lm)}


def _compute_weighted_sum(batch: TensorBatch, log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Return a scalar with a different weight for every response token."""
    mask = batch.tensor("attention_mask")[:, -log_probs.shape[1] :]
    terms = batch.tensor("log_prob_weights") * log_probs + batch.tensor("entropy_weights") * entropy
    return (mask * terms).sum()


def _collect_gradients(model: nn.Module) -> Outputs:
    """Return the gradient of every parameter, under its name in the transformers model."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        gradients[f"the gradient in {name.removeprefix('causal_lm.')}"] = gradient
    return gradients


def _count_words(causal_lm: Any) -> int:
    return causal_lm.get_input_embeddings().num_embeddings
