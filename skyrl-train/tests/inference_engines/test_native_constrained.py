"""Constrained answers, penalties, biases and likeliest tokens of the native engine."""

import asyncio
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_runs import completions_of, log_probs_of
from transformers import AutoModelForCausalLM

from skyrl_train.errors import UnsupportedByEngine
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.constraints import MAX_CHARACTERS, MAX_DEPTH, Constraint
from skyrl_train.inference_engines.continuation import EngineCall, build_next_call
from skyrl_train.inference_engines.native import constrained
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.loading import load_tokenizer
from skyrl_train.inference_engines.native.sampling import (
    SamplingBatch,
    compute_random_key,
    compute_uniforms,
    sample,
    sample_by_inverse_cdf,
)
from skyrl_train.inference_engines.request import Completion

pytest.importorskip("llguidance", reason="the extra constrained is not installed")

END = 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = list(range(10, 30))


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
async def test_repeated_whitespace_is_masked_when_alternatives_exist(chat_model, kind):
    tokenizer = load_tokenizer(chat_model, False)
    compiler = constrained.ConstraintCompiler(tokenizer, len(tokenizer), [END])
    constraint = Constraint.parse({kind: PERSON if kind == "json_schema" else f"start: %json {json.dumps(PERSON)}"})
    opened, space, name, letter = (tokenizer.convert_tokens_to_ids(each) for each in ("{", " ", '"', "a"))
    matcher = await compiler.build_matcher(constraint, [opened])
    behind = await compiler.build_matcher(constraint, [opened, *[space] * constrained.MOST_SPACE])
    for _ in range(constrained.MOST_SPACE):
        assert matcher.compute_allowed(np.zeros(0, np.int64))[0, space]
        matcher.push(space)
    for full in (matcher, behind):
        [mask, *later] = full.compute_allowed(np.array([name, letter]))
        assert (mask[space], mask[name]) == (False, True)
        assert later[0].any(), "what follows is what the schema allows"
    compiler.close()


def engine_of(model: str, **more: Any) -> NativeInferenceEngine:
    return NativeInferenceEngine(model, device="cpu", dtype="float32", **more)


@pytest.fixture(scope="module")
def engine(chat_model: str):
    engine = engine_of(chat_model)
    yield engine
    asyncio.run(engine.teardown())


async def ask(engine: NativeInferenceEngine, prompts: list[list[int]], **params: Any) -> list[Completion]:
    return await completions_of(engine, *prompts, **{"seed": 3} | params)


def text_of(engine: NativeInferenceEngine, completion: Completion) -> str:
    return engine._decode(completion.token_ids)


async def test_completed_responses_satisfy_schema(engine):
    """Samples of a prompt, with truncation, at several temperatures."""
    num_complete = 0
    for params in ({"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5}):
        answers = await ask(engine, [PROMPT] * 8, constraint={"json_schema": PERSON}, max_tokens=150, **params)
        for answer in answers:
            assert answer.stop_reason in ("stop", "length")
            if answer.stop_reason == "stop":
                num_complete += 1
                assert answer.token_ids[-1] == END
                jsonschema.validate(json.loads(text_of(engine, answer)), PERSON)
    assert num_complete >= 12


async def test_max_tokens_truncates_constrained_completion(engine):
    [cut] = await ask(engine, [PROMPT], constraint={"json_schema": PERSON}, max_tokens=5)
    assert (cut.stop_reason, len(cut.token_ids)) == ("length", 5)
    assert text_of(engine, cut).startswith("{")


async def test_constrained_log_probs_use_unmasked_distribution(engine, chat_model):
    """The trainer computes log softmax(logits / temperature) without the mask; so does the engine. With kept tokens it
    is the distribution over these, which the mask has restricted."""
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    [answer] = await ask(engine, [PROMPT], constraint={"json_schema": PERSON}, max_tokens=60)
    _, expected = log_probs_of(model, PROMPT, answer.token_ids)
    np.testing.assert_allclose(answer.log_probs, expected, atol=2e-5)
    assert min(answer.log_probs) < -2  # far from certain, though the mask often leaves one token alone
    [kept] = await ask(
        engine, [PROMPT], constraint={"json_schema": PERSON}, max_tokens=60, return_kept_tokens=True, top_k=99
    )
    assert kept.kept_tokens is not None
    single = [value for value, count in zip(kept.log_probs, kept.kept_tokens.counts, strict=True) if count == 1]
    assert single
    assert set(single) == {0.0}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"temperature": 1.0, "top_k": 2}])
