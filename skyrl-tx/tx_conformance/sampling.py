"""Sampling: effect of each option, and meaning of the returned log-probs."""

from typing import Any

import numpy as np

from tx_conformance.checks import Skip, check, expect, expect_close, expect_equal, expect_far, expect_refused
from tx_conformance.client import SampleResult, SamplerHandle, done, read, text_datum
from tx_conformance.server import ServerUnderTest

FREE = {"max_tokens": 16, "stop": []}
"""Sixteen tokens, whatever they are."""


def base(server: ServerUnderTest) -> SamplerHandle:
    return server.service.sampler(base_model=server.target.model)


def prompt(server: ServerUnderTest) -> list[int]:
    return server.text(9, seed=21)


def greedy(server: ServerUnderTest, **options: object) -> SampleResult:
    everything: dict[str, Any] = FREE | {"temperature": 0.0} | options
    return base(server).ask(prompt(server), **everything)


@check
def length_is_kept(server: ServerUnderTest) -> None:
    """sampling without stops gives exactly max_tokens, with a log-prob each, and the reason `length`"""
    [sample] = base(server).ask(prompt(server), seed=1, **FREE).samples
    expect_equal((len(sample.tokens), len(sample.logprobs)), (16, 16), "tokens and log-probs")
    expect(sample.stop_reason.endswith("length"), f"stop_reason {sample.stop_reason}")
    expect(all(lp <= 0 for lp in sample.logprobs), "a log-prob above 0")


@check
def seed_reproduces(server: ServerUnderTest) -> None:
    """a seed gives the same samples again, another seed others, and no seed new ones each time"""
    sampler, ask = base(server), prompt(server)
    first, again = (sampler.ask(ask, 2, seed=5, **FREE) for _ in range(2))
    expect_equal(again.tokens, first.tokens, "tokens of the same seed")
    expect_equal(again.samples[0].logprobs, first.samples[0].logprobs, "log-probs of the same seed")
    expect(sampler.ask(ask, 2, seed=6, **FREE).tokens != first.tokens, "another seed: the same tokens")
    unseeded = [sampler.ask(ask, **FREE).tokens for _ in range(2)]
    expect(unseeded[0] != unseeded[1], "without a seed: the same tokens twice")


@check
def samples_differ(server: ServerUnderTest) -> None:
    """samples of one request are drawn apart, and the first n of more are the same"""
    sampler = base(server)
    many = sampler.ask(prompt(server), 6, seed=5, **FREE).tokens
    expect(len({tuple(tokens) for tokens in many}) == 6, "two samples are alike")


@check
def company_changes_nothing(server: ServerUnderTest) -> None:
    """a seeded request is answered alike alone and among others"""
    sampler = base(server)
    alone = sampler.ask(prompt(server), seed=5, **FREE)
    others = [sampler.submit(server.text(3 + i, seed=30 + i), max_tokens=24, stop=[]) for i in range(10)]
    among = sampler.ask(prompt(server), seed=5, **FREE)
    for other in others:
        read(other)
    expect_equal(among.tokens, alone.tokens, "tokens")
    expect_close(among.samples[0].logprobs, alone.samples[0].logprobs, 1e-4, "log-probs")


@check
def temperature_zero(server: ServerUnderTest) -> None:
    """temperature 0 always samples the most likely token"""
    tokens = greedy(server).tokens[0]
    expect_equal(greedy(server, seed=9).tokens[0], tokens, "tokens with another seed")
    expect_equal([best[0][0] for best in _best(server, tokens, 1)], tokens, "most likely tokens")


