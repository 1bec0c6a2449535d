"""The arithmetic of an answer in parts. The tokenizer of these tests: token 97 is "a", 98 is "b", ..."""

import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl_train.inference_engines.continuation import EngineCall, build_next_call, join
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.request import Completion, GenerationRequest

PROMPT = [65, 66, 67]


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def part(
    text: str, stop_reason: str = "abort", version: int = 0, prompt_log_probs: list[float] | None = None
) -> Completion:
    ids = list(map(ord, text))
    return Completion(ids, stop_reason, [version] * len(ids), [-float(i) for i in ids], text, prompt_log_probs)


def step(params: dict[str, Any], *parts: Completion, max_model_len: int | None = None) -> EngineCall | Completion:
    return build_next_call(PROMPT, params, parts, decode, max_model_len)


def asks(text: str, **params: Any) -> EngineCall:
    return EngineCall(PROMPT + list(map(ord, text)), params)


@pytest.mark.parametrize(
    "params, parts, expected",
    [
        ({"max_tokens": 5}, [], asks("", max_tokens=5)),
        ({"max_tokens": 5}, [part("")], asks("", max_tokens=5)),  # aborted before the first token
        ({"max_tokens": 5}, [part("ab")], asks("ab", max_tokens=3)),
        ({"max_tokens": 5}, [part("ab"), part("")], asks("ab", max_tokens=3)),
        ({"max_tokens": 5}, [part("ab"), part("cd")], asks("abcd", max_tokens=1)),
        ({}, [part("ab")], asks("ab")),  # no budget but the context
        ({"max_tokens": None}, [part("ab")], asks("ab", max_tokens=None)),
        ({"max_tokens": 5, "min_tokens": 3}, [part("ab")], asks("ab", max_tokens=3, min_tokens=1)),
        ({"max_tokens": 5, "min_tokens": 3}, [part("abcd")], asks("abcd", max_tokens=1, min_tokens=0)),
        ({"max_tokens": 5, "seed": [[7, 2]], "top_p": 0.9, "stop_token_ids": [9]}, [part("a")],
         asks("a", max_tokens=4, seed=[[7, 2]], top_p=0.9, stop_token_ids=[9])),
    ],
)  # fmt: skip
def test_next_call_continues_after_generated_tokens(params, parts, expected):
    assert step(params, *parts) == expected


@pytest.mark.parametrize(
    "params, parts, text, stop_reason",
    [
        ({"max_tokens": 4}, [part("ab"), part("cd", "length")], "abcd", "length"),
        ({"max_tokens": 4}, [part("ab"), part("cd")], "abcd", "length"),  # aborted exactly at the boundary
        ({"max_tokens": 4}, [part("abcd")], "abcd", "length"),
        ({"max_tokens": 9}, [part("ab"), part("c", "stop")], "abc", "stop"),
        ({"max_tokens": 9}, [part("ab"), part("c", "length")], "abc", "length"),  # out of context
        ({"max_tokens": 9}, [part(""), part(""), part("c", "stop")], "c", "stop"),
    ],
)
def test_completion_ends_at_stop_or_exhausted_budget(params, parts, text, stop_reason):
    answer = step(params, *parts)
    assert isinstance(answer, Completion)
    assert (answer.text, answer.stop_reason, decode(answer.token_ids)) == (text, stop_reason, text)


def test_full_context_ends_started_completion():
    assert step({}, part("ab"), max_model_len=6) == asks("ab")
    answer = step({}, part("abc"), max_model_len=6)
    assert isinstance(answer, Completion) and answer.stop_reason == "length"
    assert isinstance(step({}, part(""), max_model_len=3), EngineCall), (
        "the engine says what is wrong with such a prompt"
    )


@pytest.mark.parametrize(
    "stop, params, parts, text, stop_reason",
    [
        ("xyz", {}, [part("axy"), part("zbc", "length")], "axyz", "stop"),  # completed by the next part's first token
        (["xyz"], {}, [part("ax"), part("yzbc", "stop")], "axyz", "stop"),
        (
            ["xyz"],
            {},
            [part("ax"), part("y"), part("zb")],
            "axyz",
            "stop",
        ),  # over three parts, the last aborted as well
        (["xyz"], {}, [part("axy"), part("abxyz", "stop")], "axyabxyz", "stop"),  # within a part: the engine's business
        (["xyz"], {}, [part("axy"), part("b", "length")], "axyb", "length"),
        (["bc", "yb"], {}, [part("ay"), part("bcd", "length")], "ayb", "stop"),  # whichever is complete first
        (["xyz"], {"min_tokens": 4}, [part("xy"), part("zbc", "length")], "xyzbc", "length"),  # too early to count
        (["xyz"], {"min_tokens": 3}, [part("xy"), part("zbc", "length")], "xyz", "stop"),
        (["xyz"], {"max_tokens": 4}, [part("axy"), part("z")], "axyz", "stop"),  # at the boundary: not `length`
    ],
)
def test_stop_string_spanning_parts_ends_completion(stop, params, parts, text, stop_reason):
    answer = step({"max_tokens": 20, "stop": stop} | params, *parts)
    assert isinstance(answer, Completion)
    assert (answer.text, answer.stop_reason) == (text, stop_reason)
    assert answer.token_ids == list(map(ord, text))
    assert len(answer.weight_versions) == len(answer.log_probs or []) == len(text)