async def test_constrained_tokens_invert_renormalized_distribution(engine, chat_model, params):
    """A choice of one of five letters: the token is the inverse of the renormalized distribution at its random number,
    for 64 random numbers."""
    letters = "acegi"
    ids = load_tokenizer(chat_model, False)(letters, add_special_tokens=False)["input_ids"]
    answers = await ask(
        engine, [PROMPT] * 64, constraint={"lark": "start: /[acegi]/"}, max_tokens=1, **{"temperature": 1.0} | params
    )
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(chat_model)(torch.tensor([PROMPT])).logits[0, -1]
    allowed = torch.full_like(logits, -torch.inf)
    allowed[ids] = logits[ids] / params.get("temperature", 1.0)
    if "top_k" in params:
        allowed[allowed < allowed.topk(params["top_k"]).values[-1]] = -torch.inf
    keys = np.array([compute_random_key(3, index) for index in range(64)])
    uniform = torch.from_numpy(compute_uniforms(keys, np.full(64, len(PROMPT))))
    expected = sample_by_inverse_cdf(allowed.softmax(-1).expand(64, -1), uniform)
    assert [answer.token_ids for answer in answers] == [[token] for token in expected.tolist()]
    assert len(set(expected.tolist())) == (2 if "top_k" in params else 5)


def test_masked_frequencies_equal_renormalized_probabilities():
    """All of 20,000 equally spaced random numbers: frequencies are exact to their spacing."""
    num, vocabulary = 20_000, 7
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9])
    forbidden = torch.tensor([0, 0, 1, 0, 1, 0, 0], dtype=torch.bool)
    batch = SamplingBatch(temperature=torch.full((num,), 0.8), all_greedy=False, any_greedy=False)
    uniform = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    draw = sample(logits.expand(num, -1), batch, uniform, forbidden=forbidden.expand(num, -1))
    expected = (logits / 0.8).masked_fill(forbidden, -torch.inf).softmax(-1)
    frequencies = torch.bincount(draw.tokens, minlength=vocabulary) / num
    torch.testing.assert_close(frequencies, expected, atol=2 / num, rtol=0)
    torch.testing.assert_close(draw.log_probs, (logits / 0.8).log_softmax(-1)[draw.tokens])


async def test_complete_constraint_overrides_min_tokens(engine):
    """`min_tokens` bans the end as long as something else may come; a complete enumeration value ends."""
    constraint = {"json_schema": {"enum": ["ab"]}}
    [short] = await ask(engine, [PROMPT], constraint=constraint, max_tokens=30, min_tokens=20)
    assert text_of(engine, short) == '"ab"'
    [number] = await ask(
        engine, [PROMPT], constraint={"lark": "start: /[0-9]+/"}, max_tokens=30, min_tokens=20, logit_bias={END: 50}
    )
    assert len(number.token_ids) == 21


async def test_complete_constraint_ends_completion_despite_ignore_eos(engine):
    [answer] = await ask(engine, [PROMPT], constraint={"json_schema": {"enum": [7]}}, max_tokens=9, ignore_eos=True)
    assert (answer.stop_reason, text_of(engine, answer)) == ("stop", "7")


async def test_stop_strings_and_tokens_end_constrained_completion(engine):
    [answer] = await ask(engine, [PROMPT], constraint={"json_schema": PERSON}, max_tokens=60, stop=['"name'])
    assert (answer.stop_reason, text_of(engine, answer).endswith('"name')) == ("stop", True)


@pytest.mark.parametrize("cut", [1, 7, 30])
async def test_interrupted_constrained_completion_resumes_exactly(engine, cut):
    """Token for token, with the schema and with penalties, as if it had not been interrupted."""
    params = {"constraint": {"json_schema": PERSON}, "presence_penalty": 0.5, "logit_bias": {5: 1.0}, "max_tokens": 90}
    [whole] = await ask(engine, [PROMPT], **params)
    assert len(whole.token_ids) > cut
    [first] = await ask(engine, [PROMPT], **(params | {"max_tokens": cut}))
    first = Completion(**(vars(first) | {"stop_reason": "abort"}))
    call = build_next_call(PROMPT, params, [first], lambda ids: engine._decode(ids))
    assert isinstance(call, EngineCall)
    assert call.sampling_params["num_answer_tokens"] == cut
    [rest] = await ask(engine, [call.prompt_token_ids], **call.sampling_params)
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert first.log_probs + rest.log_probs == whole.log_probs


