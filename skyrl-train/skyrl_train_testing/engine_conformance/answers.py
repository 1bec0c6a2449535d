"""Tokens in, tokens out: which, with what log-probs, drawn from what."""

from typing import Any

import torch

from skyrl_train.inference_engines.base import InferenceEngineOutput, TokenDelta
from skyrl_train.inference_engines.columns import to_output
from skyrl_train.inference_engines.request import join_deltas
from skyrl_train_testing.engine_conformance.registry import check, check_close, expect
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest

_LENGTHS = (1, 2, 17, 40)
_TEMPERATURES = (0.5, 1.0, 1.6)
_LEAST_CHANCE = 1e-6
"""Smallest accepted probability that frequencies deviate as much as those found."""


def check_form(subject: EngineUnderTest, prompts: list[list[int]], output: InferenceEngineOutput) -> None:
    """Check that every column has a row for each request, every row a number for each token, and every id is a word."""
    for name in ("responses", "response_ids", "stop_reasons", "response_logprobs", "weight_versions"):
        column = output[name]
        expect(column is not None and len(column) == len(prompts), f"{name} must have {len(prompts)} rows: {column!r}")
    assert output["response_logprobs"] is not None
    rows = zip(output["response_ids"], output["response_logprobs"], output["weight_versions"], strict=True)
    for row, (ids, log_probs, versions) in enumerate(rows):
        expect(
            len(ids) == len(log_probs) == len(versions),
            f"answer {row} has {len(ids)} tokens, {len(log_probs)} log-probs and {len(versions)} weight versions",
        )
        outside = [token for token in ids if not 0 <= token < subject.info.vocab_size]
        expect(not outside, f"answer {row} has ids outside the vocabulary of {subject.info.vocab_size}: {outside[:3]}")
        expect(max(log_probs, default=0) <= 1e-6, f"answer {row} has a log-prob above 0: {max(log_probs, default=0)}")


