"""Verification that a sharded model matches the transformers model: gathered weights must be bit-exact, and scores
(log-probs, or a critic's values) must agree.

Computed once, when a model is loaded, and logged in one line. A mismatch is an error that names the weight.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.errors import ConfigError
from skyrl_train.models.build import get_transformer
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_backends.megatron.loading import FullModel, get_full_weights
from skyrl_train.training_batch import TrainingInputBatch

LENGTHS = ((4, 6), (1, 3), (5, 1))
"""Prompt and response tokens of the compared rows: ragged, so that attention across rows is detected."""

TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 0.3}
"""Largest accepted difference of scores by compute dtype: absolute up to 1, relative above."""


def verify_model(
    path: str,
    whole: FullModel | None,
    gathered: Iterable[tuple[str, torch.Tensor]],
    score: Callable[[TrainingInputBatch], torch.Tensor],
    num_words: int,
    *,
    held: torch.dtype,
    computed: torch.dtype,
) -> str:
    """Compare a sharded model with the unsharded one of rank 0. A collective.

    Args:
        path: path of the model, for errors.
        whole: on rank 0; None elsewhere.
        gathered: weights of the sharded model.
        score: scores of the response tokens of a micro-batch.
        held, computed: dtypes of the stored weights and of the computation.

    Returns:
        a line for the log.

    Raises:
        ConfigError: the models differ; the same error on every rank.
    """
    number, problem = check_weights(gathered, None if whole is None else get_full_weights(whole), held)
    sequences, mask, num_response = build_trial(num_words)
    batch = TrainingInputBatch(sequences=sequences, attention_mask=mask, metadata={"response_length": num_response})
    got = score(batch)
    difference = 0.0
    if whole is not None:
        expected = compute_expected_scores(whole)
        difference = float(((got - expected).abs() / expected.abs().clamp(min=1)).max())
    # Broadcast rank 0's result, or the others would continue training while it stops.
    found = [(number, problem, difference, "values" if isinstance(whole, ValueModel) else "log-probs")]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(found, 0)
    return report_verification(*found[0], computed, path)


def check_weights(
    gathered: Iterable[tuple[str, torch.Tensor]], original: Mapping[str, torch.Tensor] | None, dtype: torch.dtype
) -> tuple[int, str | None]:
    """Compare gathered weights with the transformers model. Always consumes the iterator, as gathering is a collective.

    Args:
        original: on rank 0; None elsewhere, where nothing is compared.
        dtype: dtype of the stored weights.

    Returns:
        number of weights, and a description of the first that differs.
    """
    problem = None
    names = set()
    for name, tensor in gathered:
        names.add(name)
        if original is None or problem is not None:
            continue
        if name not in original:
            problem = f"{name} is not a weight of the transformers model"
            continue
        expected = original[name].to(dtype).float()
        problem = _describe_difference(name, expected, tensor.cpu().float())
    if original is not None and problem is None:
        lost = [name for name in original if name not in names]
        if lost:
            problem = f"{lost[0]} is lost"
    return len(names), problem


def _describe_difference(name: str, expected: torch.Tensor, got: torch.Tensor) -> str | None:
    if expected.shape != got.shape:
        return f"{name} has the shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    wrong = int((expected != got).sum())
    if wrong:
        return f"{name} differs in {wrong} of {expected.numel()} numbers"
    return None


def build_trial(num_words: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Build random sequences [B, T], their mask, padded like a training batch, and R."""
    num_prompt, num_response = (max(lengths) for lengths in zip(*LENGTHS, strict=True))
    draw = torch.Generator().manual_seed(0)
    sequences = torch.randint(num_words, (len(LENGTHS), num_prompt + num_response), generator=draw)
    columns, lengths = torch.arange(num_prompt + num_response), torch.tensor(LENGTHS)
    mask = (columns >= num_prompt - lengths[:, :1]) & (columns < num_prompt + lengths[:, 1:])
    return sequences, mask.long(), num_response


@torch.no_grad()
def compute_expected_scores(model: FullModel) -> torch.Tensor:
    """Score the trial with a transformers model's own forward and eager attention, row by row: [B, R], 0 at padding."""
    transformer: Any = get_transformer(model)
    transformer.set_attn_implementation("eager")
    sequences, mask, num_response = build_trial(transformer.config.vocab_size)
    expected = torch.zeros(len(sequences), num_response)
    for row, (num_prompt, length) in enumerate(LENGTHS):
        ids = sequences[row][mask[row].bool()]
        output = transformer(input_ids=ids[None], use_cache=False)
        # The state before a token gives its score.
        if isinstance(model, ValueModel):
            scores = output.last_hidden_state[0, :-1].float() @ model.head.weight[0].float()
        else:
            scores = output.logits[0, :-1].float().log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]
        expected[row, :length] = scores[num_prompt - 1 :]
    return expected


def report_verification(
    num_weights: int, problem: str | None, difference: float, scores: str, dtype: torch.dtype, path: str
) -> str:
    """Return the log line, or raise ConfigError.

    Args:
        problem: problem of the weights; None: they are equal.
        difference: largest difference of scores.
        scores: their name.
    """
    tolerance = TOLERANCE[dtype]
    if problem is not None:
        raise ConfigError(
            f"{path}: the weight mapping between transformers and megatron-core is wrong for this model: {problem}"
        )
    if not difference <= tolerance:
        raise ConfigError(
            f"{path}: its weights survive the mapping to megatron-core and back bit-exactly, but {scores} differ from "
            f"transformers by {difference:.3g} (> {tolerance}): part of the model is computed differently. Use "
            "trainer.strategy=fsdp2"
        )
    return (
        f"Certificate of {path} in megatron-core: {num_weights} weights bit-equal after the round trip, {scores} "
        f"within {difference:.1e} of transformers"
    )