def test_parts_are_joined_token_by_token():
    whole = join(PROMPT, [part("ab", version=3), part("c", version=4)], decode, "stop")
    assert whole == Completion([97, 98, 99], "stop", [3, 3, 4], [-97.0, -98.0, -99.0], "abc", None)
    without = Completion([97], "abort", [3])
    assert join(PROMPT, [without, part("c")], decode, "stop").log_probs is None


def test_single_part_is_returned_unchanged():
    answer = Completion([97], "stop", [0], None, "whatever the engine says")
    assert step({"max_tokens": 9, "stop": "a"}, answer) is answer


@pytest.mark.parametrize(
    "parts, asked_again",
    [
        ([part("ab", prompt_log_probs=[-1.0, -2.0])], False),
        ([part("", prompt_log_probs=[-1.0, -2.0])], False),
        ([part("")], True),  # aborted before it was computed
        ([part("ab")], True),
    ],
)
def test_prompt_log_probs_are_requested_until_received(parts, asked_again):
    ask = step({"max_tokens": 5, "prompt_logprobs": 0}, *parts)
    assert isinstance(ask, EngineCall)
    assert ("prompt_logprobs" in ask.sampling_params) == asked_again


def test_prompt_log_probs_exclude_generated_tokens():
    late = part("c", "stop", prompt_log_probs=[-1.0, -2.0, -3.0, -4.0])  # of the prompt and the first part
    answer = step({"max_tokens": 5, "prompt_logprobs": 0}, part("ab"), late)
    assert isinstance(answer, Completion) and answer.prompt_log_probs == [-1.0, -2.0]
    both = step({"max_tokens": 5}, part("a", prompt_log_probs=[-1.0, -2.0]), late)
    assert isinstance(both, Completion) and both.prompt_log_probs == [-1.0, -2.0]


@pytest.fixture(scope="module")
def engine(chat_model: str):
    return NativeInferenceEngine(chat_model)


@pytest.mark.slow
@pytest.mark.parametrize("params", [
    {"max_tokens": 24, "ignore_eos": True},
    {"max_tokens": 24, "temperature": 0.0, "repetition_penalty": 1.3, "ignore_eos": True},
    {"max_tokens": 40, "stop": ["WORD"], "ignore_eos": True},
    {"max_tokens": 40, "stop": ["WORD"], "min_tokens": 12},
    {"max_tokens": 40, "stop_token_ids": list(range(40, 48)), "min_tokens": 3, "prompt_logprobs": 0},
])  # fmt: skip
async def test_interrupted_completion_equals_uninterrupted(engine, chat_model, params):
    """Wherever it is cut. `WORD` stands for the text that the answer has in its middle, so that it is found there."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    generator = random.Random(5)

    async def ask(prompt: list[int], sampling_params: dict[str, Any]) -> Completion:
        return await engine.generate(GenerationRequest(prompt_token_ids=prompt, sampling_params=sampling_params))

    def decode(token_ids: list[int]) -> str:
        text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    for seed in range(3):
        given = {"temperature": 1.0, "seed": [seed, 4]} | params
        prompt = [generator.randrange(4, 99) for _ in range(generator.randrange(1, 40))]
        if "stop" in given:
            free = await ask(prompt, given | {"stop": None})
            middle = decode(free.token_ids[16:19])
            given["stop"] = [middle]
        whole = await ask(prompt, given)
        if "stop" in given:
            assert whole.stop_reason == "stop"
        for _ in range(2):
            parts: list[Completion] = []
            while isinstance(now := build_next_call(prompt, given, parts, decode, 256), EngineCall):
                length = generator.randrange(0, 13)  # the engine is interrupted after so many tokens
                budget = now.sampling_params["max_tokens"]
                if length == 0:
                    parts.append(Completion([], "abort", [], []))
                    continue
                cut = min(length, budget)
                limits = {"max_tokens": cut, "min_tokens": min(now.sampling_params.get("min_tokens", 0), cut)}
                written = await ask(now.prompt_token_ids, now.sampling_params | limits)
                if written.stop_reason == "length" and cut < budget:
                    written = Completion(written.token_ids, "abort", written.weight_versions, written.log_probs,
                                   written.text, written.prompt_log_probs)  # fmt: skip
                parts.append(written)
            assert now == whole