@check
def top_k(server: ServerUnderTest) -> None:
    """top_k keeps the k most likely tokens: 1 is greedy, 2 samples both and no third"""
    sampler, ask = base(server), prompt(server)
    expect_equal(sampler.ask(ask, seed=3, top_k=1, **FREE).tokens, greedy(server).tokens, "top_k 1")
    ranks = set()
    for sample in sampler.ask(ask, 4, seed=3, temperature=2.0, top_k=2, **FREE).samples:
        for token, best in zip(sample.tokens, _best(server, sample.tokens, 3), strict=True):
            near = [t for t, lp in best if lp > best[1][1] - 1e-4]  # equally likely tokens have no order
            expect(token in near, f"token {token} is not among the two most likely, {best}")
            ranks.add(near.index(token))
    expect(ranks == {0, 1}, f"only ranks {ranks} of the two most likely were sampled")


@check
def top_p(server: ServerUnderTest) -> None:
    """top_p keeps the most likely tokens up to that probability: near 0 is greedy, 1 keeps all"""
    sampler, ask = base(server), prompt(server)
    expect_equal(sampler.ask(ask, seed=3, top_p=1e-6, **FREE).tokens, greedy(server).tokens, "top_p 1e-6")
    expect_equal(sampler.ask(ask, seed=3, top_p=1.0, **FREE).tokens, sampler.ask(ask, seed=3, **FREE).tokens, "top_p 1")
    for sample in sampler.ask(ask, 4, seed=3, top_p=0.5, **FREE).samples:
        for token, best in zip(sample.tokens, _best(server, sample.tokens, 20), strict=True):
            rank = [t for t, _ in best].index(token) if token in dict(best) else len(best)
            before = sum(np.exp(lp) for _, lp in best[:rank])
            expect(before < 0.5 + 1e-3, f"token {token} comes after {before:.2f} of the probability")


@check
def stop_tokens(server: ServerUnderTest) -> None:
    """a stop token ends the sample and is kept as its last"""
    sampler = base(server)
    tokens = sampler.ask(prompt(server), seed=5, **FREE).tokens[0]
    at = next(i for i in range(3, 16) if tokens[i] not in tokens[:i])
    [sample] = sampler.ask(prompt(server), seed=5, max_tokens=16, stop=[tokens[at]]).samples
    expect_equal(sample.tokens, tokens[: at + 1], "tokens")
    expect(sample.stop_reason.endswith("stop"), f"stop_reason {sample.stop_reason}")
    expect_equal(len(sample.logprobs), at + 1, "log-probs")


@check
def stop_strings(server: ServerUnderTest) -> None:
    """a stop string ends the sample once it is in the text; the token that completes it is kept"""
    sampler, text = base(server), server.tokenizer
    ask = prompt(server)
    tokens = sampler.ask(ask, seed=5, **FREE).tokens[0]
    stop = text.decode(tokens[5:7])
    if not stop.strip() or "\N{REPLACEMENT CHARACTER}" in stop:
        raise Skip("what was sampled is no text")
    for given in (stop, [stop, "never seen in any text"]):
        [sample] = sampler.ask(ask, seed=5, max_tokens=16, stop=given).samples
        expect_equal(sample.tokens, tokens[: len(sample.tokens)], "tokens")
        expect(stop in text.decode(sample.tokens), f"{stop!r} is not in the text")
        expect(stop not in text.decode(sample.tokens[:-1]), f"{stop!r} was there a token earlier")
        expect(sample.stop_reason.endswith("stop"), f"stop_reason {sample.stop_reason}")


@check
def end_of_text(server: ServerUnderTest) -> None:
    """a sample without `stop` ends at the tokenizer's end of text; one with an empty list does not"""
    end = server.tokenizer.eos_token_id
    if end is None:
        raise Skip("the tokenizer has no end of text")
    adapter, lesson = server.adapter(rank=8), [*server.text(5, seed=40), end]
    for _ in range(80):
        chance = adapter.backward([text_datum(lesson, [0.0] * 4 + [1.0])]).logprobs[0][-1]
        if chance > -0.01:
            break
        adapter.step(learning_rate=2e-2)
    expect(chance > -0.3, f"could not teach it to end: log-prob {chance:.2f}")
    sampler = adapter.sampler()
    [sample] = sampler.ask(lesson[:-1], temperature=0.0, max_tokens=8).samples
    expect_equal(sample.tokens, [end], "tokens without stop")
    expect(sample.stop_reason.endswith("stop"), f"stop_reason {sample.stop_reason}")
    [sample] = sampler.ask(lesson[:-1], temperature=0.0, max_tokens=8, stop=[]).samples
    expect_equal(len(sample.tokens), 8, "number of tokens with an empty list of stops")


