import itertools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_agent.chat import conversation as conversation_module
from skyrl_agent.chat.chat_template import get_configured_chat_template
from skyrl_agent.chat.conversation import Conversation
from skyrl_agent.chat.encoding import MessageEncoder
from skyrl_agent.chat.transitions import transitions_to_training_data
from skyrl_agent.errors import BackendError, ConfigError
from skyrl_agent.integrations.base import decode_response
from skyrl_agent.testing import byte_tokenizer
from skyrl_agent.testing.tokenizer import CHATML
from skyrl_gym.chat.template import bundled_template
from skyrl_gym.chat.tool_formats import TOOL_FORMATS

from .conversation_play import told

SYSTEM, QUESTION = {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}
AGAIN = {"role": "user", "content": "R"}


@pytest.fixture
def encoder():
    return MessageEncoder(byte_tokenizer())


def answer(conversation, text, end="<|im_end|>", **kinds):
    encoder = conversation.encoder
    conversation.input_ids()
    return conversation.add_answer(text, told(encoder.encode(text + end), **kinds))


def read(conversation):
    return conversation.encoder.decode(conversation.input_ids())


def test_generated_tokens_are_reused_unchanged_as_input(encoder):
    conversation = Conversation(encoder, [SYSTEM, QUESTION])
    assert conversation.input_ids() == encoder.ids([SYSTEM, QUESTION])
    odd = [*encoder.encode("A"), 200, 255, *encoder.encode("B<|im_end|>")]  # bytes that are no text
    assert encoder.encode(encoder.decode(odd)) != odd
    conversation.add_answer(encoder.decode(odd[:-1]), told(odd))
    before = conversation.transitions[0].ob.input_ids
    conversation.add(AGAIN)
    after = "\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n"
    assert conversation.input_ids() == [*before, *odd, *encoder.encode(after)]
    assert conversation.breaks == []


def test_messages_since_last_response_are_encoded(encoder):
    conversation = Conversation(encoder, [QUESTION])
    answer(conversation, "A")
    conversation.add({"role": "tool", "content": "error"}, AGAIN)
    conversation.input_ids()
    conversation.add({"role": "user", "content": "one more"})
    assert conversation.input_ids() == encoder.ids(conversation.messages)
    answer(conversation, "B")
    assert conversation.input_ids() == encoder.ids(conversation.messages)  # nothing was added
    assert len(transitions_to_training_data(conversation.transitions)) == 1


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_truncated_response_is_closed_outside_loss_mask(encoder, end):
    conversation = Conversation(encoder, [QUESTION])
    answer(conversation, "A", end)
    conversation.add(AGAIN)
    assert conversation.input_ids() == encoder.ids(conversation.messages)
    answer(conversation, "B")
    (row,) = transitions_to_training_data(conversation.transitions)
    written = [t for t, m in zip(row.response_tokens, row.response_mask, strict=True) if m]
    assert encoder.decode(written) == f"A{end}B<|im_end|>"


@pytest.mark.parametrize("text, ids", [("A", None), ("", []), ("A<|im_end|>", "A<|im_end|>")])
def test_response_without_token_ids_is_encoded_from_text(encoder, text, ids):
    conversation = Conversation(encoder, [QUESTION])
    written = conversation.add_answer(text, told(encoder.encode(ids) if ids else ids)).ac
    assert written.token_ids == encoder.encode(text) and (written.logprobs is None) == (ids is None)
    assert conversation.messages[-1] == {"role": "assistant", "content": text.removesuffix("<|im_end|>")}
    conversation.add(AGAIN)
    assert conversation.input_ids() == encoder.ids(conversation.messages)


def test_tokens_after_prompt_are_counted(encoder):
    conversation = Conversation(encoder, [SYSTEM, QUESTION])
    assert conversation.num_response_tokens == 0
    prompt = len(conversation.input_ids())
    answer(conversation, "ABC")
    assert conversation.num_response_tokens == 4
    conversation.add(AGAIN)
    assert conversation.num_response_tokens == len(conversation.input_ids()) - prompt > 4


def test_restart_clears_messages_and_keeps_turns(encoder):
    conversation = Conversation(encoder, [QUESTION])
    answer(conversation, "A")
    conversation.restart([SYSTEM, AGAIN])
    assert conversation.input_ids() == encoder.ids([SYSTEM, AGAIN]) and conversation.num_response_tokens == 0
    answer(conversation, "B")
    assert [row.input_tokens for row in transitions_to_training_data(conversation.transitions)] == [
        encoder.ids([QUESTION]),
        encoder.ids([SYSTEM, AGAIN]),
    ]


