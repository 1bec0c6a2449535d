"""Checks of constrained responses, penalties, biases and top log-probs."""

import re

import torch

from skyrl_train_testing.engine_conformance.answers import check_reference_log_probs
from skyrl_train_testing.engine_conformance.registry import check, check_close, expect
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest

_THREE_DIGITS = {"json_schema": {"type": "integer", "minimum": 100, "maximum": 999}}
_PAIRS = {"lark": "start: /(ab|ba){2,6}/"}


@check("json_schema")
async def check_schema(subject: EngineUnderTest) -> None:
    """A response under a JSON schema that ends by itself satisfies the schema; its log-probs are over the unrestricted
    distribution, and concurrent responses do not change.
    """
    prompt, temperature = subject.prompt(9, seed=3), 0.8
    beside = subject.begin([prompt], temperature=0.0, max_tokens=12, ignore_eos=True)
    output = await subject.generate([prompt] * 8, constraint=_THREE_DIGITS, temperature=temperature, max_tokens=20)
    for row, (text, reason) in enumerate(zip(output["responses"], output["stop_reasons"], strict=True)):
        expect(reason == "stop" and re.fullmatch(r"\s*[1-9][0-9]{2}\s*", text), f"answer {row} is {text!r} ({reason})")
        check_reference_log_probs(subject, prompt, output, row, temperature, f"constrained answer {row}")
    expect(len(set(output["responses"])) > 1, f"eight samples at temperature {temperature}: {output['responses']}")
    usual = await subject.generate([prompt], temperature=0.0, max_tokens=12, ignore_eos=True)
    expect((await beside)["response_ids"] == usual["response_ids"], "a constrained answer changed one beside it")


@check("grammar")
async def check_grammar(subject: EngineUnderTest) -> None:
    """An answer under a grammar is a sentence of it, and the budget may cut it."""
    prompt = subject.prompt(7, seed=8)
    output = await subject.generate([prompt] * 4, constraint=_PAIRS, max_tokens=30)
    for text, reason in zip(output["responses"], output["stop_reasons"], strict=True):
        expect(reason == "stop" and re.fullmatch("(ab|ba){2,6}", text), f"the answer is {text!r} ({reason})")
    cut = await subject.generate([prompt], constraint=_PAIRS, max_tokens=2)
    expect(cut["stop_reasons"] == ["length"] and len(cut["response_ids"][0]) == 2, f"two tokens at most: {cut}")


@check("json_schema", "answer_tokens")
async def check_continued_constraint(subject: EngineUnderTest) -> None:
    """With num_answer_tokens the last tokens of the prompt count as the beginning of the answer."""
    prompt, schema = subject.prompt(9, seed=3), {"json_schema": {"enum": [1234567]}}
    output = await subject.generate([prompt], constraint=schema, max_tokens=20)
    [ids] = output["response_ids"]
    for cut in (1, 4, len(ids) - 1):
        rest = await subject.generate(
            [prompt + ids[:cut]], constraint=schema, max_tokens=20 - cut, num_answer_tokens=cut
        )
        expect(rest["response_ids"] == [ids[cut:]], f"behind {cut} tokens: {rest['response_ids']}, not {ids[cut:]}")


@check("penalties", "logit_bias")
async def check_penalties_and_biases(subject: EngineUnderTest) -> None:
    """A greedy answer takes the largest logit + logit_bias - frequency_penalty * count - presence_penalty *
    (count > 0), with counts of the answer alone; its log-probs are the model's own."""
    prompt, biases = subject.prompt(8, seed=5), {4: 0.6, 9: -0.8, 33: 0.4}
    output = await subject.generate(
        [prompt],
        temperature=0.0,
        frequency_penalty=0.7,
        presence_penalty=0.5,
        logit_bias=biases,
        max_tokens=24,
        ignore_eos=True,
    )
    [ids] = output["response_ids"]
    logits = subject.reference.answer_logits(prompt, ids)
    for place, token in enumerate(ids):
        counts = torch.bincount(torch.tensor(ids[:place], dtype=torch.long), minlength=logits.shape[1])
        adjusted = logits[place] - 0.7 * counts - 0.5 * (counts > 0)
        for biased, value in biases.items():
            adjusted[biased] += value
        gap = float(adjusted.max() - adjusted[token])
        expect(gap <= 4 * subject.tolerance, f"token {place} is {gap:.3f} below the best after penalties and biases")
    check_reference_log_probs(subject, prompt, output, 0, 1.0, "with penalties and biases")


@check("top_log_probs")
async def check_top_log_probs(subject: EngineUnderTest) -> None:
    """logprobs=3 returns the three most likely tokens at each response position, at the temperature."""
    prompt, temperature = subject.prompt(11, seed=6), 1.4
    output = await subject.generate([prompt] * 2, temperature=temperature, max_tokens=15, ignore_eos=True, logprobs=3)
    rows = output.get("response_top_logprobs")
    expect(rows is not None and len(rows) == 2, f"response_top_logprobs must have 2 rows: {rows}")
    for ids, top in zip(output["response_ids"], rows or [], strict=True):
        expect(top.ids.shape == top.log_probs.shape == (len(ids), 3), f"{top.ids.shape} for {len(ids)} tokens")
        whole = (subject.reference.answer_logits(prompt, ids) / temperature).log_softmax(dim=-1)
        named = whole.gather(1, torch.from_numpy(top.ids))
        check_close("the tokens named", top.log_probs.flatten().tolist(), named.flatten(), subject.tolerance)
        likeliest = whole.topk(3).values.flatten()
        check_close("the likeliest tokens", top.log_probs.flatten().tolist(), likeliest, subject.tolerance)