@check
def max_tokens_none(server: ServerUnderTest) -> None:
    """a sample without max_tokens continues to the end of the context"""
    if server.max_context > 1024:
        raise Skip(f"a context of {server.max_context} tokens takes long to fill")
    ask = server.text(server.max_context - 20, seed=41)
    [sample] = base(server).ask(ask, stop=[], seed=1).samples
    expect(18 <= len(sample.tokens) <= 21, f"{len(sample.tokens)} tokens after {len(ask)} of {server.max_context}")
    expect(sample.stop_reason.endswith("length"), f"stop_reason {sample.stop_reason}")


@check
def prompt_over_the_context(server: ServerUnderTest) -> None:
    """a prompt that leaves no room is refused at once, and says so"""
    if server.max_context > 300_000:
        raise Skip(f"a context of {server.max_context} tokens")
    expect_refused(server.wire.sample(server.text(server.max_context + 1)), "prompt")
    too_much = server.wire.sample(server.text(10), {"max_tokens": server.max_context})
    if too_much.status_code == 200:  # or it ends where the context does
        expect("error" not in server.wire.outcome(server.wire.accepted(too_much)), "accepted, and then failed")


@check
def logprobs_are_the_models(server: ServerUnderTest) -> None:
    """log-probs of samples at temperature 1 equal prompt log-probs of the same tokens"""
    sampler, ask = base(server), prompt(server)
    for sample in sampler.ask(ask, 2, seed=5, **FREE).samples:
        scored = sampler.logprobs([*ask, *sample.tokens])[len(ask) :]
        expect_close(sample.logprobs, scored, 2e-3, "log-probs")


@check
def logprobs_are_tempered(server: ServerUnderTest) -> None:
    """log-probs at another temperature are of the distribution drawn from: differences shrink by T, and they add up

    log softmax(l / T) of two tokens differs by the T-th part of what log softmax(l) does.
    """
    sampler, ask = base(server), prompt(server)
    for temperature in (0.5, 2.0):
        drawn = sampler.ask(ask, 32, seed=5, max_tokens=1, stop=[], temperature=temperature).samples
        tempered = {sample.tokens[0]: sample.logprobs[0] for sample in drawn}
        if len(tempered) < 2:
            raise Skip("one token only was drawn")
        plain = {token: sampler.logprobs([*ask, token])[-1] for token in tempered}
        first = next(iter(tempered))
        got = [tempered[token] - tempered[first] for token in tempered]
        wanted = [(float(plain[token] or 0) - float(plain[first] or 0)) / temperature for token in tempered]
        expect_close(got, wanted, 5e-3, f"differences at temperature {temperature}")
        expect(sum(np.exp(lp) for lp in tempered.values()) < 1.001, f"they add to more than 1 at {temperature}")


@check
def logprobs_match_what_is_drawn(server: ServerUnderTest) -> None:
    """tokens are drawn as often as their log-probs say, at temperatures below and above 1"""
    sampler, ask = base(server), prompt(server)
    for temperature in (0.7, 1.5):
        drawn = sampler.ask(ask, 256, seed=77, max_tokens=1, stop=[], temperature=temperature).samples
        tokens = [sample.tokens[0] for sample in drawn]
        likely = max(set(tokens), key=tokens.count)
        chance = float(np.exp(next(s.logprobs[0] for s in drawn if s.tokens[0] == likely)))
        error = 5 * np.sqrt(chance * (1 - chance) / 256) + 0.01
        expect_close(tokens.count(likely) / 256, chance, error, f"share of the commonest token at {temperature}")