def test_log_probs_of_wrong_length_are_rejected(encoder):
    conversation = Conversation(encoder, [QUESTION])
    with pytest.raises(BackendError, match="1 log-probs for 2"):
        conversation.add_answer("AB", {"output_tokens": [1, 2], "finish_reason": "stop", "logprobs": [-1.0]})
    assert conversation.transitions == [] and conversation.messages == [QUESTION]


# What a template writes otherwise than the model did

TRIMMING = CHATML.replace("{% generation %}{{ message.content }}", "{% generation %}{{ message.content | trim }}")
FORGETFUL = CHATML.replace(
    "{% generation %}{{ message.content }}",
    "{% generation %}{{ message.content if loop.last else message.content.split('</think>')[-1] }}",
)
FORGETS_AT_QUESTIONS = FORGETFUL.replace(
    "if loop.last", "if messages[loop.index0:] | selectattr('role', 'eq', 'user') | list == []"
)


def test_trimmed_whitespace_does_not_start_new_row():
    encoder = MessageEncoder(byte_tokenizer(TRIMMING))
    conversation = Conversation(encoder, [QUESTION])
    answer(conversation, " A \n")
    conversation.add(AGAIN)
    assert (
        " A \n<|im_end|>\n<|im_start|>user\nR" in read(conversation) and conversation.transitions[0].ac.text == " A \n"
    )
    answer(conversation, " cut \n", "")
    conversation.add(AGAIN)
    assert read(conversation).endswith(" cut \n<|im_end|>\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n")
    answer(conversation, "C")
    assert conversation.breaks == [] and len(transitions_to_training_data(conversation.transitions)) == 1


def test_dropped_thought_is_reported_as_break_once(caplog):
    conversation_module._warned.clear()
    conversation = Conversation(MessageEncoder(byte_tokenizer(FORGETFUL)), [SYSTEM, QUESTION])
    with caplog.at_level(logging.WARNING):
        for text in ("A", "<think>hm</think>B", "<think>so</think>C", "D"):
            assert conversation.input_ids() == conversation.encoder.ids(conversation.messages)
            answer(conversation, text)
            conversation.add(AGAIN)
    assert [(found.message_index, found.role) for found in conversation.breaks] == [(4, "assistant"), (6, "assistant")]
    assert (
        "the model generated '<think>hm</think>B' and the template renders 'B<|im_end|>" in conversation.breaks[0].why
    )
    assert len(transitions_to_training_data(conversation.transitions)) == 3
    (warning,) = caplog.records
    assert "message 4 (assistant)" in warning.message and "generator.append_only" in warning.message


@pytest.mark.parametrize(
    "text, end, why",
    [
        ("A", "<|endoftext|>", "the model ended it with <|endoftext|>, the template with <|im_end|>"),
        ("hm A", "<|im_end|>", "the model generated 'hm A"),  # as where an agent itself drops reasoning
    ],
)
def test_response_that_differs_from_rendered_message_is_break(encoder, text, end, why):
    conversation = Conversation(encoder, [QUESTION])
    conversation.input_ids()
    conversation.add_answer(text, told(encoder.encode(text + end)), {"role": "assistant", "content": "A"})
    conversation.add(AGAIN)
    assert conversation.input_ids() == encoder.ids([QUESTION, {"role": "assistant", "content": "A"}, AGAIN])
    answer(conversation, "B")
    assert conversation.breaks[0].why.startswith(why)


def test_unrenderable_messages_raise_config_error():
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    conversation = Conversation(MessageEncoder(byte_tokenizer(strict)), [{"role": "tool", "content": "x"}])
    with pytest.raises(ConfigError, match=r"generator\.chat_template"):
        conversation.input_ids()


# What is verified when


class CountingEncoder(MessageEncoder):
    rendered = 0

    def text(self, messages, add_generation_prompt=False):
        self.rendered += len(messages)
        return super().text(messages, add_generation_prompt)


def test_rendering_cost_grows_linearly_with_turns():
    encoder = CountingEncoder(byte_tokenizer())
    conversation = Conversation(encoder, [SYSTEM, QUESTION])
    turns = 200
    for turn in range(turns):
        answer(conversation, f"A{turn}")
        conversation.add({"role": "user", "content": f"R{turn}"})
    assert conversation.input_ids() == encoder.ids(conversation.messages)
    assert encoder.rendered < 12 * turns  # anew in each turn: 200 a turn