async def test_prompt_suffix_contradicting_constraint_is_rejected(engine):
    with pytest.raises(ValueError, match=r"num_answer_tokens.*contradict"):
        await ask(engine, [PROMPT], constraint={"json_schema": PERSON}, num_answer_tokens=3)
    with pytest.raises(ValueError, match="num_answer_tokens=99"):
        await ask(engine, [PROMPT], num_answer_tokens=99)


@pytest.mark.slow
async def test_speculation_keeps_constrained_completions_bit_exact(chat_model, engine):
    """Drafts within and against the schema, beside unconstrained rows."""
    fast = engine_of(chat_model, num_speculative_tokens=4)
    listing = {"type": "array", "items": {"enum": ["abab"]}, "minItems": 6, "maxItems": 8}
    try:
        for constraint in ({"json_schema": listing}, None):
            params = {"constraint": constraint, "max_tokens": 80, "temperature": 0.5, "logprobs": 2}
            prompts = [[*PROMPT, index, *PROMPT] for index in range(3, 7)]
            pairs = zip(await ask(engine, prompts, **params), await ask(fast, prompts, **params), strict=True)
            for plain, drafted in pairs:
                assert (plain.token_ids, plain.log_probs) == (drafted.token_ids, drafted.log_probs)
                np.testing.assert_array_equal(plain.top.ids, drafted.top.ids)
                assert len(plain.top.ids) == len(plain.token_ids)
        output = await fast.generate_batch(
            InferenceEngineInput(
                prompt_token_ids=[PROMPT],
                sampling_params={"constraint": {"json_schema": listing}, "max_tokens": 80},
                count_cached_tokens=True,
            )
        )
        assert output["draft_counts"][0].num_accepted > 0
    finally:
        await fast.teardown()


async def test_unusable_constraint_error_names_reason(engine):
    deep: Any = {"type": "string"}
    for _ in range(MAX_DEPTH):
        deep = {"type": "object", "properties": {"a": deep}}
    for constraint, says in [
        ({"json_schema": {"type": "strng"}}, "strng"),
        ({"json_schema": {"not": {"type": "string"}}}, "not"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}, "nsatisfiable"),
        ({"json_schema": {"type": "integer", "minimum": -9, "maximum": -1, "multipleOf": 3}}, "cannot be used"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "not present"),
        ({"json_schema": "{"}, "not a valid JSON schema"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "regex"),
        ({"json_schema": deep}, f"{MAX_DEPTH} levels"),
        ({"json_schema": {"enum": ["x" * MAX_CHARACTERS]}}, f"{MAX_CHARACTERS} characters"),
        ({"lark": "start: missing"}, "missing"),
        ({"regex": "a"}, "json_schema"),
        ("a", "json_schema"),
    ]:
        with pytest.raises(ValueError, match=says):
            await ask(engine, [PROMPT], constraint=constraint)
    assert (await ask(engine, [PROMPT], max_tokens=2))[0].stop_reason == "length"


async def test_schema_bomb_fails_only_its_request(engine):
    """Each is refused or answered; a request beside them gets the tokens that it always gets."""
    nested: Any = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(10)}
    bombs: list[Any] = [
        {"type": "string", "pattern": "(a?){500}a{500}"},
        {"type": "string", "pattern": "(.*a.{0,1000}){20}"},
        {"type": "array", "items": {"type": "array", "minItems": 10_000, "items": {}}, "minItems": 100_000},
        {"$defs": nested | {"d10": {"type": "string"}}, "$ref": "#/$defs/d0"},
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(14)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}},
        {"enum": [f"value{i}" for i in range(5_000)]},
        {"type": "integer", "multipleOf": 7919, "minimum": 0, "maximum": 10**30},
    ]
    usual = await ask(engine, [PROMPT], max_tokens=20, ignore_eos=True)
    results = await asyncio.gather(
        ask(engine, [PROMPT], max_tokens=20, ignore_eos=True),
        *(ask(engine, [PROMPT], constraint={"json_schema": bomb}, max_tokens=8) for bomb in bombs),
        return_exceptions=True,
    )
    assert results[0] == usual
    assert all(isinstance(result, list | ValueError) for result in results), results
    assert sum(isinstance(result, list) for result in results) >= 5


