"""An answer's turn ends once, whatever token ends it: in conversations, one growing message, filters and requests."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_train.generators.dialogue import ConversationDialogue, SingleMessageDialogue
from skyrl_train.generators.environment import StepResult
from skyrl_train.generators.step_wise_dialogue import StepWiseDialogue
from skyrl_train.generators.tokenization import ChatFormat, get_response_ids_and_loss_mask_from_messages
from skyrl_train.inference_engines.request import Completion
from skyrl_train.rollouts.filters import mask_unended
from skyrl_train.rollouts.types import TrainingSample, Trajectory, TrajectoryID

PLAIN = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}END{% endfor %}" + (
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HEADERS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + (
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QUESTION = {"role": "user", "content": "2+2"}
ANSWER = {"role": "assistant", "content": "four"}
MORE = {"role": "user", "content": "go on"}


def tokenizer(template, *specials):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", additional_special_tokens=[*specials])
    made.chat_template = template
    return made


@pytest.fixture(scope="module", params=["token", "space", "text", "eos"])
def chat(request):
    template = {"token": "<end>\n", "space": " <end>", "text": "<finis>\n", "eos": "<eos>\n"}[request.param]
    return ChatFormat(tokenizer(PLAIN.replace("END", template), "<|start|>", "<end>"))


def played(dialogue, text, end="", stop_reason="stop"):
    """The next prompt after an answer with these tokens."""
    ids = dialogue.chat.encode(text + end)
    completion = Completion(
        text=text, token_ids=ids, stop_reason=stop_reason, log_probs=[-1.0] * len(ids), weight_versions=[0] * len(ids)
    )
    dialogue.open([QUESTION])
    dialogue.add_completion(completion)
    dialogue.add_step(completion, StepResult(reward=0.0, done=False, observations=[MORE]))
    return dialogue.chat.decode(dialogue.get_input_ids(), skip_special_tokens=False)


def conversation(chat, stop_strings=()):
    return ConversationDialogue(chat, list(stop_strings), append_eos_after_stop_string=True)


def rendered(chat):
    return chat.text([QUESTION, ANSWER, MORE], add_generation_prompt=True)


def test_conversation_has_each_turn_end_once(chat):
    whole = chat.text([QUESTION, ANSWER])
    end = whole[whole.index("four") + len("four") :].rstrip()
    assert played(conversation(chat, [end]), "four", end) == rendered(chat)
    assert played(StepWiseDialogue(chat, lambda: conversation(chat, [end]), False), "four", end) == rendered(chat)


def test_conversation_closes_truncated_response(chat):
    assert played(conversation(chat), "four", stop_reason="length") == rendered(chat)


def test_conversation_closes_response_at_stop_string(chat):
    text = played(conversation(chat, ["four"]), "four")
    assert text.replace(" ", "") == rendered(chat).replace(" ", "")


@pytest.mark.parametrize("end", ["<eos>", "<end>"])
def test_growing_message_drops_turn_end(end):
    chat = ChatFormat(tokenizer(PLAIN.replace("END", "<end>\n"), "<|start|>", "<end>"))
    assert played(SingleMessageDialogue(chat), "four", end).endswith("assistant\nfourgo on")


def test_next_header_is_turn_end_when_template_has_no_end_token():
    chat = ChatFormat(tokenizer(HEADERS, "<|user|>", "<|assistant|>"))
    assert played(conversation(chat), "four", "<|user|>") == rendered(chat)
    assert played(conversation(chat), "four", "<eos>") == rendered(chat).replace("four", "four<eos>")
    assert played(conversation(chat), "four", stop_reason="length") == rendered(chat)


def test_end_token_filter_accepts_all_turn_ends(chat):
    def trains(text, stop_reason, ends):
        ids = chat.encode(text)
        sample = TrainingSample(prompt_ids=[1], response_ids=ids, loss_mask=[1] * len(ids), rewards=[0.0] * len(ids))
        whole = Trajectory(id=TrajectoryID("0", 0), samples=[sample], stop_reason=stop_reason)
        return any(mask_unended(whole, ends).samples[0].loss_mask)

    end = "<end>" if "<end>" in chat.turn_ends.tokens else "<eos>"
    assert trains(f"four{end}", "length", chat.turn_ends.ids)
    assert not trains("four", "stop", chat.turn_ends.ids)
    assert trains(f"four{end}", "stop", chat.tokenizer.eos_token_id)
    assert not trains("four", "length", chat.tokenizer.eos_token_id)


def test_text_responses_are_trained_through_turn_end():
    made = tokenizer(PLAIN.replace("END", "<end>\n"), "<|start|>", "<end>")
    ids, mask, _ = get_response_ids_and_loss_mask_from_messages([ANSWER, MORE], made)
    assert made.decode([id for id, flag in zip(ids, mask, strict=True) if flag]) == "four<end>"