def test_new_kind_of_step_is_verified_against_template():
    """A question makes this template forget the thoughts before; results of tools do not."""
    conversation = Conversation(MessageEncoder(byte_tokenizer(FORGETS_AT_QUESTIONS)), [QUESTION])
    for turn in range(20):
        answer(conversation, f"<think>{turn}</think>A")
        conversation.add({"role": "tool", "content": "T"})
    answer(conversation, "B")
    assert conversation.breaks == []
    conversation.add(AGAIN)
    assert conversation.input_ids() == conversation.encoder.ids(conversation.messages)
    answer(conversation, "C")
    assert [(found.message_index, found.role) for found in conversation.breaks] == [(1, "assistant")]


def test_count_dependent_template_is_detected_when_messages_double():
    template = CHATML.replace("{% for", "{% if messages | length > 21 %}long{% endif %}{% for", 1)
    conversation = Conversation(MessageEncoder(byte_tokenizer(template)), [QUESTION])
    for _ in range(30):
        answer(conversation, "A")
        conversation.add(AGAIN)
    (found,) = conversation.breaks
    assert found.message_index == 0 and "became 'long" in found.why
    assert read(conversation).startswith("long") and conversation.input_ids() == conversation.encoder.ids(
        conversation.messages
    )


def test_thought_is_dropped_again_after_break():
    """The same step as after the first break, but now there is a thought to drop."""
    conversation = Conversation(MessageEncoder(byte_tokenizer(FORGETS_AT_QUESTIONS)), [QUESTION])
    tool = {"role": "tool", "content": "T"}
    for text, added in [("<think>a</think>", tool), ("A", AGAIN), ("A", AGAIN)] * 3 + [("A", AGAIN)]:
        answer(conversation, text)
        conversation.add(added)
        assert conversation.input_ids() == conversation.encoder.ids(conversation.messages)
    assert [found.message_index for found in conversation.breaks] == [1, 7, 13]


texts = st.text(max_size=6) | st.sampled_from(["<think>a</think>b", " x ", "<tool_response>", "</think>"])
steps = st.lists(
    st.tuples(texts, st.booleans(), st.lists(st.tuples(st.sampled_from(["user", "tool"]), texts), max_size=2))
)


@pytest.mark.slow
@given(steps, st.sampled_from([CHATML, FORGETFUL, FORGETS_AT_QUESTIONS]))
@settings(max_examples=50)
def test_conversation_ids_equal_rendered_template(script, template):
    """Real text, so the model's tokens are the rendering's: break or not, the model reads what the template renders."""
    conversation = Conversation(MessageEncoder(byte_tokenizer(template)), [QUESTION])
    for text, is_cut_short, added in script:
        assert conversation.input_ids() == conversation.encoder.ids(conversation.messages)
        answer(conversation, text, "" if is_cut_short else "<|im_end|>")
        conversation.add(*({"role": role, "content": content} for role, content in added))
    assert conversation.input_ids() == conversation.encoder.ids(conversation.messages)
    written = itertools.chain.from_iterable(turn.ac.token_ids for turn in conversation.transitions)
    rows = transitions_to_training_data(conversation.transitions)
    trained = [t for row in rows for t, m in zip(row.response_tokens, row.response_mask, strict=True) if m]
    assert trained == list(written)


# Real templates and formats


def test_harmony_responses_keep_thoughts_until_final_response(qwen):
    """Thoughts stay while calls go on, and go when the answer is final; so does the token that ends it."""
    encoder = MessageEncoder(qwen("openai-gpt-oss-120b", "<|return|>"))
    harmony = TOOL_FORMATS["gpt_oss"]
    call = '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"n":1}<|call|>'
    conversation = Conversation(encoder, [QUESTION])
    for _ in range(3):
        text = f"<|channel|>analysis<|message|>Hm.<|end|>{call}"
        (found,) = harmony.parse(text, [])
        conversation.input_ids()
        conversation.add_answer(text, told(encoder.encode(text)), harmony.answer_message(text, [found]))
        conversation.add(*harmony.result_messages([(found, "1")]))
    assert read(conversation).count(text) == 3  # in the model's own spelling, not the template's
    final = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>1<|return|>"
    conversation.add_answer(final, told(encoder.encode(final)), harmony.answer_message(final, []))
    assert conversation.breaks == []
    conversation.add(AGAIN)
    assert conversation.input_ids() == encoder.ids(conversation.messages)
    answer(conversation, "<|channel|>final<|message|>2", "<|return|>")
    assert [found.role for found in conversation.breaks] == ["assistant"]
    assert "Hm." not in encoder.decode(conversation.transitions[-1].ob.input_ids)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "look"}}]])
