"""Log-probs over kept tokens are those of the truncated distribution, in numbers and in gradients."""

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_train.kept_tokens import KeptTokens, pad_kept_tokens
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.token_log_probs import KeptIds, LogitRule, compute_candidate_log_probs

FOUR = [0.5, 0.25, 0.15, 0.1]
NUM_TOKENS, HIDDEN, WORDS = 13, 6, 29
RULES = [LogitRule(), LogitRule(multiplier=3.0, softcap=1.5)]


def kept_ids(sets: list[list[int]]) -> KeptIds:
    counts = torch.tensor([len(each) for each in sets])
    ids = torch.tensor([token for each in sets for token in each], dtype=torch.int32)
    return KeptIds(ids, counts.cumsum(0) - counts, counts)


@pytest.mark.parametrize(
    "kept, token, probability",
    [
        ([], 0, 1 / 2),  # no set: the vocabulary
        ([0, 1, 2, 3], 0, 1 / 2),
        ([0, 1], 0, 2 / 3),
        ([0, 1], 1, 1 / 3),
        ([0, 1, 2], 2, 1 / 6),
        ([1, 3], 3, 2 / 7),
        ([2], 2, 1.0),
    ],
)
def test_log_prob_and_entropy_over_truncated_vocabulary(kept: list[int], token: int, probability: float):
    hidden, weight = torch.tensor([[1.0]]), torch.tensor(FOUR).log()[:, None]
    log_probs, entropy, _ = compute_candidate_log_probs(
        hidden, weight, torch.tensor([token]), None, with_entropy=True, kept=kept_ids([kept])
    )
    assert log_probs.item() == pytest.approx(math.log(probability), abs=1e-6)
    shares = [FOUR[each] / sum(FOUR[other] for other in kept or range(4)) for each in kept or range(4)]
    assert entropy is not None
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-6)


def test_truncated_policy_gradient_requires_truncated_log_probs():
    """Policy with logits ln FOUR draws tokens 0 and 1 with 2/3 and 1/3; the reward is 1 for token 0. By hand:

    d E[r] / dz = p0 (r0 - E[r]), p1 (r1 - E[r]) = 2/9, -2/9, 0, 0                over kept tokens
    sum_v mu_v r_v d log p_v / dz = 2/3 ([v = 0] - FOUR_v) = 1/3, -1/6, -1/10, -1/15    over the vocabulary
    """
    drawn_from, rewards = torch.tensor([2 / 3, 1 / 3]), torch.tensor([1.0, 0.0])
    gradients = []
    for kept in ([0, 1], []):
        logits = torch.tensor(FOUR).log()[:, None].requires_grad_()
        log_probs, *_ = compute_candidate_log_probs(
            torch.ones(2, 1), logits, torch.tensor([0, 1]), None, kept=kept_ids([kept] * 2)
        )
        (drawn_from * rewards * log_probs).sum().backward()
        assert logits.grad is not None
        gradients.append(logits.grad[:, 0])
    torch.testing.assert_close(gradients[0], torch.tensor([2 / 9, -2 / 9, 0, 0]), atol=1e-6, rtol=0)
    assert gradients[0][2:].tolist() == [0, 0]
    torch.testing.assert_close(gradients[1], torch.tensor([1 / 3, -1 / 6, -1 / 10, -1 / 15]), atol=1e-6, rtol=0)


def inputs(dtype: torch.dtype, num_tokens: int = NUM_TOKENS):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
        for shape in ((num_tokens, HIDDEN), (WORDS, HIDDEN), (WORDS,))
    )
    labels = torch.randint(WORDS, (num_tokens,), generator=generator)
    sets = [
        sorted({int(label), *torch.randint(WORDS, (place % 5,), generator=generator).tolist()}) if place % 3 else []
        for place, label in enumerate(labels)
    ]
    return hidden, weight, bias, labels, sets


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
@pytest.mark.parametrize("rule", RULES)
def test_chunked_gradients_match_full_truncated_softmax(chunk_size: int, rule: LogitRule):
    hidden, weight, bias, labels, sets = inputs(torch.float32)
    ours = compute_candidate_log_probs(
        hidden,
        weight,
        labels,
        None,
        bias=bias,
        temperature=0.7,
        rule=rule,
        chunk_size=chunk_size,
        with_entropy=True,
        kept=kept_ids(sets),
    )[:2]
    logits = (hidden @ weight.t() + bias) * rule.multiplier
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    outside = torch.tensor([[bool(each) and word not in each for word in range(WORDS)] for each in sets])
    log_p = (logits / 0.7).masked_fill(outside, -math.inf).log_softmax(-1)
    terms = torch.where(outside, 0.0, log_p.exp() * log_p.masked_fill(outside, 0.0))
    expected = log_p.gather(1, labels[:, None])[:, 0], -terms.sum(-1)
    weights = torch.randn(2, NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    for actual, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-6)
    gradients = [
        torch.autograd.grad((weights[0] * log_probs + weights[1] * entropy).sum(), (hidden, weight, bias))
        for log_probs, entropy in (ours, expected)
    ]
    for actual, wanted in zip(*gradients, strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(actual, wanted, atol=3e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_chunks_match_eager_over_kept_tokens():
    hidden, weight, bias, labels, sets = inputs(torch.float32)
    results = []
    for compile in (False, True):
        log_probs, entropy, _ = compute_candidate_log_probs(
            hidden,
            weight,
            labels,
            None,
            bias=bias,
            chunk_size=4,
            with_entropy=True,
            compile=compile,
            kept=kept_ids(sets),
        )
        assert entropy is not None
        results.append([log_probs, *torch.autograd.grad((log_probs + 0.1 * entropy).sum(), (hidden, weight, bias))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_kept_tokens_align_with_response_tokens(packing: bool, ragged):
    """Rows of different lengths, with sets of different sizes: each token's log-prob is that of its own set, computed
    from the log-probs of the whole vocabulary."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_key_value_heads=2, initializer_range=0.3, **sizes))
    scoring = ScoringModel(model, packing=packing, chunk_size=4)
    generator = torch.Generator().manual_seed(1)
    responses, mask = ragged.sequences[:, -ragged.num_response :], ragged.mask[:, -ragged.num_response :]
    rows = []
    for tokens, length in zip(responses, mask.sum(1).tolist(), strict=True):
        others = [torch.randint(64, (place % 4,), generator=generator).tolist() for place in range(length)]
        sets = [sorted({token, *more}) for token, more in zip(tokens.tolist(), others, strict=False)]
        rows.append(None if length == 4 else KeptTokens.of([torch.tensor(each).int().numpy() for each in sets]))
    counts, ids = pad_kept_tokens(rows, ragged.num_response)
    whole = scoring(*ragged, 0.7, candidates=torch.arange(64).expand(*responses.shape, -1)).candidates
    log_probs = scoring(*ragged, 0.7, kept=(counts, ids)).log_probs
    assert whole is not None
    for row, kept in enumerate(rows):
        start = 0
        for place in range(int(mask[row].sum())):
            token, own = responses[row, place], whole[row, place]
            if kept is not None:
                count = int(kept.counts[place])
                own = own - own[torch.from_numpy(kept.ids[start : start + count]).long()].logsumexp(-1)
                start += count
            expected = own[token] if ragged.mask[row].sum() > mask[row].sum() or place else torch.tensor(0.0)
            torch.testing.assert_close(log_probs[row, place], expected, atol=2e-6, rtol=0)
