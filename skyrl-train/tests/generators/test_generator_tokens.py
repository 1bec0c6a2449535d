"""Tokens, loss mask, rewards and log-probs of a trajectory, in each of the three ways to write one down."""

import pytest

from skyrl_train.config import ChatTemplateConfig
from skyrl_train.errors import ConfigError

PROMPT = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"


def written(tokenizer, output, i=0) -> str:
    """Return the response tokens with loss mask 1."""
    ids = [t for t, m in zip(output["response_ids"][i], output["loss_masks"][i], strict=True) if m]
    return tokenizer.decode(ids)


def table(tokenizer, output, i=0) -> list[tuple[str, int, float]]:
    """(token, loss mask, reward) of each response token."""
    tokens = [tokenizer.decode([t]) for t in output["response_ids"][i]]
    return list(zip(tokens, output["loss_masks"][i], output["rewards"][i], strict=True))


async def test_single_turn_is_prompt_and_response(game, say, characters):
    played = await game(characters, [[say("ab")]], [{"steps": [{"reward": 1.0}]}]).play()
    output = played.output
    assert characters.decode(output["prompt_token_ids"][0]) == PROMPT
    assert table(characters, output) == [("a", 1, 0.0), ("b", 1, 0.0), ("<|im_end|>", 1, 1.0)]
    assert output["rollout_logprobs"] == [[-1.0, -2.0, -3.0]]
    assert output["weight_versions"] == [[7, 7, 7]]
    assert output["stop_reasons"] == ["stop"]
    assert output["failures"] == [None]


async def test_turn_reward_is_at_last_token_of_turn(game, say, characters):
    steps = [{"reward": 0.25, "says": "no"}, {"reward": 1.0}]
    played = await game(characters, [[say("a"), say("b")]], [{"steps": steps}]).play()
    output = played.output
    between = "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    given = [(t, 0, 0.0) for t in characters.tokenize(between)]
    expected = [("a", 1, 0.0), ("<|im_end|>", 1, 0.25), *given, ("b", 1, 0.0), ("<|im_end|>", 1, 1.0)]
    assert table(characters, output) == expected
    n = len(given)
    assert output["rollout_logprobs"] == [[-1.0, -2.0] + [0.0] * n + [-1.0, -2.0]]
    assert output["weight_versions"] == [[7, 7] + [-1] * n + [7, 7]]
    # token in, token out: the second request is the first, its answer, and what came between
    first, second = [request.prompt_token_ids for request in played.engine.requests]
    assert second == first + output["response_ids"][0][: 2 + n]


@pytest.mark.parametrize("template", ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"])
async def test_ids_equal_full_conversation_under_real_template(game, say, qwen, template):
    tokenizer = qwen(template)
    answers = ["Half of 48 is 24 — naïve? ✓", "So \\boxed{72}."]
    steps = [{"says": "  Are you sure?\n"}, {"reward": 1.0}]
    played = await game(tokenizer, [[say(text) for text in answers]], [{"steps": steps}]).play()
    output = played.output
    conversation = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "  Are you sure?\n"},
        {"role": "assistant", "content": answers[1]},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    if template == "Qwen-Qwen3-0.6B":  # this template puts empty thoughts into the last answer; the model wrote none
        text = text.replace("<think>\n\n</think>\n\n", "")
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    newline_after_the_last_message = 1
    assert output["prompt_token_ids"][0] + output["response_ids"][0] == whole[:-newline_after_the_last_message]
    assert written(tokenizer, output) == "<|im_end|>".join(answers) + "<|im_end|>"


