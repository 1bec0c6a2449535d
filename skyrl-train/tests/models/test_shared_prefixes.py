"""Rows whose prompts begin alike compute that beginning once, and score and learn as separate rows do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyrl_train.config import SkyRLConfig
from skyrl_train.models import packing
from skyrl_train.models.attention import packed_attention
from skyrl_train.models.build import build_model
from skyrl_train.models.packing import PackedRows, compute_prefix_order, pack_rows
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.value_model import ValueModel
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train_testing.tiny_models import build_tiny_mixture, build_tiny_qwen3

NUM_PROMPT, NUM_RESPONSE = 24, 7
A, B, C = ([first, *range(2, 2 + length)] for first, length in ((30, 19), (31, 16), (32, 10)))


def batch(*rows: tuple[list[int], list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and mask of pairs of a prompt and a response."""
    sequences = torch.full((len(rows), NUM_PROMPT + NUM_RESPONSE), 60)
    mask = torch.zeros_like(sequences)
    for row, (prompt, response) in enumerate(rows):
        cells = slice(NUM_PROMPT - len(prompt), NUM_PROMPT + len(response))
        sequences[row, cells], mask[row, cells] = torch.tensor([*prompt, *response]), 1
    return sequences, mask


BATCHES: dict[str, list[tuple[list[int], list[int]]]] = {
    "samples of two prompts": [(A, [40, 41]), (B, [42]), (A, [40, 43, 44]), (B, [45] * 7), (A, [46]), (A, [40, 41])],
    "turns of a conversation": [(A[:17], [18]), ([*A[:17], 18, 50], [51, 52]), ([*A[:17], 18, 50, 51], [53]), (B, [9])],
    "branches": [(A, [40]), ([*A[:18], 50, 51, 52], [53]), ([*A[:18], 50, 51, 54], [55, 56]), ([*A, 57], [58])],
    "responses of no token": [(A, []), (A, [40]), (A, []), (C, []), (C, [41])],
    "a row that is another's prompt": [(A, [40, 41]), (A[:18], []), ([], []), ([*A, 40], [41])],
}


def model(kind: str = "policy", share: bool = True, **settings: Any) -> Any:
    own: dict[str, Any] = {"hidden_size": 16, "vocab_size": 64, "max_position_embeddings": 64, "scale": 1.0} | settings
    causal_lm = build_tiny_qwen3(**own)
    if kind == "critic":
        return ValueModel(causal_lm.model, share_prefixes=share)
    return ScoringModel(causal_lm, chunk_size=3, share_prefixes=share)


