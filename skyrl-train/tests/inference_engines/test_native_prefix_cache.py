"""The prefix cache: bits as without it, nothing computed twice, bounded memory, and planted faults detected."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from native_runs import make_core, random_prompts, run, same_bits

from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.prefix_cache import PrefixTree
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request
from skyrl_train.inference_engines.request import Completion


def check_tree(tree: PrefixTree, num_steps: int = 400) -> None:
    """Insert and look up random sequences of three letters and two adapters; compare what each slot holds."""
    generator = np.random.default_rng(0)
    held: dict[int, tuple[int, bytes]] = {}  # slot -> adapter and all tokens up to its own
    known: set[tuple[int, bytes]] = set()
    for _ in range(num_steps):
        tokens = generator.integers(3, size=generator.integers(1, 20))
        adapter = int(generator.integers(2))
        prefixes = [(adapter, tokens[: end + 1].tobytes()) for end in range(len(tokens))]
        assert tree.get_match_length(tokens, adapter) == len(found := tree.match(tokens, adapter))
        assert [held[slot] for slot in found.tolist()] == prefixes[: len(found)]
        if tree.max_tokens > 10_000:  # nothing gives way: the longest known prefix is found
            assert len(found) == sum(prefix in known for prefix in prefixes)
        start, slots = tree.insert(tokens, adapter)
        assert start == len(found)
        held |= dict(zip(slots.tolist(), prefixes[start:], strict=False))
        known |= set(prefixes)
        assert start + len(slots) == min(len(tokens), tree.max_tokens)
        assert [held[slot] for slot in tree.match(tokens, adapter).tolist()] == prefixes[: start + len(slots)]
        assert len(set(slots.tolist())) == len(slots) and tree.num_tokens <= tree.max_tokens
        assert slots.size == 0 or slots.max() < tree.max_tokens


@pytest.mark.parametrize("max_tokens", [1, 7, 60, 10**6])
def test_prefix_slots_match_tokens_and_evict_least_recently_used(max_tokens: int):
    check_tree(PrefixTree(max_tokens))


class ComparesFirstTokensAlone(PrefixTree):
    """Two sequences are taken for one where a part of their tokens is equal, as with hashes that collide."""

    def _walk(self, tokens, adapter):
        path, slots = super()._walk(tokens, adapter)
        if path and len(slots[-1]) > 1:
            rest = len(tokens) - sum(map(len, slots[:-1]))
            slots[-1] = path[-1].slots[:rest]
        return path, slots


class MixesAdapters(PrefixTree):
    def _walk(self, tokens, adapter):
        return super()._walk(tokens, 0)

    def insert(self, tokens, adapter=0):
        return super().insert(tokens, 0)


class MatchesOneTokenTooMany(PrefixTree):
    def _walk(self, tokens, adapter):
        path, slots = super()._walk(tokens, adapter)
        if path and len(slots[-1]) < len(path[-1].slots) and sum(map(len, slots)) < len(tokens):
            slots[-1] = path[-1].slots[: len(slots[-1]) + 1]
        return path, slots


class LosesOneTokenAtASplit(PrefixTree):
    def _split(self, node, length):
        return super()._split(node, max(1, length - 1))


class EvictsWhatIsInUse(PrefixTree):
    def _allocate(self, count, keep):
        return super()._allocate(count, [])


class EvictsWithoutFreeing(PrefixTree):
    def _evict(self, node):
        super()._evict(node)
        self.num_tokens += len(node.slots) // 2


@pytest.mark.parametrize(
    "faulty",
    [
        *(ComparesFirstTokensAlone, MixesAdapters, MatchesOneTokenTooMany, LosesOneTokenAtASplit),
        *(EvictsWhatIsInUse, EvictsWithoutFreeing),
    ],
)
def test_invariant_check_detects_planted_tree_faults(faulty: type[PrefixTree]):
    with pytest.raises((AssertionError, KeyError)):
        for max_tokens in (7, 60, 10**6):
            check_tree(faulty(max_tokens))


def test_least_recently_used_sequence_is_evicted():
    tree = PrefixTree(12)
    first, second, third = ([index] * 4 for index in range(3))
    for tokens in (first, second, third):
        tree.insert(np.array(tokens))
    tree.match(np.array(first))
    tree.insert(np.array([0, 0, 5, 5, 5]))  # shares two tokens of the first, three must go
    lengths = [tree.get_match_length(np.array(tokens)) for tokens in (first, second, third)]
    assert lengths == [4, 0, 4] and tree.num_tokens == 11


# ---- conversations


def ask(prompt: np.ndarray, seed: int, max_tokens: int = 20) -> Request:
    return Request(prompt, EngineSamplingParams(max_tokens=max_tokens), (seed, 0))


def conversations(core: NativeEngineCore, num_turns: int = 4) -> tuple[list[Completion], int, int]:
    """Two groups of three conversations with one beginning in common: each turn is the last with its answer and a few
    tokens more, one conversation branches off in the midst of an answer, and one turn is asked for again.

    Returns: completions in order; prompt tokens computed, and needed by a cache of any size.
    """
    shared, *own = random_prompts([45, 7, 33])
    observations = random_prompts([1, 2, 5, 9, 13, 31, 32, 33, 40] * 3, seed=1)
    prompts = [np.concatenate([shared, own[index // 3]]) for index in range(6)]
    completions: list[Completion] = []
    known: set[bytes] = set()
    needed = 0
    for turn in range(num_turns):
        requests = [ask(prompt, 10 * turn + index) for index, prompt in enumerate(prompts)]
        for prompt in prompts:
            new = {prompt[:end].tobytes() for end in range(1, len(prompt) + 1)} - known
            needed += len(new)
            known |= new
        done = run(core, requests, late=requests[4:])
        done += run(core, [ask(prompts[1], 10 * turn + 1)])  # a retry
        completions += done
        for index in range(6):
            answer = done[index].token_ids
            known |= {np.append(prompts[index], answer[:end]).tobytes() for end in range(1, len(answer))}
            kept = answer[:11] if (turn, index) == (1, 2) else answer
            prompts[index] = np.concatenate([prompts[index], kept, observations.pop(0)])
    return completions, core.num_prompt_tokens_computed, needed


def same(one: list[Completion], other: list[Completion]) -> bool:
    return all(same_bits(mine, its) for mine, its in zip(one, other, strict=True))


@pytest.mark.first_case
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2")),
        "qwen3",
        "qwen3_moe",
        "qwen2_window",
    ],
)
def test_cached_conversations_are_bit_exact_and_not_recomputed(tiny_models, name: str):
    """But for the last token of prompts that are known as a whole: those of other samples and of retries."""
    expected, without, _ = conversations(make_core(tiny_models(name), max_prefix_tokens=0))
    core = make_core(tiny_models(name))
    found, computed, needed = conversations(core)
    assert same(found, expected)
    assert 0 <= computed - needed <= 4 * (4 + 1) and computed < without / 4
    per_request = [each.num_cached_prompt_tokens for each in found]
    assert None not in per_request and max(map(int, per_request)) > 150  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [50, pytest.param(300, marks=pytest.mark.slow)])
def test_small_cache_stays_in_budget_and_bit_exact(tiny_models, max_tokens: int):
    expected, without, _ = conversations(make_core(tiny_models("qwen3"), max_prefix_tokens=0))
    core = make_core(tiny_models("qwen3"), max_prefix_tokens=max_tokens)
    found, computed, _ = conversations(core)
    assert same(found, expected) and computed < without
    assert {len(tensor) for tensor in core._prefixes._tensors} == {max_tokens}


# ---- weights that change


def answers_over_an_update(core: NativeEngineCore) -> list[Completion]:
    """An answer under way and a finished one, new weights, then the next turns of both."""
    prompts = random_prompts([40, 50])
    [first] = run(core, [ask(prompts[0], 0)])
    under_way = ask(prompts[1], 1, max_tokens=30)
    core.add_request(under_way)
    for _ in range(10):
        core.step()
    with torch.inference_mode():
        for parameter in core.model.parameters():
            parameter.mul_(1.1)
    core.update_version(1)
    done = {}
    while core.num_running:
        done |= core.step()
    second = done[under_way]
    assert second.weight_versions == [0] * 10 + [1] * 20
    turns = [np.concatenate([prompts[0], first.token_ids, [3]]), np.concatenate([prompts[1], second.token_ids, [3]])]
    return run(core, [ask(turn, 2 + index) for index, turn in enumerate(turns)])


def keep_old_prefixes(core: NativeEngineCore) -> None:
    core.clear_prefixes = lambda: None


def keep_rows_of_both_weights(core: NativeEngineCore) -> None:
    core.update_version = lambda version: (setattr(core, "weight_version", version), core.clear_prefixes())[0]


@pytest.mark.first_case
@pytest.mark.parametrize("fault", [None, keep_old_prefixes, keep_rows_of_both_weights])
def test_prefixes_of_older_weights_are_not_reused(tiny_models, fault: Callable[[NativeEngineCore], None] | None):
    expected = answers_over_an_update(make_core(tiny_models("qwen3"), max_prefix_tokens=0))
    core = make_core(tiny_models("qwen3"))
    if fault is not None:
        fault(core)
    assert same(answers_over_an_update(core), expected) == (fault is None)


# ---- long prompts


def test_keys_of_batched_prompts_are_bounded(tiny_models, monkeypatch: pytest.MonkeyPatch):
    """Few new tokens each, behind long prefixes: 8 x 64 keys hold one prompt of 310, and two of 110."""
    for length, together in ((300, 1), (100, 2)):
        core = make_core(tiny_models("qwen3"), max_prefill_tokens=64)
        prefixes = random_prompts([length] * 4)
        prompts = [np.append(prefix, random_prompts([10])[0]) for prefix in prefixes]
        expected = [run(make_core(tiny_models("qwen3")), [ask(p, i)])[0] for i, p in enumerate(prompts)]
        for index, prefix in enumerate(prefixes):
            run(core, [ask(prefix, index, 1)])
        sizes, prefill = [], core._runner.prefill

        def counted(rows: list[int], *rest: Any, sizes: list[int] = sizes, prefill: Any = prefill) -> Any:
            sizes.append(len(rows))
            return prefill(rows, *rest)

        monkeypatch.setattr(core._runner, "prefill", counted)
        assert same(run(core, [ask(prompt, index) for index, prompt in enumerate(prompts)]), expected)
        assert max(sizes) == together, sizes
        assert sum(sizes) == 4


def test_long_prompt_is_prefilled_in_chunks_during_decoding(tiny_models):
    [short, long] = random_prompts([20, 300])
    expected = [run(make_core(tiny_models("qwen3")), [ask(p, i, 40)])[0] for i, p in enumerate((short, long))]
    core = make_core(tiny_models("qwen3"), max_prefill_tokens=64)
    requests = [ask(short, 0, 40), ask(long, 1, 40)]
    done, computed = {}, []
    core.add_request(requests[0])
    core.step()
    core.add_request(requests[1])
    while core.num_running:
        before = core.num_prompt_tokens_computed
        done |= core.step()
        computed.append(core.num_prompt_tokens_computed - before)
    assert computed[:6] == [64, 64, 64, 64, 44, 0]
    assert same([done[request] for request in requests], expected)
    assert done[requests[1]].num_cached_prompt_tokens == 0, "what was computed for it in parts is not cached"


def test_prompt_chunks_are_dropped_on_abort_update_or_eviction(tiny_models):
    [long] = random_prompts([300])
    [expected] = run(make_core(tiny_models("qwen3")), [ask(long, 1)])
    core = make_core(tiny_models("qwen3"), max_prefill_tokens=64)
    core.add_request(request := ask(long, 0))
    assert core.step() == {} and core.num_running == 0
    [aborted] = core.abort([request]).values()
    assert isinstance(aborted, Completion) and aborted.token_ids == []
    assert same(run(core, [ask(long, 1)]), [expected])
    assert core.num_prompt_tokens_computed == 300, "the part was computed once"
    core.update_version(1)
    core.add_request(request := ask(long, 1))
    core.step()
    core.update_version(2)
    assert same(run(core, [request]), [expected])
    assert core.num_prompt_tokens_computed == 2 * 300 + 64
    settings: list[dict[str, Any]] = [{"max_prefix_tokens": 299}, {"chunked_prefill": False}]
    for given in settings:
        core = make_core(tiny_models("qwen3"), max_prefill_tokens=64, **given)
        core.add_request(request := ask(long, 1))
        done = core.step()
        assert core.num_prompt_tokens_computed == 300, "at once"
        while core.num_running:
            done |= core.step()
        found = done[request]
        assert isinstance(found, Completion) and same_bits(found, expected)


def test_prompt_chunks_do_not_evict_running_requests(tiny_models):
    longest, *writing, long = random_prompts([300, *[100] * 4, 150])
    expected = [run(make_core(tiny_models("qwen3")), [ask(p, i, 30)])[0] for i, p in enumerate([*writing, long])]
    core = make_core(tiny_models("qwen3"), max_prefill_tokens=64, max_cache_tokens=4 * 512)
    run(core, [ask(longest, 9, 1)])  # after it the cache has four rows of 512, for eight of 256 it is made anew
    requests = [ask(prompt, index, 30) for index, prompt in enumerate([*writing, long])]
    assert same(run(core, requests, late=requests[4:]), expected)


@pytest.mark.parametrize("num_known", [5, 59])
def test_half_precision_with_cached_keys_is_close(tiny_models, num_known: int):
    """Also where the known tokens and the others fit into the block that the others alone are padded to."""
    [first, rest] = random_prompts([59, 20])
    core = make_core(tiny_models("qwen3"), dtype="bfloat16")
    run(core, [ask(first, 0)])
    turn = np.concatenate([first[:num_known], rest])
    [found] = run(core, [ask(turn, 1, 1)])
    [expected] = run(make_core(tiny_models("qwen3"), dtype="bfloat16", max_prefix_tokens=0), [ask(turn, 1, 1)])
    assert found.num_cached_prompt_tokens == num_known
    assert found.token_ids == expected.token_ids and found.log_probs == pytest.approx(expected.log_probs, abs=0.01)
