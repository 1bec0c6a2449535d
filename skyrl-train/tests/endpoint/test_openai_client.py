"""The real `openai` client against a real server in front of a real engine: what is asked for is what comes."""

import math

import pytest

from skyrl_train.inference_engines.native.loading import load_tokenizer

from .conftest import ADD, CALL, QUESTION, client_of, in_thread, serving

HELLO = [{"role": "user", "content": "Hello"}]


def rendered(model: str, messages) -> list[int]:
    return load_tokenizer(model, False).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


async def test_chat_response_equals_completion_of_rendered_messages(chat_client, chat_engine, chat_model):
    answer = await chat_client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=9, temperature=0.0, extra_body={"return_token_ids": True}
    )
    prompt = rendered(chat_model, HELLO)
    expected = await chat_engine.generate_batch(
        {"prompt_token_ids": [prompt], "sampling_params": {"max_tokens": 9, "temperature": 0.0}}
    )
    [choice] = answer.choices
    assert choice.message.content == expected["responses"][0]
    assert choice.token_ids == expected["response_ids"][0]
    assert choice.weight_versions == [0] * 9
    assert answer.prompt_token_ids == prompt
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage.prompt_tokens == len(prompt)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (9, len(prompt) + 9)
    assert (answer.model, answer.object, answer.system_fingerprint) == ("tiny", "chat.completion", "weights-0")
    assert answer.id.startswith("chatcmpl-")


async def test_choices_use_distinct_streams_of_seed(chat_client, chat_engine, chat_model):
    answer = await chat_client.chat.completions.create(
        model="tiny", messages=HELLO, n=3, seed=11, max_tokens=12, extra_body={"return_token_ids": True}
    )
    prompt = rendered(chat_model, HELLO)
    expected = await chat_engine.generate_batch(
        {"prompt_token_ids": [prompt] * 3, "sampling_params": {"max_tokens": 12, "seed": 11}}
    )
    assert [choice.token_ids for choice in answer.choices] == expected["response_ids"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == len(prompt)  # once, not three times
    assert answer.usage.completion_tokens == sum(map(len, expected["response_ids"]))


async def test_chat_log_probs_equal_engine(chat_client, chat_engine, chat_model):
    answer = await chat_client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, seed=3, max_tokens=6, temperature=0.7
    )
    expected = await chat_engine.generate_batch(
        {
            "prompt_token_ids": [rendered(chat_model, HELLO)],
            "sampling_params": {"max_tokens": 6, "seed": 3, "temperature": 0.7, "logprobs": 0},
        }
    )
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(expected["response_logprobs"][0])
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)