async def test_template_keywords_reach_prompt(game, say, qwen):
    tokenizer = qwen("Qwen-Qwen3-0.6B")
    settings = {"chat_template_kwargs": {"enable_thinking": False}}
    played = await game(tokenizer, [[say("4")]], [{"steps": [{}]}], settings=settings).play()
    prompt = tokenizer.decode(played.output["prompt_token_ids"][0])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "append, closing",
    [(True, [("<|im_end|>", 0, 0.0)]), (False, [])],
    ids=["closed by us, not trained", "left open"],
)
async def test_response_ended_by_stop_string_is_closed(game, say, characters, append, closing):
    settings = {"append_eos_token_after_stop_str_in_multi_turn": append}
    answers = [[say("a!", eos=False), say("b!", eos=False)]]
    steps = [{"says": "x"}, {"reward": 1.0}]
    played = await game(characters, answers, [{"steps": steps}], settings=settings, sampling={"stop": ["!"]}).play()
    rows = table(characters, played.output)
    given = [(t, 0, 0.0) for t in characters.tokenize("\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")]
    # the reward stands on what the model wrote, not on the token that closes the turn
    assert rows == [("a", 1, 0.0), ("!", 1, 0.0), *closing, *given, ("b", 1, 0.0), ("!", 1, 1.0), *closing]


async def test_truncated_response_is_closed_before_next_message(game, say, characters):
    answers = [[say("ab", stop_reason="length"), say("c")]]
    played = await game(characters, answers, [{"steps": [{"says": "x"}, {}]}]).play()
    response = characters.decode(played.output["response_ids"][0])
    assert response == "ab<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    assert written(characters, played.output) == "abc<|im_end|>"


async def test_stop_strings_close_only_responses_ended_by_them(game, say, characters):
    answers = [[say("a"), say("bc", stop_reason="length")]]
    played = await game(characters, answers, [{"steps": [{"says": "x"}, {}]}], sampling={"stop": ["!"]}).play()
    response = characters.decode(played.output["response_ids"][0])
    assert response == "a<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nbc"


async def test_empty_observation_requests_another_response(game, say, characters):
    played = await game(characters, [[say("a"), say("b")]], [{"steps": [{"says": ""}, {}]}]).play()
    assert written(characters, played.output) == "a<|im_end|>b<|im_end|>"


class TestOneGrowingMessage:
    settings = {"use_conversation_multi_turn": False}  # noqa: RUF012

    async def test_observations_are_inside_growing_message(self, game, say, characters):
        steps = [{"reward": 0.5, "says": "<42>"}, {"reward": 1.0}]
        played = await game(characters, [[say("a"), say("b")]], [{"steps": steps}], settings=self.settings).play()
        given = [(t, 0, 0.0) for t in "<42>"]
        assert table(characters, played.output) == [
            ("a", 1, 0.5), *given, ("b", 1, 0.0), ("<|im_end|>", 1, 1.0),
        ]  # fmt: skip
        assert played.output["rollout_logprobs"] == [[-1.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0]]

    async def test_unclosed_message_is_closed_by_generator(self, game, say, characters):
        answers = [[say("a!", eos=False)]]
        extras = [{"steps": [{"reward": 1.0}]}]
        played = await game(characters, answers, extras, settings=self.settings, sampling={"stop": ["!"]}).play()
        assert table(characters, played.output) == [("a", 1, 0.0), ("!", 1, 1.0), ("<|im_end|>", 0, 0.0)]

    async def test_truncated_message_stays_open(self, game, say, characters):
        answers = [[say("ab", stop_reason="length")]]
        played = await game(characters, answers, [{"steps": [{"reward": 1.0}]}], settings=self.settings).play()
        assert table(characters, played.output) == [("a", 1, 0.0), ("b", 1, 1.0)]