async def test_too_complex_constraint_fails_only_its_completion(engine, monkeypatch):
    matcher_class = constrained.AnswerMatcher
    push = matcher_class.push

    def fail_later(self: Any, token: int) -> bool:
        if len(self.__dict__.setdefault("seen", [])) == 3:
            raise constrained.ConstraintFailed("the constraint of the answer is too complex: states")
        self.seen.append(token)
        return push(self, token)

    monkeypatch.setattr(matcher_class, "push", fail_later)
    beside = asyncio.create_task(ask(engine, [PROMPT], max_tokens=12, ignore_eos=True))
    with pytest.raises(ValueError, match="too complex: states"):
        await ask(engine, [PROMPT], constraint={"json_schema": PERSON}, max_tokens=60)
    assert len((await beside)[0].token_ids) == 12
    assert not engine._core.num_running


async def test_constraint_error_names_missing_library(chat_model, monkeypatch):
    monkeypatch.setattr(constrained, "find_spec", lambda _name: None)
    engine = engine_of(chat_model)
    try:
        assert "skyrl-train[constrained]" in (await engine.describe()).unsupported["json_schema"]
        with pytest.raises(UnsupportedByEngine, match=r"skyrl-train\[constrained\]"):
            await ask(engine, [PROMPT], constraint={"json_schema": PERSON})
    finally:
        await engine.teardown()


async def test_penalties_and_biases_shift_greedy_token_as_computed(engine, chat_model):
    """logit + bias - frequency * count - presence * (count > 0), of the answer's tokens alone."""
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    bias = {40: 0.5, 41: -1.0, 7: 0.25}
    params = {"frequency_penalty": 0.3, "presence_penalty": 0.4, "logit_bias": bias, "temperature": 0.0}
    plain, penalized = [
        (await ask(engine, [PROMPT], max_tokens=40, ignore_eos=True, **given))[0]
        for given in ({"temperature": 0.0}, params)
    ]
    assert plain.token_ids != penalized.token_ids
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + penalized.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    for place, row in enumerate(logits):
        counts = torch.bincount(torch.tensor(penalized.token_ids[:place], dtype=torch.long), minlength=len(row))
        adjusted = row - 0.3 * counts - 0.4 * (counts > 0)
        for token, value in bias.items():
            adjusted[token] += value
        assert penalized.token_ids[place] == int(adjusted.argmax())
    np.testing.assert_allclose(penalized.log_probs, log_probs_of(model, PROMPT, penalized.token_ids)[1], atol=2e-5)


async def test_top_k_log_probs_match_model_distribution(engine, chat_model):
    """Whatever is drawn, they are those of the distribution at the temperature; each row has as many as it asks for."""
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    params = {"temperature": 0.7, "max_tokens": 6, "ignore_eos": True, "top_k": 3, "logit_bias": {44: 100.0}}
    one, five = await asyncio.gather(
        ask(engine, [PROMPT], logprobs=1, **params), ask(engine, [PROMPT, PROMPT[:5]], logprobs=5, **params)
    )
    for prompt, answer, num in [(PROMPT, one[0], 1), (PROMPT, five[0], 5), (PROMPT[:5], five[1], 5)]:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).topk(num, dim=-1)
        assert answer.top.ids.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(answer.top.log_probs, expected.values, atol=2e-5)
        assert set(answer.token_ids) == {44}
    with pytest.raises(ValueError, match="up to 20"):
        await ask(engine, [PROMPT], logprobs=21)


@settings(max_examples=30)
@given(st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=8), st.integers(0, 6))
def test_schema_depth_counts_objects_and_arrays(value, limit):
    def depth(node: Any) -> int:
        return 1 + max(map(depth, node), default=0) if isinstance(node, list) else 0

    from skyrl_train.inference_engines.constraints import _is_deeper

    assert _is_deeper({"enum": value}, limit) == (1 + depth(value) > limit)
    assert Constraint.parse({"json_schema": {"enum": value}}) == Constraint.parse(
        {"json_schema": json.dumps({"enum": value})}
    )