@pytest.mark.parametrize(
    "prompt, num_prompts",
    [("ab", 1), (["ab", "c"], 2), ([36, 37], 1), ([[36, 37], [38]], 2)],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_completions_accept_text_and_token_id_prompts(chat_client, chat_engine, prompt, num_prompts):
    answer = await chat_client.completions.create(
        model="tiny", prompt=prompt, n=2, max_tokens=4, seed=1, extra_body={"return_token_ids": True}
    )
    assert len(answer.choices) == 2 * num_prompts
    ids = [[36 + 33, 37 + 33], [38 + 33]] if isinstance(prompt, str) or isinstance(prompt[0], str) else [[36, 37], [38]]
    ids = ids[:num_prompts]
    assert [choice.prompt_token_ids for choice in answer.choices] == [each for each in ids for _ in range(2)]
    expected = await chat_engine.generate_batch(
        {
            "prompt_token_ids": [each for each in ids for _ in range(2)],
            "sampling_params": {"max_tokens": 4, "seed": 1},
        }
    )
    assert [choice.token_ids for choice in answer.choices] == expected["response_ids"]
    assert answer.usage.prompt_tokens == sum(map(len, ids))


async def test_echo_scores_prompt(chat_client, chat_engine):
    answer = await chat_client.completions.create(model="tiny", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    [choice] = answer.choices
    expected = await chat_engine.generate_batch(
        {"prompt_token_ids": [[69, 70, 71]], "sampling_params": {"max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0}}
    )
    assert choice.text == "abc"
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected["prompt_logprobs"][0])
    assert (answer.usage.completion_tokens, choice.finish_reason) == (0, "length")


async def test_stop_text_ends_response_and_is_excluded(chat_client):
    settings = dict(model="tiny", prompt="abc", seed=8, max_tokens=40)
    body = {"ignore_eos": True, "return_token_ids": True}
    [plain] = (await chat_client.completions.create(**settings, extra_body=body)).choices
    stop = plain.text[10:13]
    assert plain.text.index(stop) == 10
    [choice] = (await chat_client.completions.create(**settings, stop=stop, extra_body=body)).choices
    assert (choice.text, choice.finish_reason) == (plain.text[:10], "stop")
    assert choice.token_ids == plain.token_ids[: len(choice.token_ids)]  # the tokens hold it
    body["include_stop_str_in_output"] = True
    [kept] = (await chat_client.completions.create(**settings, stop=[stop, "?!?"], extra_body=body)).choices
    assert (kept.text, kept.token_ids) == (plain.text[:13], choice.token_ids)


@pytest.mark.slow
async def test_response_without_max_tokens_may_fill_context(chat_client):
    answer = await chat_client.completions.create(
        model="tiny", prompt="abc", temperature=0, extra_body={"ignore_eos": True}
    )
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (256, "length")
    longer = await chat_client.completions.create(
        model="tiny", prompt="abc", temperature=0, max_tokens=1000, extra_body={"ignore_eos": True}
    )
    assert longer.choices[0].text == answer.choices[0].text


async def test_minus_infinity_log_prob_is_finite_in_json(chat_client):
    """A forbidden token cannot be drawn, so no such log-prob comes from an engine; it comes from scored prompts at low
    temperatures."""
    answer = await chat_client.completions.create(
        model="tiny", prompt="abc", echo=True, logprobs=0, max_tokens=0, temperature=2e-5
    )
    assert all(math.isfinite(value) and value >= -9999 for value in answer.choices[0].logprobs.token_logprobs[1:])


async def test_tool_call_is_returned_to_client(tool_engine, tool_model):
    async with serving(tool_engine, tool_model) as server, client_of(server) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=[QUESTION], tools=[ADD], temperature=0, max_tokens=80
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}')
        cut = await client.chat.completions.create(
            model="tiny", messages=[QUESTION], tools=[ADD], temperature=0, max_tokens=20
        )
        assert cut.choices[0].message.tool_calls is None  # half a call is text
        assert cut.choices[0].message.content == load_tokenizer(tool_model, False).decode(
            load_tokenizer(tool_model, False)(CALL)["input_ids"][:20]
        )
        assert cut.choices[0].finish_reason == "length"


async def test_synchronous_client_lists_models_and_tokenizes(chat_engine, chat_model):
    async with serving(chat_engine, chat_model) as server:
        models = await in_thread(server, lambda client: list(client.models.list()))
        assert [(model.id, model.max_model_len) for model in models] == [("tiny", 256)]
        assert (await in_thread(server, lambda client: client.models.retrieve("tiny"))).id == "tiny"
        root = server.url.removesuffix("/v1")
        tokens = await in_thread(
            server, lambda client: client.post(f"{root}/tokenize", cast_to=object, body={"messages": HELLO})
        )
        assert tokens["tokens"] == rendered(chat_model, HELLO)
        text = await in_thread(
            server, lambda client: client.post(f"{root}/detokenize", cast_to=object, body={"tokens": tokens["tokens"]})
        )
        assert text == {"prompt": "<start>user:Hello<end><start>assistant:"}


async def test_continue_final_message_extends_response(chat_client, chat_model, chat_engine):
    messages = [*HELLO, {"role": "assistant", "content": "Hi, I"}]
    answer = await chat_client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=5,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )
    assert load_tokenizer(chat_model, False).decode(answer.prompt_token_ids).endswith("<start>assistant:Hi, I")


async def test_sampling_settings_are_defaults_for_requests(chat_engine, chat_model):
    async with (
        serving(chat_engine, chat_model, sampling_defaults={"temperature": 0.0}) as server,
        client_of(server) as client,
    ):
        texts = {
            (await client.completions.create(model="tiny", prompt="abc", max_tokens=20)).choices[0].text
            for _ in range(3)
        }
    assert len(texts) == 1
