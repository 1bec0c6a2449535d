import io

import pytest
from loguru import logger as global_logger

from skyrl_train.utils.logging_utils import log_example
from skyrl_train.utils.sample_card import build_card_blocks, readable


@pytest.mark.parametrize("reward, colour", [(1.0, "green"), (0.0, "yellow"), (-1.0, "yellow"), (None, "yellow")])
def test_response_colour_follows_reward(reward: float | None, colour: str):
    assert build_card_blocks("12+34=", "46", reward)[1].colour == colour


def test_card_shows_messages_by_role_and_failure():
    messages = [{"role": "user", "content": "12+34?"}, {"role": "assistant", "content": None}]
    prompt, response, failed = build_card_blocks(messages, "46", 0.0, stop_reason="stop", failure="tool: timed out")
    assert prompt.text == "user: 12+34?\nassistant: None"
    assert response[:2] == ("response · reward 0 · stop", "46")
    assert failed[:2] == ("failed", "tool: timed out")


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\x1b[2J\x07", r"\x1b[2J\x07"),  # clears the screen, rings the bell
        ("a\rb", r"a\rb"),  # writes over the line
        ("\u202egnp.exe", r"\u202egnp.exe"),  # turns the direction of writing
        ("\udc80", r"\udc80"),  # cannot be encoded
        ("é 日本 👩\u200d💻\n", "é 日本 👩\u200d💻\n"),
    ],
)
def test_terminal_control_sequences_are_escaped(text: str, shown: str):
    assert readable(text) == shown


def test_long_text_is_truncated_in_middle():
    assert readable("a" * 600 + "b" * 600, max_chars=9) == "aaaaaa … 1,191 characters … bbb"


@pytest.fixture
def log():
    text = io.StringIO()
    handler = global_logger.add(text, format="{message}", colorize=False)
    yield text
    global_logger.remove(handler)


def test_example_is_logged_verbatim(log: io.StringIO):
    log_example(global_logger, "<b>{x}</b>", "<red>4\n6</red>\\", [0.0, 1.0], stop_reason="stop")
    assert log.getvalue() == "sample\n── prompt\n│ <b>{x}</b>\n── response · reward 1 · stop\n│ <red>4\n│ 6</red>\\\n"


def test_unprintable_example_does_not_raise(log: io.StringIO):
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    log_example(global_logger, Unprintable(), "46", 1.0)
    assert "could not show a sample: RuntimeError('no text')" in log.getvalue()
