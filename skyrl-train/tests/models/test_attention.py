"""Attention among rows that lie end to end is attention within each of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from skyrl_train.models import cpu_attention
from skyrl_train.models.attention import (
    _select_varlen_attention,
    _warn_of_padded_rows,
    adapt_torch_varlen,
    packed_attention,
)
from skyrl_train.models.packing import PackedRows

HEADS, SIZE = 4, 8


def rows_of(lengths: tuple[int, ...], device: str = "cpu") -> PackedRows:
    return PackedRows(lengths, torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32))


def make_inputs(num_tokens: int, key_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, num_tokens, SIZE) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def with_a_mask(query, key, value, lengths, scaling, window, softcap=None, sinks=None) -> torch.Tensor:
    """The definition, with a mask of all tokens by all tokens. [1, N, heads, D]"""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    behind = torch.arange(len(row))[:, None] - torch.arange(len(row))
    sees = (row[:, None] == row) & (behind >= 0) & (behind < (window or len(row)))
    key, value = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(1, -1, scores.shape[2], 1)], dim=-1)
    return (scores.softmax(-1)[..., : len(row)] @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", [(7,), (5, 5, 5), (9, 8, 3, 2, 2, 1), (1, 1), (2, 9)], ids=str)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attention_is_causal_within_each_row(lengths, key_heads, window):
    inputs = make_inputs(sum(lengths), key_heads)
    ours, weights = packed_attention(
        nn.Identity(), *inputs, None, packed_rows=rows_of(lengths), scaling=0.3, sliding_window=window
    )
    expected = with_a_mask(*inputs, lengths, 0.3, window)
    assert weights is None
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((answer * direction).sum(), inputs) for answer in (ours, expected)]
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_short_rows_match_kernel_bits_and_float32_gradients(window, autocast, monkeypatch):
    lengths = (9, 8, 2)
    inputs = [x.detach().bfloat16().requires_grad_() for x in make_inputs(sum(lengths), 2)]
    direction = torch.randn((1, sum(lengths), HEADS, SIZE), generator=torch.Generator().manual_seed(1))

    def attend(convert=torch.Tensor.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and convert is torch.Tensor.bfloat16):
            rows = rows_of(lengths)
            answer, _ = packed_attention(
                nn.Identity(), *map(convert, inputs), None, packed_rows=rows, scaling=0.3, sliding_window=window
            )
        return answer, torch.autograd.grad((answer * direction).sum(), inputs)

    answer, gradients = attend()
    assert answer.dtype == torch.bfloat16
    _, expected = attend(torch.Tensor.float)
    monkeypatch.setattr(cpu_attention, "_FEW_KEYS", 0)
    of_kernel, in_bfloat16 = attend()
    assert torch.equal(answer, of_kernel)
    for ours, kernels, wanted in zip(gradients, in_bfloat16, expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-2, rtol=2e-2)
        assert (ours - wanted).abs().sum() <= (kernels - wanted).abs().sum()


@pytest.mark.parametrize("window", [1, 100, 511, 512, 600])
def test_sliding_window_spans_several_blocks(window):
    inputs = make_inputs(1300, 2)
    ours, _ = packed_attention(
        nn.Identity(), *inputs, None, packed_rows=rows_of((1200, 100)), scaling=0.3, sliding_window=window
    )
    torch.testing.assert_close(ours, with_a_mask(*inputs, (1200, 100), 0.3, window), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap, has_sinks", [(0.5, False), (None, True), (0.5, True)])
@pytest.mark.parametrize("lengths, window", [((9, 8, 3, 2, 2, 1), None), ((9, 8, 1), 3), ((560, 2), 530)], ids=str)
def test_capped_scores_and_sinks(lengths, window, softcap, has_sinks):
    *inputs, sinks = *make_inputs(sum(lengths), 2), torch.randn(HEADS, generator=torch.Generator().manual_seed(3))
    extra = [sinks.requires_grad_()] if has_sinks else []
    ours, _ = packed_attention(
        nn.Identity(),
        *inputs,
        None,
        packed_rows=rows_of(lengths),
        scaling=0.9,
        sliding_window=window,
        softcap=softcap,
        s_aux=extra[0] if extra else None,
    )
    expected = with_a_mask(*inputs, lengths, 0.9, window, softcap, *extra)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)
    plain = with_a_mask(*inputs, lengths, 0.9, window)
    assert (expected - plain).abs().max() > 0.1, "the test must tell caps and sinks from none"
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((answer * direction).sum(), [*inputs, *extra]) for answer in (ours, expected)]
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("argument", [{"position_bias": torch.ones(1)}, {"dropout": 0.1}])
def test_unknown_arguments_are_rejected(argument):
    inputs = make_inputs(3, 4)
    with pytest.raises(ValueError, match=f"Identity needs attention with {next(iter(argument))}"):
        packed_attention(nn.Identity(), *inputs, None, packed_rows=rows_of((3,)), scaling=0.3, **argument)


def test_missing_row_lengths_are_rejected():
    with pytest.raises(ValueError, match="packed_rows"):
        packed_attention(nn.Identity(), *make_inputs(3, 4), None, scaling=0.3, position_ids=torch.arange(3))


def attend_varlen(q, k, v, rows, keys, most_q, most_k, scale, window) -> torch.Tensor:
    """`varlen_attn` by a mask: causal from the end of each row, as flash-attention's. [N, heads, D]"""
    assert q.shape[1] == k.shape[1] and (most_q, most_k) == (rows.diff().max(), keys.diff().max())
    answers = []
    for (start, end), (first, last) in zip(rows.unfold(0, 2, 1), keys.unfold(0, 2, 1), strict=True):
        own = (x.transpose(0, 1) for x in (q[start:end], k[first:last], v[first:last]))
        behind = torch.arange(last - first - (end - start), last - first)[:, None] - torch.arange(last - first)
        seen = (behind >= -window[1]) & ((behind <= window[0]) | (window[0] < 0))
        answers.append(F.scaled_dot_product_attention(*own, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(answers)


def varlen_attn_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    raise AssertionError("it cannot scale")


def varlen_attn_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    return attend_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def varlen_attn_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return attend_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


@pytest.mark.parametrize("varlen_attn", [varlen_attn_2_11, varlen_attn_2_12])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3])
def test_torch_varlen_is_called_with_its_parameters(varlen_attn, key_heads, window):
    kernel = adapt_torch_varlen(varlen_attn)
    assert kernel is not None
    lengths = (9, 4, 1)
    inputs = make_inputs(sum(lengths), key_heads)
    ours = kernel(*(x[0].transpose(0, 1) for x in inputs), rows_of(lengths), 0.3, window)[None]
    expected = with_a_mask(*inputs, lengths, 0.3, window)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((answer * direction).sum(), inputs) for answer in (ours, expected)]
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_installed_torch_varlen_is_used_and_older_is_not():
    from torch.nn.attention.varlen import varlen_attn

    assert adapt_torch_varlen(varlen_attn) is not None
    assert adapt_torch_varlen(varlen_attn_2_10) is None


