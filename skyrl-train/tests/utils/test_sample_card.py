import io

import pytest
from loguru import logger as global_logger

from skyrl_train.utils.logging_utils import log_example
from skyrl_train.utils.sample_card import readable, sample_card


def test_a_card_shows_prompt_response_and_what_came_of_it():
    card = sample_card("12+34=", "46\n<eos>", 1.0, stop_reason="stop", colour=False)
    assert card == "── prompt\n│ 12+34=\n── response · reward 1 · stop\n│ 46\n│ <eos>"


@pytest.mark.parametrize(
    "reward, colour", [(1.0, "\x1b[32m"), (0.0, "\x1b[33m"), (-1.0, "\x1b[33m"), (None, "\x1b[33m")]
)
def test_a_rewarded_response_is_green_and_others_yellow(reward: float | None, colour: str):
    assert f"{colour}│ 46\x1b[0m" in sample_card("12+34=", "46", reward)


def test_a_conversation_is_shown_by_role():
    card = sample_card(
        [{"role": "user", "content": "12+34?"}, {"role": "assistant", "content": None}], "46", colour=False
    )
    assert card.startswith("── prompt\n│ user: 12+34?\n│ assistant: None\n")


def test_a_failure_is_told():
    assert sample_card("p", "", 0.0, failure="tool: timed out", colour=False).endswith("── failed\n│ tool: timed out")


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
def test_text_cannot_steer_the_terminal(text: str, shown: str):
    assert readable(text) == shown


def test_a_long_text_loses_its_middle():
    assert readable("a" * 600 + "b" * 600, max_chars=9) == "aaaaaa … 1,191 characters … bbb"


@pytest.fixture
def log():
    text = io.StringIO()
    handler = global_logger.add(text, format="{message}", colorize=False)
    yield text
    global_logger.remove(handler)


def test_an_example_is_logged_as_it_is(log: io.StringIO):
    log_example(global_logger, "<b>{x}</b>", "<red>4\n6</red>\\", [0.0, 1.0], stop_reason="stop")
    assert log.getvalue() == "sample\n── prompt\n│ <b>{x}</b>\n── response · reward 1 · stop\n│ <red>4\n│ 6</red>\\\n"


def test_an_example_that_cannot_be_shown_does_not_raise(log: io.StringIO):
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    log_example(global_logger, Unprintable(), "46", 1.0)
    assert "could not show a sample: RuntimeError('no text')" in log.getvalue()