def learn(scorer: Any, rows: list[tuple[list[int], list[int]]]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the scores of rows, and the gradients of a loss that weighs every token differently."""
    weights = torch.arange(1.0, 1 + len(rows) * NUM_RESPONSE).view(len(rows), NUM_RESPONSE)
    if isinstance(scorer, ValueModel):
        scores = [scorer(*batch(*rows), NUM_RESPONSE)]
    else:
        found = scorer(*batch(*rows), NUM_RESPONSE, 0.7, with_entropy=True)
        scores = [found.log_probs, found.entropy]
    torch.stack([(weights * score).sum() for score in scores]).sum().backward()
    return [score.detach() for score in scores], {n: p.grad for n, p in scorer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=list(BATCHES))
def test_scores_and_gradients_match_separate_rows(rows: Any, kind: str):
    scores, gradients = learn(model(kind), rows)
    expected_scores, expected_gradients = learn(model(kind, share=False), rows)
    for score, expected in zip(scores, expected_scores, strict=True):
        torch.testing.assert_close(score, expected, atol=1e-6, rtol=1e-6)
        assert torch.equal(score == 0, expected == 0)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        size = expected_gradients[name].abs().max()
        torch.testing.assert_close(gradient / size, expected_gradients[name] / size, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("rows", list(BATCHES.values())[:3], ids=list(BATCHES)[:3])
def test_prefix_aware_token_budget_gives_same_update(rows: Any):
    sequences, mask = batch(*rows)
    order = compute_prefix_order(sequences, mask, NUM_RESPONSE)
    lengths = mask.sum(1).tolist()
    schedule = Schedule.of(lengths, [range(len(rows))], 1, micro_batch_size=1, max_tokens=26, prefixes=order)
    weights = torch.arange(1.0, 1 + len(rows) * NUM_RESPONSE).view(len(rows), NUM_RESPONSE)
    shared, separate = model(), model(share=False)
    [micro_batches] = schedule.merge_mini_batches()
    assert 1 < len(micro_batches) < len(rows)
    for micro in micro_batches:
        chosen = schedule.rows[0][list(micro.rows)]
        scores = shared(sequences[chosen], mask[chosen], NUM_RESPONSE, 0.7)
        (weights[chosen] * scores.log_probs).sum().backward()
    (weights * separate(sequences, mask, NUM_RESPONSE, 0.7).log_probs).sum().backward()
    for (name, ours), theirs in zip(shared.named_parameters(), separate.parameters(), strict=True):
        size = theirs.grad.abs().max()
        torch.testing.assert_close(ours.grad / size, theirs.grad / size, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_shared_prompt_is_computed_once(kind: str):
    """Else equal scores would prove nothing."""
    rows, computed = BATCHES["samples of two prompts"], []
    for share in (True, False):
        scorer = model(kind, share=share)
        inner = scorer.backbone if kind == "critic" else scorer.causal_lm
        inner.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[1]))
        learn(scorer, rows)
    num_responses = sum(len(response) for _, response in rows)
    assert computed == [len(A) + len(B) + num_responses, 4 * len(A) + 2 * len(B) + num_responses]


@pytest.mark.parametrize(("settings", "shares"), [({}, True), ({"dropout": 0.1}, False)], ids=["adapters", "dropout"])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_dropout_disables_prefix_sharing(role: Any, settings: Any, shares: bool, tmp_path: Path):
    build_tiny_qwen3(hidden_size=16, vocab_size=64).save_pretrained(tmp_path)
    section = {"model": {"path": str(tmp_path), "lora": {"rank": 2, **settings}}}
    cfg = SkyRLConfig.from_dict({"trainer": {"policy": {"model": {"path": str(tmp_path)}}, role: section}})
    built = build_model(cfg, role, str(tmp_path), device=torch.device("cpu"), is_trained=True)
    assert built.share_prefixes == shares
    cfg.trainer.use_shared_prefixes = False
    assert not build_model(cfg, role, str(tmp_path), device=torch.device("cpu"), is_trained=True).share_prefixes


@pytest.mark.parametrize("window", [5, 18])
def test_sliding_window_reaches_into_prefix(window: int):
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    rows = BATCHES["branches"]
    (shared, _), _ = learn(model(**sliding), rows)
    (separate, _), _ = learn(model(share=False, **sliding), rows)
    (unlimited, _), _ = learn(model(), rows)
    torch.testing.assert_close(shared, separate, atol=1e-6, rtol=1e-6)
    assert (shared - unlimited).abs().max() > 1e-3


def test_prefix_is_packed_once():
    layout = pack_rows(*batch(*BATCHES["samples of two prompts"]), NUM_RESPONSE, share_prefixes=True)
    assert layout.rows is not None and layout.rows.keys is not None
    assert layout.input_ids.shape[1] == len(A) + len(B) + 16
    assert layout.rows.prefixes == (0, 0, 17, 20, 20, 20)
    assert sum(layout.rows.num_keys) == 4 * len(A) + 2 * len(B) + 16
    seen = layout.input_ids[0, layout.rows.keys].split(list(layout.rows.num_keys))
    rows = [[*prompt, *response] for prompt, response in BATCHES["samples of two prompts"]]
    assert sorted(row.tolist() for row in seen) == sorted(rows)


def test_first_response_token_is_predicted_by_shared_prompt():
    layout = pack_rows(*batch((A, [40]), (A, [41])), NUM_RESPONSE, share_prefixes=True)
    assert layout.labels.sort().values.tolist() == [40, 41]
    assert layout.input_ids[0, layout.predictors].tolist() == [A[-1], A[-1]]


@pytest.mark.parametrize("last", [40, 70])
def test_prompt_containing_other_response_is_not_recomputed(last: int):
    """Whatever token the first row goes on with: sorted by tokens alone it may stand behind those that branch off."""
    rows = [(C, [40, 41, 42, 43, 44, 45, last]), ([*C, 40, 41, 42, 43, 44, 45, 55], [46]), ([*C, 40, 41, 56, 57], [47])]
    order = compute_prefix_order(*batch(*rows), NUM_RESPONSE)
    assert (order.rows[0], order.shared) == (0, [0, 17, 0])  # 13 tokens are too short a prefix to be shared
    layout = pack_rows(*batch(*rows), NUM_RESPONSE, share_prefixes=True)
    assert layout.input_ids.shape[1] == 18 + 2 + 16


def test_short_prefixes_and_responses_are_not_shared():
    header, answer = [30, 2, 3], list(range(5, 12))
    for rows in ([([*header, 5], [6]), ([*header, 7], [8])], [(C, answer), (C, answer)], [(A, []), (B, [])]):
        sequences, mask = batch(*rows)
        ours, plain = (pack_rows(sequences, mask, NUM_RESPONSE, share_prefixes=share) for share in (True, False))
        assert ours.rows is not None and ours.rows.keys is None
        assert torch.equal(ours.input_ids, plain.input_ids)


def test_equal_responses_are_computed_per_row():
    """Only prompts are shared: samples of one prompt then attend to keys of one length, in one call."""
    layout = pack_rows(*batch((A, [40, 41]), (A, [40, 42])), NUM_RESPONSE, share_prefixes=True)
    assert layout.input_ids.shape[1] == len(A) + 4


def test_moe_experts_see_all_tokens():
    mixture = ScoringModel(build_tiny_mixture(vocab_size=64), share_prefixes=True)
    assert not mixture.share_prefixes


class ManyRanks:
    """Part of `SequenceParallel` that a layout uses, for one of several ranks in one process."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank, self.slices = size, rank, []

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(self.size, dim)[self.rank]

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.slices, dim)