def test_padded_rows_warn_once_with_remedy(log: list[str]):
    _warn_of_padded_rows.cache_clear()
    for _ in range(2):
        _warn_of_padded_rows(True, torch.float32)
    _warn_of_padded_rows(True, torch.bfloat16)
    assert len(log) == 2
    assert "trainer.bf16=true" in log[0] and "flash-attn" in log[1]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_kernels_for_rows_of_different_lengths_agree_with_single_rows(window, key_heads):
    assert _select_varlen_attention("cuda", torch.bfloat16) is not None
    lengths = (70, 33, 1)
    inputs = [x.detach().to("cuda", torch.bfloat16) for x in make_inputs(sum(lengths), key_heads)]
    rows = rows_of(lengths, "cuda")
    ours, _ = packed_attention(nn.Identity(), *inputs, None, packed_rows=rows, scaling=0.3, sliding_window=window)
    expected = with_a_mask(*(x.float().cpu() for x in inputs), lengths, 0.3, window)
    torch.testing.assert_close(ours.float().cpu(), expected, atol=2e-2, rtol=2e-2)


def test_sliding_window_calls_kernel_once_per_query_block(monkeypatch: pytest.MonkeyPatch):
    """3 blocks of 512 queries, each with the keys in its reach: no mask of 1,100 by 1,100."""
    seen, attend = [], F.scaled_dot_product_attention

    def watch(*args, **kwargs):
        seen.append(tuple(kwargs["attn_mask"].shape))
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    packed_attention(
        nn.Identity(), *make_inputs(1100, 2), None, packed_rows=rows_of((1100,)), scaling=0.3, sliding_window=10
    )
    assert seen == [(512, 512), (512, 521), (76, 85)]
