"""Log-probs and entropy in chunks are those of whole logits, forward and backward, and no more than a chunk is held."""

import math

import pytest
import torch

from skyrl_train.models.token_log_probs import LogitRule, compute_candidate_log_probs

NUM_TOKENS, HIDDEN, WORDS = 13, 6, 29
RULES = [LogitRule(), LogitRule(multiplier=0.5), LogitRule(softcap=2.0), LogitRule(multiplier=3.0, softcap=1.5)]


def token_log_probs(hidden, weight, labels, **settings):
    return compute_candidate_log_probs(hidden, weight, labels, None, **settings)[:2]


def whole(hidden, weight, labels, bias, temperature, rule):
    """The definition, with all logits at once."""
    logits = (hidden @ weight.t() + (0 if bias is None else bias)) * rule.multiplier
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(dtype: torch.dtype, *, with_bias: bool, num_tokens: int = NUM_TOKENS):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
        for shape in ((num_tokens, HIDDEN), (WORDS, HIDDEN), (WORDS,))
    )
    labels = torch.randint(WORDS, (num_tokens,), generator=generator)
    return hidden, weight, labels, bias if with_bias else None


def test_two_token_vocabulary_matches_manual_result():
    # Logits 0 and ln 3 at temperature 1: probabilities 1/4 and 3/4.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([1]), with_entropy=True)
    assert log_probs.item() == pytest.approx(math.log(0.75))
    assert entropy is not None
    assert entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    # At temperature 1/2 logits double: 1/10 and 9/10.
    log_probs, _ = token_log_probs(hidden, weight, torch.tensor([0]), temperature=0.5)
    assert log_probs.item() == pytest.approx(math.log(0.1))


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_chunked_head_matches_full_logits(chunk_size, with_bias, rule):
    hidden, weight, labels, bias = inputs(torch.float32, with_bias=with_bias)
    parameters = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    ours = token_log_probs(
        hidden, weight, labels, bias=bias, temperature=0.7, rule=rule, chunk_size=chunk_size, with_entropy=True
    )
    expected = whole(hidden, weight, labels, bias, 0.7, rule)
    weights = torch.randn(2, NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    for actual, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-6)
    gradients = [
        torch.autograd.grad((weights[0] * log_probs + weights[1] * entropy).sum(), parameters)
        for log_probs, entropy in (ours, expected)
    ]
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted, atol=3e-6, rtol=1e-5)


def test_bfloat16_states_use_float32_softmax():
    hidden, weight, labels, _ = inputs(torch.float32, with_bias=False)
    hidden, weight = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, labels, chunk_size=4, with_entropy=True)
    assert entropy is not None
    assert (log_probs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    expected = (hidden @ weight.t()).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=1e-6)
    log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_sum_over_chunks_is_not_rounded_to_bfloat16():
    """512 chunks that each add 1/2 - 1/512 to a sum: in bfloat16 it would stop growing on the way."""
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = token_log_probs(hidden, weight, torch.zeros(512, dtype=torch.long), chunk_size=1)
    log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [256.0, -256.0]


def test_entropy_does_not_change_log_prob_bits():
    hidden, weight, labels, _ = inputs(torch.float32, with_bias=False)
    alone, nothing = token_log_probs(hidden, weight, labels, chunk_size=4)
    beside, _ = token_log_probs(hidden, weight, labels, chunk_size=4, with_entropy=True)
    assert nothing is None
    assert torch.equal(alone, beside)


def test_large_logits_keep_finite_log_probs_and_entropy():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[1e4], [1e4], [-1e4]])
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([0]), with_entropy=True)
    assert log_probs.item() == pytest.approx(-math.log(2))
    assert entropy is not None
    assert entropy.item() == pytest.approx(math.log(2))


def test_empty_input_gives_zero_gradient():
    hidden, weight, labels, bias = inputs(torch.float32, with_bias=True, num_tokens=0)
    log_probs, entropy = token_log_probs(hidden, weight, labels, bias=bias, with_entropy=True)
    assert entropy is not None and bias is not None
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, HIDDEN)
    assert weight.grad is not None and not weight.grad.any()
    assert bias.grad is not None and not bias.grad.any()


def test_frozen_output_layer_propagates_gradient():
    hidden, weight, labels, _ = inputs(torch.float32, with_bias=False)
    weight = weight.detach()
    log_probs, _ = token_log_probs(hidden, weight, labels, chunk_size=4)
    log_probs.sum().backward()
    expected, _ = whole(hidden, weight, labels, None, 1.0, LogitRule())
    assert weight.grad is None and hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected.sum(), hidden)[0])


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(softcap=2.0)])
def test_operations_allocate_at_most_single_logit_chunk(rule, watch_tensors):
    num_tokens, chunk_size, words = 200, 10, 1000
    hidden = torch.randn(num_tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(words, HIDDEN, requires_grad=True)
    labels = torch.randint(words, (num_tokens,))
    with watch_tensors() as made:
        log_probs, entropy = token_log_probs(
            hidden, weight, labels, rule=rule, chunk_size=chunk_size, with_entropy=True
        )
        assert entropy is not None
        torch.autograd.backward([log_probs.sum() + entropy.sum()])
    assert made.largest == chunk_size * words  # of 200,000 that whole logits have
    with watch_tensors() as made:
        whole(hidden, weight, labels, None, 1.0, rule)
    assert made.largest == num_tokens * words


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_chunks_match_eager():
    hidden, weight, labels, bias = inputs(torch.float32, with_bias=True, num_tokens=8)
    assert bias is not None
    results = []
    for compile in (False, True):
        log_probs, entropy = token_log_probs(
            hidden, weight, labels, bias=bias, temperature=0.7, chunk_size=4, with_entropy=True, compile=compile
        )
        assert entropy is not None
        gradients = torch.autograd.grad((log_probs + 0.1 * entropy).sum(), (hidden, weight, bias))
        results.append([log_probs, entropy, *gradients])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=3e-6, rtol=1e-5)
