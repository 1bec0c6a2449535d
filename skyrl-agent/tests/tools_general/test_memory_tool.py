"""Reading a text section by section."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_agent.errors import ConfigError, TaskRowError
from skyrl_agent.tools import make_tool
from skyrl_agent.tools.memory import ALL_READ, split_sections

from .agent_web_server import context_of

CONTEXT = "Document 1:\nThe sky is blue.\nDocument 2:\nGrass is green.\nDocument 3:\nSnow is white."


async def test_each_call_restarts_with_memory_and_next_section():
    tool = make_tool("next_with_summary", {"section_chars": 60})
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "<problem>Which colour?</problem> Go."}]
    context = context_of(row={"context": CONTEXT}, messages=messages)
    await tool.open(context)
    first = await tool.call(context, {"summary": ""})
    assert first.new_context[0] == {"role": "system", "content": "S"}
    text = first.new_context[1]["content"]
    assert "<problem>\nWhich colour?\n</problem>" in text and "(nothing yet)" in text
    assert (
        "sky is blue" in text and "Grass is green" in text and "Snow" not in text and "Section 1 of 2: 1 more" in text
    )
    context.messages = first.new_context
    second = await tool.call(context, {"summary": "blue, green"})
    text = second.new_context[1]["content"]
    assert (
        "Which colour?" in text
        and "<memory>\nblue, green\n</memory>" in text
        and "Snow" in text
        and "blue." not in text
    )
    last = await tool.call(context, {"summary": "all three"})
    assert (last.text, last.new_context) == (ALL_READ, None)


@pytest.mark.parametrize("row", [{}, {"context": 5}, {"context": []}, {"context": " "}, {"context": [1]}])
async def test_row_without_text_is_rejected_before_first_turn(row):
    with pytest.raises(TaskRowError, match="context"):
        await make_tool("next_with_summary").open(context_of(row=row))


def test_section_chars_must_be_positive():
    with pytest.raises(ConfigError, match="section_chars"):
        make_tool("next_with_summary", {"section_chars": 0})


def test_documents_stay_whole_when_they_fit():
    assert split_sections(["aaa", "bbb", "cccc"], 8) == ["aaa\n\nbbb", "cccc"]


def test_long_document_is_split_at_sentence_end():
    assert split_sections("One two three. Four five six.", 20) == ["One two three.", "Four five six."]


@given(st.lists(st.text(alphabet="ab .\n", min_size=0, max_size=60), min_size=1, max_size=6), st.integers(1, 40))
def test_sections_preserve_text_within_limit(documents, most):
    words = "".join("".join(documents).split())
    if not words:
        return
    sections = split_sections(documents, most)
    assert max(map(len, sections)) <= most
    assert "".join("".join(sections).split()) == words