def check_text(subject: EngineUnderTest, prompt: list[int], ids: list[int], text: str, *, skip: bool) -> None:
    """Check that the text is decoded from the ids, alone or after the prompt (some decoders drop a leading space)."""

    def decoded(tokens: list[int]) -> str:
        return str(subject.tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    readings = {decoded(ids), decoded(prompt + ids)[len(decoded(prompt)) :]}
    expect(text in readings, f"the text must be the decoded ids {readings}; got {text!r}")


def check_reference_log_probs(
    subject: EngineUnderTest, prompt: list[int], output: InferenceEngineOutput, row: int, temperature: float, what: str
) -> None:
    """Check log-probs against the reference model at this temperature."""
    ids, log_probs = output["response_ids"][row], output["response_logprobs"]
    assert log_probs is not None
    expected = subject.reference.log_probs(prompt, ids, temperature)
    others = {
        f"those at temperature {other:g}": subject.reference.log_probs(prompt, ids, other)
        for other in (1.0, *_TEMPERATURES)
        if other != temperature
    }
    check_close(what, log_probs[row], expected, subject.tolerance, others)


@check()
async def check_response_fields(subject: EngineUnderTest) -> None:
    """Every answer comes with ids, their text, a log-prob and a weight version a token, and why it ended."""
    prompts = [subject.prompt(length, seed=length) for length in _LENGTHS]
    for skip in (True, False):
        output = await subject.generate(prompts, max_tokens=30, skip_special_tokens=skip)
        check_form(subject, prompts, output)
        for prompt, ids, text in zip(prompts, output["response_ids"], output["responses"], strict=True):
            check_text(subject, prompt, ids, text, skip=skip)
        for row, (ids, reason) in enumerate(zip(output["response_ids"], output["stop_reasons"], strict=True)):
            expect(reason in ("stop", "length"), f"answer {row} has the stop reason {reason!r}")
            expect(1 <= len(ids) <= 30, f"answer {row} has {len(ids)} tokens with max_tokens=30")
            expect(reason == "stop" or len(ids) == 30, f"answer {row} ended by 'length' after {len(ids)} of 30 tokens")
        versions = {version for row in output["weight_versions"] for version in row}
        expect(versions == {subject.version}, f"all tokens have weight version {subject.version}; got {versions}")


@check()
async def check_streamed_prefix(subject: EngineUnderTest) -> None:
    """`stream` returns the answer of `generate`; the tokens, log-probs and versions handed out are its beginning."""
    request = subject.request(subject.prompt(9), max_tokens=24, logprobs=0, ignore_eos=True, temperature=0.0)
    deltas: list[TokenDelta] = []
    streamed = await subject.in_time(subject.engine.stream(request, deltas.append))
    whole = await subject.in_time(subject.engine.generate(request))
    check_form(subject, [request.prompt_token_ids], to_output([streamed], request.sampling_params))
    expect(streamed.token_ids == whole.token_ids, f"{streamed.token_ids}, not {whole.token_ids}")
    for name in ("token_ids", "log_probs", "weight_versions") if deltas else ():
        out, row = getattr(join_deltas(deltas), name) or [], getattr(streamed, name)
        expect(out == row[: len(out)], f"{name} of the tokens handed out: {out}, not the beginning of {row}")


@check()
async def check_omitted_log_probs(subject: EngineUnderTest) -> None:
    """Completions have no log-probs with logprobs=None, and an empty batch gives none of anything."""
    output = await subject.generate([subject.prompt(5)], max_tokens=3, logprobs=None)
    expect(output["response_logprobs"] is None, f"response_logprobs must be None; got {output['response_logprobs']}")
    output = await subject.generate([])
    expect(output["response_ids"] == [], f"no prompts, no answers; got {output['response_ids']}")


@check()
async def check_log_probs(subject: EngineUnderTest) -> None:
    """The log-prob of a token is log softmax(logits / temperature) at it."""
    prompts = [subject.prompt(length, seed=length) for length in _LENGTHS]
    for temperature in _TEMPERATURES:
        output = await subject.generate(prompts, temperature=temperature, max_tokens=24, ignore_eos=True)
        check_form(subject, prompts, output)
        for row, prompt in enumerate(prompts):
            what = f"temperature {temperature:g}, prompt of {len(prompt)} tokens"
            check_reference_log_probs(subject, prompt, output, row, temperature, what)


@check()
async def check_log_probs_before_truncation(subject: EngineUnderTest) -> None:
    """Top-k, top-p and min-p restrict the tokens; log-probs are over the whole distribution."""
    prompts = [subject.prompt(12, seed=seed) for seed in range(3)]
    temperature, slack = 1.3, 2 * subject.tolerance
    settings: list[tuple[str, Any]] = [("top_k", 3), ("top_p", 0.6), ("min_p", 0.2)]
    for name, value in settings:
        output = await subject.generate(
            prompts, temperature=temperature, max_tokens=24, ignore_eos=True, **{name: value}
        )
        for row, prompt in enumerate(prompts):
            ids, log_probs = output["response_ids"][row], output["response_logprobs"]
            assert log_probs is not None
            logits = subject.reference.answer_logits(prompt, ids) / temperature
            whole = logits.double().log_softmax(-1)
            chosen = whole.gather(1, torch.tensor(ids)[:, None])
            likelier = whole > chosen + slack
            kept = {
                "top_k": likelier.sum(-1) < value,
                "top_p": (whole.exp() * likelier).sum(-1) < value + slack,
                "min_p": chosen[:, 0] >= whole.amax(-1) + torch.tensor(value).log() - slack,
            }[name]
            expect(kept.all(), f"{name}={value} leaves out a token that was chosen: number {int(kept.int().argmin())}")
            floor = {
                "top_k": whole.topk(min(3, whole.shape[1])).values[:, -1:],
                "top_p": chosen,
                "min_p": whole.amax(-1, keepdim=True) + torch.tensor(value).log(),
            }[name]
            truncated = whole.masked_fill(whole < floor, -torch.inf).log_softmax(-1)
            others = {
                f"those after {name}": truncated.gather(1, torch.tensor(ids)[:, None])[:, 0],
                "those at temperature 1": subject.reference.log_probs(prompt, ids),
            }
            check_close(f"{name}={value}", log_probs[row], chosen[:, 0], subject.tolerance, others)


@check()
async def check_repetition_penalty(subject: EngineUnderTest) -> None:
    """A greedy response with a repetition penalty takes the most likely penalized token; log-probs are unpenalized."""
    prompt, penalty = subject.prompt(8, seed=5), 1.6
    output = await subject.generate(
        [prompt], temperature=0.0, repetition_penalty=penalty, max_tokens=24, ignore_eos=True
    )
    [ids] = output["response_ids"]
    logits = subject.reference.answer_logits(prompt, ids)
    for place, token in enumerate(ids):
        seen = torch.tensor(sorted({*prompt, *ids[:place]}))
        penalized = logits[place].clone()
        penalized[seen] = torch.where(penalized[seen] > 0, penalized[seen] / penalty, penalized[seen] * penalty)
        gap = float(penalized.max() - penalized[token])
        expect(gap <= 4 * subject.tolerance, f"token {place} is {gap:.3f} below the best after the penalty")
    check_reference_log_probs(subject, prompt, output, 0, 1.0, "with a repetition penalty")


@check()
async def check_greedy_tokens(subject: EngineUnderTest) -> None:
    """Temperature 0 takes the most likely token; log-probs are at temperature 1."""
    prompts = [subject.prompt(length, seed=length) for length in _LENGTHS]
    output = await subject.generate(prompts, temperature=0.0, max_tokens=40, ignore_eos=True)
    for row, prompt in enumerate(prompts):
        ids = output["response_ids"][row]
        logits = subject.reference.answer_logits(prompt, ids)
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        place = int(gaps.argmax())
        expect(
            float(gaps[place]) <= 2 * subject.tolerance,
            f"greedy token {place} of the prompt of {len(prompt)} tokens lies {float(gaps[place]):.4f} below the best",
        )
        check_reference_log_probs(subject, prompt, output, row, 1.0, "greedy")


@check()
async def check_sampling_distribution(subject: EngineUnderTest) -> None:
    """Tokens come as often as softmax(logits / temperature) says (a chi-square test of 512 draws)."""
    prompt, temperature, num = subject.prompt(6, seed=9), 0.7, 512
    output = await subject.generate([prompt] * num, temperature=temperature, max_tokens=1, ignore_eos=True)
    drawn = torch.tensor([ids[0] for ids in output["response_ids"]])
    shares = (subject.reference.logits(prompt)[-1].double() / temperature).softmax(-1)
    order = shares.argsort(descending=True)
    expected, found = shares[order] * num, torch.bincount(drawn, minlength=len(shares)).double()[order]
    large = int((expected >= 8).sum())  # the rare ones are counted together
    expected = torch.cat([expected[:large], expected[large:].sum()[None]])
    found = torch.cat([found[:large], found[large:].sum()[None]])
    statistic = float(((found - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    freedom = torch.tensor(max(large, 1) / 2, dtype=torch.float64)
    chance = float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
    expect(
        chance > _LEAST_CHANCE,
        f"{num} draws at temperature {temperature} do not look like the distribution (chi-square {statistic:.1f} of "
        f"{large} degrees of freedom, chance {chance:.1g}): expected about "
        f"{[round(float(e)) for e in expected[:4]]} of the likeliest tokens, got {[int(f) for f in found[:4]]}",
    )


@check("seed")
async def check_seeds(subject: EngineUnderTest) -> None:
    """The same seed gives the same responses alone and among concurrent requests; request i of a batch has its own
    random numbers.
    """
    prompt = subject.prompt(10, seed=1)
    params = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0}
    first = (await subject.generate([prompt] * 3, seed=11, **params))["response_ids"]
    again = (await subject.generate([prompt] * 3, seed=11, **params))["response_ids"]
    expect(first == again, f"the same seed gave {first} and then {again}")
    expect(len({tuple(ids) for ids in first}) == 3, f"three requests of one seed must differ; got {first}")
    other = (await subject.generate([prompt] * 3, seed=12, **params))["response_ids"]
    expect(not {tuple(ids) for ids in first} & {tuple(ids) for ids in other}, "another seed gave the same answers")
    crowd = [subject.begin([subject.prompt(5 + k, seed=k)], seed=k, **params) for k in range(6)]
    beside = (await subject.generate([prompt] * 3, seed=11, **params))["response_ids"]
    for task in crowd:
        await task
    expect(beside == first, f"beside other requests, the seed gave {beside} in place of {first}")
    swapped = (await subject.generate([prompt] * 2, seed=[[11, 2], [11, 0]], **params))["response_ids"]
    expect(
        swapped == [first[2], first[0]],
        f"[seed, index] pairs [11, 2] and [11, 0] must give answers 2 and 0 of seed 11, {[first[2], first[0]]}; "
        f"got {swapped}",
    )


@check()
async def check_samples_differ(subject: EngineUnderTest) -> None:
    """`sample` continues one prompt several times, each in its own way, also without a seed."""
    prompt = subject.prompt(10, seed=2)
    params = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.2}
    output = await subject.in_time(subject.engine.sample(prompt, 6, params))
    check_form(subject, [prompt] * 6, output)
    expect(len({tuple(ids) for ids in output["response_ids"]}) == 6, f"six samples: {output['response_ids']}")
    for row in range(6):
        check_reference_log_probs(subject, prompt, output, row, 1.2, f"sample {row}")


@check("prompt_top_log_probs")
async def check_top_prompt_log_probs(subject: EngineUnderTest) -> None:
    """prompt_logprobs=3 returns the three most likely tokens at each prompt position, at the temperature."""
    prompts, temperature = [subject.prompt(length, seed=length) for length in _LENGTHS], 0.6
    output = await subject.generate(prompts, temperature=temperature, max_tokens=1, prompt_logprobs=3)
    rows = output.get("prompt_top_logprobs")
    expect(rows is not None and len(rows) == len(prompts), f"prompt_top_logprobs must have {len(prompts)} rows: {rows}")
    for prompt, top, own in zip(prompts, rows or [], output.get("prompt_logprobs") or [], strict=True):
        what = f"the prompt of {len(prompt)} tokens"
        expect(
            top.ids.shape == top.log_probs.shape == (len(prompt) - 1, 3), f"{what}: {top.ids.shape}, 3 words a place"
        )
        expect(len(own) == len(prompt) - 1, f"{what}: its own tokens have {len(own)} log-probs beside")
        whole = (subject.reference.logits(prompt)[:-1] / temperature).log_softmax(dim=-1)
        # Of the words that were named, and of the likeliest: which of two equally likely ones comes may differ.
        named = whole.gather(1, torch.from_numpy(top.ids))
        check_close(f"{what}: the words named", top.log_probs.flatten().tolist(), named.flatten(), subject.tolerance)
        likeliest = whole.topk(3).values.flatten()
        check_close(f"{what}: the likeliest words", top.log_probs.flatten().tolist(), likeliest, subject.tolerance)


@check("prompt_log_probs")
async def check_prompt_log_probs(subject: EngineUnderTest) -> None:
    """Every token of a prompt but the first has its log-prob at the temperature, with prompt_logprobs=0."""
    prompts = [subject.prompt(length, seed=length) for length in _LENGTHS] + [subject.prompt(40, seed=40)]
    for temperature in (1.0, 0.6):
        output = await subject.generate(prompts, temperature=temperature, max_tokens=2, prompt_logprobs=0)
        rows = output.get("prompt_logprobs")
        expect(rows is not None and len(rows) == len(prompts), f"prompt_logprobs must have {len(prompts)} rows: {rows}")
        assert rows is not None
        for prompt, log_probs in zip(prompts, rows, strict=True):
            expected = subject.reference.prompt_log_probs(prompt, temperature)
            others = {"those at temperature 1": subject.reference.prompt_log_probs(prompt)}
            what = f"the prompt of {len(prompt)} tokens at temperature {temperature:g}"
            check_close(what, log_probs, expected, subject.tolerance, others if temperature != 1.0 else None)