def test_built_in_template_keeps_thoughts_of_all_turns(qwen, thinking, tools):
    encoder = MessageEncoder(
        qwen("Qwen-Qwen3-0.6B"),
        tools=tools,
        chat_template=get_configured_chat_template(None, qwen3_acc_thinking=True),
        template_kwargs={"enable_thinking": thinking},
    )
    thought = "<think>\nhm\n</think>\n\n" if thinking else ""
    conversation = Conversation(encoder, [SYSTEM, QUESTION])
    for text in ("A", '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "C"):
        assert conversation.input_ids() == encoder.ids(conversation.messages)
        answer(conversation, thought + text)
        conversation.add({"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, AGAIN)
    assert conversation.input_ids() == encoder.ids(conversation.messages)
    assert conversation.breaks == [] and read(conversation).count("</think>") == (3 if thinking else 4)


def test_built_in_template_matches_qwen3_template(qwen):
    """The comparison covers conversations in which Qwen3's template keeps everything."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"n": "é"}}}
    conversation = [
        SYSTEM,
        QUESTION,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nI look.", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    tokenizer = qwen("Qwen-Qwen3-0.6B")
    for messages in (conversation, conversation[1:]):
        for tools in (None, [{"type": "function", "function": {"name": "look", "description": "<b>"}}]):
            own = MessageEncoder(tokenizer, tools=tools, chat_template=bundled_template("qwen3_acc_thinking"))
            assert own.text(messages, True) == MessageEncoder(tokenizer, tools=tools).text(messages, True)


def test_template_is_read_from_file(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("hi")
    assert get_configured_chat_template(str(path)) == "hi" and get_configured_chat_template(None) is None
    with pytest.raises(ConfigError, match=r"generator\.chat_template"):
        get_configured_chat_template(str(path), qwen3_acc_thinking=True)
    with pytest.raises(ConfigError, match="is not a file"):
        get_configured_chat_template(str(tmp_path / "none.jinja"))
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="UTF-8"):
        get_configured_chat_template(str(path))
    path.write_text("x" * (1 << 20) + "x")
    with pytest.raises(ConfigError, match="has 1048577 bytes"):
        get_configured_chat_template(str(path))


def test_tokenizer_without_template_or_eos_is_rejected():
    tokenizer = byte_tokenizer("{{ messages }}")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"generator\.chat_template"):
        MessageEncoder(tokenizer)


def test_tokenizer_with_prefix_space_encodes_continuation():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = {piece: index for index, piece in enumerate(["<unk>", "▁", "a", "b", "<", ">", "user"])}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    encoder = MessageEncoder(tokenizer)
    assert encoder.encode("a") != encoder.encode_continuation("a")
    conversation = Conversation(encoder, [{"role": "user", "content": "a"}])
    conversation.add_answer("b", told([*encoder.encode_continuation("b"), tokenizer.eos_token_id]))
    conversation.add({"role": "user", "content": "a"})
    assert conversation.input_ids() == encoder.ids(conversation.messages)


@pytest.mark.parametrize("is_kept_in_text", [False, True])
def test_turn_end_token_other_than_eos_is_added_once(is_kept_in_text):
    tokenizer = byte_tokenizer(CHATML.replace("<|im_end|>", "<|endoftext|>"))  # the tokenizer's eos_token: <|im_end|>
    ids = tokenizer("four<|endoftext|>")["input_ids"]
    text = decode_response(tokenizer, ids, "stop")
    assert text == "four"
    question, more = {"role": "user", "content": "2+2"}, {"role": "user", "content": "go on"}
    talk = Conversation(MessageEncoder(tokenizer), [question])
    text += "<|endoftext|>" if is_kept_in_text else ""
    talk.add_answer(text, {"output_tokens": ids, "logprobs": [-1.0] * len(ids), "finish_reason": "stop"})
    talk.add(more)
    messages = [question, {"role": "assistant", "content": "four"}, more]
    assert tokenizer.decode(talk.input_ids()) == talk.encoder.text(messages, add_generation_prompt=True)
    assert not talk.breaks