@check
def prompt_logprobs(server: ServerUnderTest) -> None:
    """prompt log-probs are one a token, the first None, as compute_logprobs and as training gives them"""
    adapter = server.adapter()
    adapter.backward([text_datum(server.lesson)])
    adapter.step(learning_rate=1e-2)
    sampler = adapter.sampler()
    got = sampler.ask(server.lesson, max_tokens=1, prompt_logprobs=True).prompt_logprobs
    expect(got is not None and len(got) == len(server.lesson), f"length {got and len(got)}, not {len(server.lesson)}")
    assert got is not None
    expect_equal(got[0], None, "the first")
    computed = sampler.logprobs(server.lesson)
    expect_equal((len(computed), computed[0]), (len(server.lesson), None), "length and first of compute_logprobs")
    expect_close(computed[1:], got[1:], 1e-4, "compute_logprobs")
    expect_close(got[1:], adapter.logprobs(server.lesson)[0], 2e-3, "training's log-probs")


@check
def prompt_logprobs_know_no_temperature(server: ServerUnderTest) -> None:
    """prompt log-probs are at temperature 1 whatever the samples' is"""
    sampler, ask = base(server), prompt(server)
    hot = sampler.ask(ask, max_tokens=1, temperature=2.0, prompt_logprobs=True).prompt_logprobs
    expect_close((hot or [])[1:], sampler.logprobs(ask)[1:], 1e-4, "prompt log-probs")


@check
def topk_prompt_logprobs(server: ServerUnderTest) -> None:
    """topk_prompt_logprobs returns the k most likely tokens of each position in descending order, None at the first"""
    sampler, ask = base(server), prompt(server)
    answer = sampler.ask(ask, max_tokens=1, topk=4, prompt_logprobs=True)
    topk, own = answer.topk or [], answer.prompt_logprobs or []
    expect_equal(len(topk), len(ask), "positions")
    expect_equal(topk[0], None, "the first")
    for token, lp, best in zip(ask[1:], own[1:], topk[1:], strict=True):
        assert best is not None and lp is not None
        expect_equal(len(best), 4, "tokens of a position")
        values = [value for _, value in best]
        expect(values == sorted(values, reverse=True), f"not in order: {best}")
        expect(values[-1] <= lp + 1e-3 if token in dict(best) else lp <= values[-1] + 1e-3, "one likelier is missing")
        if token in dict(best):
            expect_close(dict(best)[token], lp, 1e-3, "the prompt's own token")


@check
def one_token_prompt(server: ServerUnderTest) -> None:
    """a prompt of one token works"""
    answer = base(server).ask([server.text(1)[0]], max_tokens=3, stop=[], prompt_logprobs=True)
    expect_equal((len(answer.tokens[0]), answer.prompt_logprobs), (3, [None]), "tokens, prompt log-probs")


@check
def many_at_once(server: ServerUnderTest) -> None:
    """sixty requests at once are all answered, each with its own"""
    sampler = base(server)
    asks = [server.text(4 + i % 5, seed=50 + i) for i in range(60)]
    futures = [sampler.submit(ask, temperature=0.0, max_tokens=4, stop=[]) for ask in asks]
    answers = [read(future) for future in futures]
    for i in (0, 17, 59):
        alone = sampler.ask(asks[i], temperature=0.0, max_tokens=4, stop=[])
        expect_equal(answers[i].tokens, alone.tokens, f"tokens of request {i}")


@check
def adapters_at_once(server: ServerUnderTest) -> None:
    """samplers of two adapters and the base asked at once answer each with their own weights"""
    samplers = [base(server)]
    for seed in (1, 2):
        adapter = server.adapter()
        for _ in range(3):
            adapter.backward([text_datum(server.text(17, seed=seed))])
            adapter.step(learning_rate=2e-2)
        samplers.append(adapter.sampler())
    alone = [sampler.logprobs(server.lesson)[1:] for sampler in samplers]
    futures = [s.submit(server.lesson, max_tokens=1, prompt_logprobs=True) for _ in range(3) for s in samplers]
    for i, future in enumerate(futures):
        expect_close((read(future).prompt_logprobs or [])[1:], alone[i % 3], 1e-4, f"log-probs of sampler {i % 3}")
    expect_far(alone[1], alone[2], 1e-2, "the two adapters are alike")


