"""Call formats of model families: calls as their templates write them, and malformed ones."""

import pytest

from skyrl_gym.chat.tool_calls import Invalid, ToolCall, parse_tool_calls, split_tool_calls

SEARCH = ToolCall("search", {"query": "big cats", "k": 2})
SEARCH_TEXT = ToolCall("search", {"query": "big cats", "k": "2"})
"""Call of formats in which values are text."""
LOOK = ToolCall("look")

WRITTEN = {
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>"
        '{"query": "big cats", "k": 2}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [SEARCH, LOOK],
    ),
    "deepseek R1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        '{"query": "big cats", "k": 2}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}"
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [SEARCH, LOOK],
    ),
    "glm": (
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>big cats</arg_value>\n<arg_key>k</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>look\n</tool_call>",
        [SEARCH_TEXT, LOOK],
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
        '{"query": "big cats", "k": 2}<|tool_call_end|><|tool_call_begin|>functions.look:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [ToolCall("search", SEARCH.arguments, "functions.search:0"), ToolCall("look", {}, "functions.look:1")],
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "search", "arguments": {"query": "big cats", "k": 2}, "id": "abc"}, {"name": "look"}]',
        [ToolCall("search", SEARCH.arguments, "abc"), LOOK],
    ),
    "mistral 3": (
        '[TOOL_CALLS]search[CALL_ID]VvvODy9mT[ARGS]{"query": "big cats", "k": 2}[TOOL_CALLS]look[ARGS]{}</s>',
        [ToolCall("search", SEARCH.arguments, "VvvODy9mT"), LOOK],
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">big cats</parameter>\n'
        '<parameter name="k">2</parameter>\n</invoke>\n<invoke name="look">\n</invoke>\n</minimax:tool_call>',
        [SEARCH_TEXT, LOOK],
    ),
    "gemma": (
        '<|tool_call>call:search{query:<|"|>big cats<|"|>,k:2}<tool_call|><|tool_call>call:look{}<tool_call|>',
        [SEARCH, LOOK],
    ),
    "gemma function": (
        "<start_function_call>call:search{query:<escape>big cats<escape>,k:2}<end_function_call>"
        "<start_function_call>call:look{}<end_function_call>",
        [SEARCH, LOOK],
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_parsed_and_removed_from_text(name):
    syntax, (written, calls) = name.split()[0], WRITTEN[name]
    assert parse_tool_calls(f"<think>Not {written}</think>I search.{written}", syntax) == calls
    assert split_tool_calls(f"I search.\n{written}", syntax) == ("I search.", calls)
    assert parse_tool_calls("I know it.", syntax) == []


@pytest.mark.parametrize(
    "syntax, text, complaint",
    [
        ("deepseek", "<｜tool▁call▁begin｜>search{}<｜tool▁call▁end｜>", "stands <｜tool▁sep｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>search<｜tool▁sep｜>{oops}<｜tool▁call▁end｜>", "not valid JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search {}<｜tool▁call▁end｜>", "```json"),
        ("glm", "<tool_call>search<arg_key>q</arg_key><arg_value>a</tool_call>", "'q' is not closed by </arg_value>"),
        ("glm", "<tool_call>search<arg_key>q</arg_key>a</tool_call>", "only arguments may stand in a call"),
        ("glm", '<tool_call>{"name": "search"} now</tool_call>', "begins with the name"),
        ("kimi", "<|tool_call_begin|>functions.search:0 {}<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        ("mistral", "[TOOL_CALLS]search {}", "[TOOL_CALLS]NAME[ARGS]{...}"),
        ("mistral", "[TOOL_CALLS][]", "empty"),
        ("mistral", '[TOOL_CALLS]look[ARGS]{} and more', "nothing may follow"),
        ("minimax", "<invoke look></invoke>", '<invoke name="NAME">'),
        ("gemma", "<|tool_call>look{}<tool_call|>", "call:NAME{key:value}"),
        ("gemma", '<|tool_call>call:look{at:<|"|>open}<tool_call|>', "text stands between two"),
    ],
)  # fmt: skip
def test_malformed_call_error_names_correction(syntax, text, complaint):
    (call,) = parse_tool_calls(text, syntax)
    assert isinstance(call, Invalid) and complaint in call.reason


@pytest.mark.parametrize(
    "syntax, text, turn_end",
    [
        ("hermes", '<tool_call>{"name": "look"}', "<|im_end|>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}", "<｜end▁of▁sentence｜>"),
        ("glm", "<tool_call>look\n", "<|observation|>"),
        ("kimi", "<|tool_call_begin|>look<|tool_call_argument_begin|>{}", "<|im_end|>"),
        ("mistral", "[TOOL_CALLS]look[ARGS]{}", "</s>"),
        ("minimax", '<invoke name="look">\n', "[e~["),
        ("gemma", "<|tool_call>call:look{}", "<turn|>"),
        ("gemma", "<start_function_call>call:look{}", "<end_of_turn>"),
    ],
)
def test_end_of_text_closes_last_call(syntax, text, turn_end):
    for answer in (text, text + turn_end, f"{text}{turn_end}\n"):
        [call] = parse_tool_calls(answer, syntax)
        assert isinstance(call, ToolCall) and (call.name, call.arguments) == ("look", {}), answer
    [call] = parse_tool_calls(f"{text} and more{turn_end}", syntax)
    assert isinstance(call, Invalid), "only the mark may stand in for the closing one"


@pytest.mark.parametrize(
    "syntax, text",
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        (
            "hermes",
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        ),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1, "a": 2}}'),
        ("gpt_oss", '<|channel|>commentary to=functions.f json<|message|>{"a": 1, "a": 2}<|call|>'),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>"),
        ("minimax", '<invoke name="f"><parameter name="a">1</parameter><parameter name="a">2</parameter></invoke>'),
        ("gemma", "<|tool_call>call:f{a:1,a:2}<tool_call|>"),
        (
            "kimi",
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": {"b": 1, "b": 2}}<|tool_call_end|>',
        ),
    ],
)
def test_duplicate_argument_is_rejected(syntax, text):
    (call,) = parse_tool_calls(text, syntax)
    assert isinstance(call, Invalid) and "is given twice" in call.reason


def test_values_of_gemma_s_calls():
    text = '<|tool_call>call:f{a:[1,<|"|>x, }<|"|>],b:{c:<|"|>y<|"|>,d:true},e:1.5,g:null,h:word}<tool_call|>'
    expected = {"a": [1, "x, }"], "b": {"c": "y", "d": True}, "e": 1.5, "g": None, "h": "word"}
    assert parse_tool_calls(text, "gemma") == [ToolCall("f", expected)]