class TestRetokenized:
    sampling = {"logprobs": None}  # noqa: RUF012

    @staticmethod
    def settings(name="qwen3_without_thinking"):
        return {"chat_template": ChatTemplateConfig(name_or_path=name)}

    async def test_earlier_thoughts_are_removed_and_rewards_kept(self, game, say, characters):
        answers = [[say("<think>hm</think>\n\na"), say("<think>ah</think>b")]]
        extras = [{"steps": [{"reward": 0.5, "says": "x"}, {"reward": 1.0}]}]
        played = await game(characters, answers, extras, settings=self.settings(), sampling=self.sampling).play()
        output = played.output
        header = "<|im_start|>assistant\n"
        assert characters.decode(output["prompt_token_ids"][0]) == "<|im_start|>user\nQ<|im_end|>\n"
        response = f"{header}a<|im_end|>\n<|im_start|>user\nx<|im_end|>\n{header}<think>ah</think>b<|im_end|>"
        assert characters.decode(output["response_ids"][0]).rstrip("\n") == response
        assert written(characters, output) == "a<|im_end|><think>ah</think>b<|im_end|>"
        assert [(t, r) for t, m, r in table(characters, output) if r] == [("<|im_end|>", 0.5), ("<|im_end|>", 1.0)]
        assert {v for v, m in zip(output["weight_versions"][0], output["loss_masks"][0], strict=True) if m} == {7}
        assert output["rollout_logprobs"] is None

    async def test_response_tokens_have_version_of_last_token(self, game, say, characters):
        answers = [[say("ab", last_version=8)]]
        played = await game(
            characters, answers, [{"steps": [{}]}], settings=self.settings(), sampling=self.sampling
        ).play()
        [versions], [mask] = played.output["weight_versions"], played.output["loss_masks"]
        assert [version for version, is_written in zip(versions, mask, strict=True) if is_written] == [8, 8, 8]

    async def test_thoughts_are_kept_with_other_template(self, game, say, characters):
        answers = [[say("<think>hm</think>a"), say("b")]]
        game_of = game(
            characters,
            answers,
            [{"steps": [{"says": "x"}, {}]}],
            settings=self.settings("qwen3_with_thinking"),
            sampling=self.sampling,
        )
        assert written(characters, (await game_of.play()).output) == "<think>hm</think>a<|im_end|>b<|im_end|>"

    async def test_added_end_token_of_truncated_response_is_masked(self, game, say, characters):
        answers = [[say("ab", stop_reason="length")]]
        extras = [{"steps": [{"reward": 1.0}]}]
        played = await game(characters, answers, extras, settings=self.settings(), sampling=self.sampling).play()
        rows = [row for row in table(characters, played.output) if row[1] or row[2]]
        assert rows == [("a", 1, 0.0), ("b", 1, 1.0)]

    async def test_template_rewriting_prompt_is_failure(self, game, say, characters, tmp_path):
        path = tmp_path / "counts.jinja"
        path.write_text(
            "{{ messages | length }}{% for m in messages %}"
            "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
        )
        settings = {"chat_template": ChatTemplateConfig(source="file", name_or_path=str(path))}
        played = await game(
            characters, [[say("a")]], [{"steps": [{}]}], settings=settings, sampling=self.sampling
        ).play()
        assert "changed the prompt" in played.output["failures"][0].message
        assert table(characters, played.output) == [("<|im_end|>", 0, 0.0)]

    async def test_log_probs_are_refused(self, game, say, characters):
        with pytest.raises(ConfigError, match=r"generator\.sampling_params\.logprobs=0"):
            await game(characters, [[say("a")]], [{"steps": [{}]}], settings=self.settings()).play()

    async def test_template_without_generation_blocks_is_refused(self, game, say, characters, tmp_path):
        path = tmp_path / "plain.jinja"
        path.write_text(characters.chat_template)
        settings = {"chat_template": ChatTemplateConfig(source="file", name_or_path=str(path))}
        with pytest.raises(ConfigError, match="generation"):
            await game(characters, [[say("a")]], [{"steps": [{}]}], settings=settings, sampling=self.sampling).play()