@check
def sequence_ids(server: ServerUnderTest) -> None:
    """a sample request is answered with an id for each sample, all different"""
    answer = server.wire.sample(server.text(4), num_samples=3)
    server.wire.result(answer)
    ids = answer.json().get("sample_sequence_ids", [])
    expect(len(ids) == len(set(ids)) == 3, f"sample_sequence_ids {ids}")


@check
def sample_without_a_session(server: ServerUnderTest) -> None:
    """a path of sampler weights can be sampled without a sampling session"""
    path = server.adapter().save_for_sampler(server.wire.fresh("direct"))
    result = server.wire.result(server.wire.sample(server.text(4), model_path=path))
    expect_equal(len(result["sequences"][0]["tokens"]), 2, "tokens")
    expect(result["sequences"][0]["stop_reason"] in ("stop", "length"), f"{result['sequences'][0]}")


@check
def prompt_in_chunks(server: ServerUnderTest) -> None:
    """a prompt in several chunks is the prompt in one"""
    whole, options = server.text(8), {"max_tokens": 4, "stop": [], "temperature": 0.0}
    chunks = [{"type": "encoded_text", "tokens": part} for part in (whole[:3], whole[3:4], whole[4:])]
    one = server.wire.result(server.wire.sample(whole, options))
    parts = server.wire.result(server.wire.sample({"chunks": chunks}, options))
    expect_equal(parts["sequences"][0]["tokens"], one["sequences"][0]["tokens"], "tokens")


@check
def sampler_is_known(server: ServerUnderTest) -> None:
    """a sampler can be looked up, and knows its base model"""
    adapter = server.adapter()
    path = adapter.save_for_sampler(server.wire.fresh("known"))
    sampler = server.service.sampler(path)
    get_base_model = sampler.client.get_base_model
    expect_equal(done(get_base_model()), server.target.model, "get_base_model")
    session = server.wire.session()
    sampler_id = server.wire.sampling_session(session, 2, model_path=path).json()["sampling_session_id"]
    found = done(server.service.rest().get_sampler(sampler_id))
    expect_equal(
        (found.sampler_id, found.base_model, found.model_path), (sampler_id, server.target.model, path), "sampler"
    )


@check
def new_options_are_not_ignored(server: ServerUnderTest) -> None:
    """options of newer clients are honoured or refused, never passed over in silence"""
    ask = server.text(6)
    options = {
        "prompt_logprobs_last_n": 2,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": {"data": ask[1:], "dtype": "int64", "shape": [len(ask) - 1, 1]},
        "topk_sample_logprobs": 2,
    }
    for name, value in options.items():
        answer = server.wire.sample(ask, prompt_logprobs=True, **{name: value})
        if answer.status_code in (400, 422):
            expect(name in answer.text, f"the refusal does not name {name}: {answer.text}")
            continue
        result = server.wire.result(answer)
        scores, targets = result.get("prompt_logprobs") or [], result.get("target_prompt_logprobs")
        honoured = {
            "prompt_logprobs_last_n": len(scores) == 2,
            "prompt_alt_tokens_k": result.get("prompt_alt_tokens"),
            "target_prompt_logprobs": targets and np.allclose(targets["data"], scores[1:], atol=1e-3),
            "topk_sample_logprobs": "topk" in str(result["sequences"][0].keys()),
        }
        expect(honoured[name], f"{name} is passed over")


def _best(server: ServerUnderTest, tokens: list[int], k: int) -> list[list[tuple[int, float]]]:
    """Return the k most likely tokens at the position of each of `tokens` after the prompt."""
    ask = prompt(server)
    topk = base(server).ask([*ask, *tokens], max_tokens=1, topk=k).topk or []
    return [best or [] for best in topk[len(ask) :]]