@pytest.mark.parametrize("size", [2, 3])
def test_sequence_parallel_scores_are_scattered_to_rows(size: int):
    """A shared token predicts several: each of them has its own value."""
    rows = BATCHES["samples of two prompts"]
    ranks = [ManyRanks(size, rank) for rank in range(size)]
    layouts = [pack_rows(*batch(*rows), NUM_RESPONSE, each, share_prefixes=True) for each in ranks]  # type: ignore[arg-type]
    widest = max(len(layout.own) for layout in layouts if layout.own is not None)
    values = []
    for layout in layouts:
        _, labels = layout.select_scored(torch.zeros(1, layout.input_ids.numel(), 1))
        values.append(labels.float())
    slices = [torch.cat([each, each.new_zeros(widest - len(each))]) for each in values]
    for each in ranks:
        each.slices = slices
    sequences, mask = batch(*rows)
    expected = (sequences * mask)[:, NUM_PROMPT:].float()
    for layout, own in zip(layouts, values, strict=True):
        assert torch.equal(layout.scatter_scored(own), expected)


@pytest.mark.gpu
def test_kernels_for_rows_of_different_lengths_attend_to_prefixes():
    layout = pack_rows(*batch(*BATCHES["branches"]), NUM_RESPONSE, share_prefixes=True)
    rows = layout.rows
    assert rows is not None and rows.keys is not None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, layout.input_ids.numel(), 64, generator=generator) for heads in (4, 2, 2))
    on_gpu = PackedRows(rows.lengths, rows.boundaries.cuda(), prefixes=rows.prefixes, keys=rows.keys.cuda())
    in_half = (x.cuda().bfloat16() for x in (q, k, v))
    ours, _ = packed_attention(nn.Identity(), *in_half, None, packed_rows=on_gpu)  # pyright: ignore[reportCallIssue]
    expected, _ = packed_attention(nn.Identity(), q, k, v, None, packed_rows=rows)
    torch.testing.assert_close(ours.float().cpu(), expected, atol=3e-2, rtol=3e-2)


def test_prefixes_are_found_in_any_row_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "_SHORTEST_PREFIX", 1)
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(2, 4, (12, NUM_PROMPT), generator=generator).tolist()
    rows = [(text[: 1 + 2 * number], text[-(number % 5) - 1 :]) for number, text in enumerate(texts)]
    for _ in range(5):
        order = torch.randperm(len(rows), generator=generator).tolist()
        mixed = [rows[row] for row in order]
        (shared, _), _ = learn(model(), mixed)
        (separate, _), _ = learn(model(share=False), mixed)
        torch.testing.assert_close(shared, separate, atol=1e-6, rtol=1e-6)
        beginnings = {tuple(p[:n]) for p, _ in mixed for n in range(1, len(p) + 1)}
        num_responses = sum(len(response) for _, response in mixed)
        computed = pack_rows(*batch(*mixed), NUM_RESPONSE, share_prefixes=True).input_ids.numel()
        assert computed <= len(beginnings) + num_responses, "each beginning of a prompt once"
