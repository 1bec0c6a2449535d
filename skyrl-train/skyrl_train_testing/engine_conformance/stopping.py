"""Checks of the end of an answer."""

from typing import Any

from skyrl_train_testing.engine_conformance.answers import check_reference_log_probs
from skyrl_train_testing.engine_conformance.registry import check, expect
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest

_FREE = 40


async def _generate_freely(subject: EngineUnderTest, **params: Any) -> tuple[list[int], list[int], dict[str, Any]]:
    """A prompt, a varied answer of 40 tokens that is written again whenever it is asked for, and how to ask."""
    prompt = subject.prompt(9, seed=4)
    steady = {"temperature": 0.0, "repetition_penalty": 1.5, "ignore_eos": True, "max_tokens": _FREE, **params}
    output = await subject.generate([prompt], **steady)
    return prompt, output["response_ids"][0], steady


def _decode(subject: EngineUnderTest, ids: list[int]) -> str:
    return str(subject.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _find_first(subject: EngineUnderTest, ids: list[int], text: str) -> int:
    """Return the number of tokens until the answer contains this text."""
    return next(num for num in range(1, len(ids) + 1) if text in _decode(subject, ids[:num]))


@check()
async def check_max_tokens(subject: EngineUnderTest) -> None:
    """An answer ends by `length` after exactly max_tokens."""
    for num in (1, 2, 13):
        output = await subject.generate([subject.prompt(5)], max_tokens=num, ignore_eos=True)
        found = len(output["response_ids"][0]), output["stop_reasons"][0]
        expect(found == (num, "length"), f"max_tokens={num} must give ({num}, 'length'); got {found}")


@check()
async def check_context_limit(subject: EngineUnderTest) -> None:
    """Prompt and answer fill the context at most; then the answer ends by `length`, not by an error."""
    room = 5
    prompt = subject.prompt(subject.info.max_model_len - room)
    output = await subject.generate([prompt], max_tokens=room + 50, ignore_eos=True)
    found = len(output["response_ids"][0]), output["stop_reasons"][0]
    expect(found == (room, "length"), f"{room} tokens fit behind the prompt: expected ({room}, 'length'); got {found}")
    check_reference_log_probs(subject, prompt, output, 0, 1.0, f"behind a prompt of {len(prompt)} tokens")


@check()
async def check_stop_tokens(subject: EngineUnderTest) -> None:
    """The first of `stop_token_ids` ends the answer by `stop`, and is its last token."""
    prompt, free, steady = await _generate_freely(subject)
    place = next(i for i in range(3, _FREE) if free[i] not in free[:i])
    output = await subject.generate([prompt], stop_token_ids=[free[place]], **steady)
    expect(
        (output["response_ids"], output["stop_reasons"]) == ([free[: place + 1]], ["stop"]),
        f"the stop token {free[place]} is token {place}: expected {free[: place + 1]} by 'stop', got "
        f"{output['response_ids'][0]} by {output['stop_reasons'][0]!r}",
    )


@check()
async def check_end_of_sequence(subject: EngineUnderTest) -> str | None:
    """The model's end-of-sequence token ends an answer by `stop` and is its last token; with `ignore_eos` it is a token
    like others."""
    eos = subject.eos_ids
    prompts = [subject.prompt(6, seed=seed) for seed in range(24)]
    params = {"max_tokens": 60, "temperature": 1.5}
    output = await subject.generate(prompts, **params)
    for row, (ids, reason) in enumerate(zip(output["response_ids"], output["stop_reasons"], strict=True)):
        expect(not eos.intersection(ids[:-1]), f"answer {row} goes on after an end-of-sequence token: {ids}")
        expect(
            (reason == "stop") == (ids[-1] in eos),
            f"answer {row} ended by {reason!r} with the token {ids[-1]} (end of sequence: {eos})",
        )
    seen = "stop" in output["stop_reasons"]
    output = await subject.generate(prompts, ignore_eos=True, **params)
    lengths = {len(ids) for ids in output["response_ids"]}
    expect(lengths == {60}, f"with ignore_eos all answers have 60 tokens; got {sorted(lengths)}")
    expect(set(output["stop_reasons"]) == {"length"}, f"with ignore_eos: {set(output['stop_reasons'])}")
    return None if seen else "none of 24 answers came to an end-of-sequence token"


@check()
async def check_min_tokens(subject: EngineUnderTest) -> None:
    """No stop token is sampled before min_tokens, nor does one end a response; afterwards it does."""
    prompt, free, steady = await _generate_freely(subject)
    place = next(i for i in range(3, _FREE) if free[i] not in free[:i])
    least = place + 5
    output = await subject.generate([prompt], stop_token_ids=[free[place]], min_tokens=least, **steady)
    [ids] = output["response_ids"]
    expect(len(ids) >= least, f"min_tokens={least}, and the answer has {len(ids)} tokens")
    expect(free[place] not in ids[:least], f"the stop token {free[place]} was written before min_tokens={least}: {ids}")
    output = await subject.generate([subject.prompt(6, seed=k) for k in range(24)], min_tokens=20, max_tokens=25)
    shortest = min(map(len, output["response_ids"]))
    expect(shortest >= 20, f"min_tokens=20, and an answer ended with {shortest} tokens")


@check("stop_strings")
async def check_stop_strings(subject: EngineUnderTest) -> None:
    """An answer ends by `stop` with the token that completes a stop string, which stays in text and ids, also across
    token boundaries.
    """
    prompt, free, steady = await _generate_freely(subject)
    place = next(
        i
        for i in range(3, _FREE - 1)
        if (across := _decode(subject, [free[i]])[-1:] + _decode(subject, [free[i + 1]])[:1]).strip() == across
        and len(across) == 2
        and _find_first(subject, free, across) == i + 2
    )
    across = _decode(subject, [free[place]])[-1:] + _decode(subject, [free[place + 1]])[:1]
    for stop in ([across], ["\N{SNOWMAN}", across, _decode(subject, free)[-3:]], across):
        output = await subject.generate([prompt], stop=stop, **steady)
        ids, text, reason = output["response_ids"][0], output["responses"][0], output["stop_reasons"][0]
        expected = free[: place + 2]
        expect(
            (ids, reason) == (expected, "stop"),
            f"{across!r} is complete after {place + 2} tokens: expected {expected} by 'stop', got {ids} by {reason!r}",
        )
        expect(across in text, f"the stop string {across!r} must stay in the answer; its text is {text!r}")
        log_probs = output["response_logprobs"]
        assert log_probs is not None
        expect(len(log_probs[0]) == len(ids), f"{len(log_probs[0])} log-probs for {len(ids)} tokens")
    output = await subject.generate([prompt], stop=["\N{SNOWMAN}"], **steady)
    expect(
        (output["response_ids"][0], output["stop_reasons"][0]) == (free, "length"),
        f"a stop string that never comes changed the answer: {output['response_ids'][0]} in place of {free}",
    )