class TestLength:
    async def test_prompt_over_limit_is_empty_masked_trajectory(self, game, say, characters, environments):
        extras = [{"steps": [{}], "name": "long"}]
        played = await game(characters, [[say("a")]], extras, settings={"max_input_length": 10}).play()
        output = played.output
        assert table(characters, output) == [("<|im_end|>", 0, 0.0)]
        assert output["stop_reasons"] == ["length"]
        assert output["failures"] == [None]
        assert len(output["prompt_token_ids"][0]) == 10
        assert output["rollout_logprobs"] == [[0.0]]
        assert played.engine.requests == []
        assert environments.closed == ["long"]

    async def test_trajectory_ends_when_context_has_no_space_for_response(self, game, say, characters):
        limit = len(characters.tokenize(PROMPT))
        steps = [{"reward": 0.5, "says": "x"}]
        played = await game(characters, [[say("a")]], [{"steps": steps}], settings={"max_input_length": limit}).play()
        assert table(characters, played.output) == [("a", 1, 0.0), ("<|im_end|>", 1, 0.5)]
        assert played.output["stop_reasons"] == ["length"]

    async def test_response_may_fill_context(self, game, say, characters):
        prompt_tokens = len(characters.tokenize(PROMPT))
        settings = {"engine_init_kwargs": {"max_model_len": prompt_tokens + 3}}
        played = await game(characters, [[say("a")]], [{"steps": [{"says": "x"}]}], settings=settings).play()
        assert [r.sampling_params["max_tokens"] for r in played.engine.requests] == [3]
        assert played.output["stop_reasons"] == ["length"]

    async def test_reward_of_empty_response_is_at_previous_token(self, game, say, characters):
        answers = [[say("a"), say("", stop_reason="length")]]
        steps = [{"says": "x"}, {"reward": 1.0}]
        played = await game(characters, answers, [{"steps": steps}]).play()
        assert [row for row in table(characters, played.output) if row[2]] == [("\n", 0, 1.0)]
        played = await game(characters, [[say("", stop_reason="length")]], [{"steps": [{"reward": 1.0}]}]).play()
        assert table(characters, played.output) == [("<|im_end|>", 0, 1.0)]


class TestPostprocessedAction:
    async def test_response_prefix_keeps_sampled_tokens(self, game, say, characters):
        steps = [{"says": "x", "action": "ab", "reward": 0.5}, {}]
        played = await game(characters, [[say("abc"), say("d")]], [{"steps": steps}]).play()
        output = played.output
        assert written(characters, output) == "abd<|im_end|>"
        assert output["rollout_logprobs"][0][:3] == [-1.0, -2.0, 0.0]
        assert table(characters, output)[:3] == [("a", 1, 0.0), ("b", 1, 0.5), ("<|im_end|>", 0, 0.0)]

    async def test_rewritten_response_text_is_masked(self, game, say, characters):
        played = await game(characters, [[say("abc")]], [{"steps": [{"action": "XY", "reward": 1.0}]}]).play()
        assert table(characters, played.output) == [("X", 0, 0.0), ("Y", 0, 1.0)]
        assert played.output["weight_versions"] == [[-1, -1]]


async def test_rewards_of_unfinished_trajectories_can_be_zeroed(game, say, characters):
    answers = [[say("a")], [say("b", stop_reason="length")]]
    extras = [{"steps": [{"reward": 1.0}]}, {"steps": [{"reward": 1.0}]}]
    played = await game(characters, answers, extras, settings={"zero_reward_on_non_stop": True}).play()
    assert played.output["rewards"] == [[0.0, 1.0], [0.0]]


async def test_overlong_filtering_uses_stop_reason(game, say, characters):
    # ended by its environment without the end-of-sequence token: trains; cut off: does not
    answers = [[say("a", eos=False)], [say("bc", stop_reason="length")]]
    extras = [{"steps": [{}]}, {"steps": [{}]}]
    played = await game(characters, answers, extras, settings={"apply_overlong_filtering": True}).play()
    assert played.output["loss_masks"] == [[1], [0, 0]]


async def test_overlong_filtering_masks_responses_without_end_token(game, say, characters):
    # in this order: ended by itself; ended by another stop token; cut off
    answers = [[say("a")], [say("b", eos=False)], [say("c", eos=False, stop_reason="length")]]
    settings = {"apply_overlong_filtering": True, "overlong_filtering_by": "end_token"}
    played = await game(characters, answers, [{"steps": [{}]}] * 3, settings=settings).play()
    assert [sum(mask) > 0 for mask in played.output["loss_masks"]] == [True, False, False]


async def test_log_probs_are_returned_only_when_requested(game, say, characters):
    played = await game(characters, [[say("a")]], [{"steps": [{}]}], sampling={"logprobs": None}).play()
    assert played.output["rollout_logprobs"] is None
