"""Rows of an agent whose model thinks, with a template that drops thoughts."""

import logging

import pytest

from skyrl_agent.agents import loop
from skyrl_agent.chat.transitions import transitions_to_training_data
from skyrl_agent.errors import ConfigError
from skyrl_agent.testing import byte_tokenizer

from .agent_cases import agent_of, call, finish, ran

DROPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTFUL = [*(f"<think>Once more: {n}. </think>{call('add', a=n, b=n)}" for n in range(5)), finish()]


def thoughtful_agent(**settings):
    tokenizer = byte_tokenizer(DROPS_THOUGHTS)
    return agent_of(THOUGHTFUL, max_iterations=9, tokenizer=tokenizer, **settings)


async def test_append_only_merges_turns_of_thinking_model_into_one_row(caplog, monkeypatch):
    monkeypatch.setattr(loop, "_warned_of_rows", set())
    with caplog.at_level(logging.WARNING):
        agent = await ran(thoughtful_agent(), "FINISH_TOOL")
    rows = transitions_to_training_data(agent.get_transitions())
    whole = sum(len(row.input_tokens) + len(row.response_tokens) for row in rows)
    assert len(rows) == 6
    [warning] = [record.getMessage() for record in caplog.records if "training rows" in record.getMessage()]
    assert "the 6 turns of a trajectory make 6 training rows" in warning and "generator.append_only: true" in warning

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        agent = await ran(thoughtful_agent(append_only=True), "FINISH_TOOL")
    [row] = transitions_to_training_data(agent.get_transitions())
    assert not caplog.records
    text = byte_tokenizer().decode([*row.input_tokens, *row.response_tokens])
    assert all(f"Once more: {n}. </think>" in text and f"The sum is {2 * n}." in text for n in range(5))
    factor = whole / (len(row.input_tokens) + len(row.response_tokens))
    assert float(warning.partition("about ")[2].split()[0]) == pytest.approx(factor, rel=0.15)


def test_append_only_conflicts_with_remove_think_tokens():
    with pytest.raises(ConfigError, match=r"append_only=true.*remove_think_tokens=true"):
        thoughtful_agent(append_only=True, remove_think_tokens=True)
