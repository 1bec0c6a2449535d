"""An unmodified agent, its traffic recorded, and the training sample that comes of it."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_train.endpoint.recorder import RecordedTurn, RequestRecorder
from skyrl_train.inference_engines.native.loading import load_tokenizer

from .conftest import ANSWER, CALL, FAREWELL, client_of, run_agent, serving
from .protocol_kit import recorded_output


@pytest.mark.slow
async def test_agent_conversation_becomes_single_sample_of_sampled_tokens(tool_engine, tool_model):
    recorder = RequestRecorder()
    async with serving(tool_engine, tool_model, recorder=recorder) as server, client_of(server) as client:
        messages = await run_agent(client, "episode-7")
        metrics = server.frontend.take_metrics()
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert messages[-1]["content"] == FAREWELL
    assert metrics == {"endpoint/requests": 3, "endpoint/exact_turns": 2, "endpoint/rendered_turns": 0}

    turns = recorder.take("episode-7")
    assert [len(turn.messages or []) for turn in turns] == [1, 3, 5]
    output = recorded_output(turns, temperature=0.0)

    [prompt], [response] = output["prompt_token_ids"], output["response_ids"]
    [mask], [log_probs] = output["loss_masks"], output["rollout_logprobs"]
    tokenizer = load_tokenizer(tool_model, False)
    written = tokenizer.decode([token for token, own in zip(response, mask, strict=True) if own])
    assert written == f"{CALL}<end>{ANSWER}<end>{FAREWELL}<end>"  # its own JSON, not the template's
    between = tokenizer.decode([token for token, own in zip(response, mask, strict=True) if not own])
    assert between == "<start>tool:5<end><start>assistant:<start>user:And then?<end><start>assistant:"
    assert output["weight_versions"] == [[0 if own else -1 for own in mask]]
    assert output["rewards"] == [[0.0] * (len(response) - 1) + [1.0]]
    assert recorder.list_sessions() == []

    model = AutoModelForCausalLM.from_pretrained(tool_model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    recomputed = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
    np.testing.assert_allclose(np.array(log_probs), recomputed * np.array(mask), atol=2e-5)


async def test_rewritten_history_starts_new_row(tool_engine, tool_model):
    recorder = RequestRecorder()
    session = {"X-Session-ID": "s"}
    async with serving(tool_engine, tool_model, recorder=recorder) as server, client_of(server) as client:
        first = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "2+3?"}], max_tokens=20, seed=1, extra_headers=session
        )
        assert first.choices[0].message.content != "Four"
        history = [
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": "Four"},
            {"role": "user", "content": "No"},
        ]
        await client.chat.completions.create(
            model="tiny", messages=history, max_tokens=5, seed=1, extra_headers=session
        )
        assert server.frontend.take_metrics()["endpoint/rendered_turns"] == 1
    output = recorded_output(recorder.take("s"))
    assert len(output["response_ids"]) == 2
    assert output["is_last_step"] == [False, True]
    assert [sum(reward) for reward in output["rewards"]] == [0.0, 1.0]


async def test_turns_at_other_temperature_are_not_trained(chat_engine, chat_model):
    recorder = RequestRecorder()
    async with serving(chat_engine, chat_model, recorder=recorder) as server, client_of(server) as client:
        for temperature in (1.0, 0.5):
            await client.completions.create(
                model="tiny",
                prompt=f"t{temperature}",
                max_tokens=3,
                temperature=temperature,
                extra_body={"session_id": 5},
            )
    output = recorded_output(recorder.take(5), temperature=1.0)
    assert output["loss_masks"] == [[1, 1, 1], [0, 0, 0]]
    metrics = output["rollout_metrics"]
    assert (metrics["tokens/not_trained/other_temperature"], metrics["tokens/trained_share"]) == (3, 0.5)


def test_single_turn_session_rewards_last_token():
    turn = RecordedTurn(
        prompt_ids=[1],
        response_ids=[2, 3],
        log_probs=[-0.1, -0.2],
        weight_versions=[0, 0],
        stop_reason="stop",
        temperature=1.0,
        messages=None,
        answer=None,
        request="",
        started=0.0,
        finished=1.0,
    )
    output = recorded_output([turn])
    assert output["rewards"] == [[0.0, 1.0]]


def test_agent_without_requests_fails_and_is_not_trained():
    output = recorded_output([])
    assert output["loss_masks"] == [[0]]
    assert output["failures"][0].kind == "infrastructure"
    assert output["rewards"] == [[0.0]]
