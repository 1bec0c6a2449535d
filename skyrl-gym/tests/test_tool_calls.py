import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.chat.tool_calls import Invalid, ToolCall, before_tool_calls, parse_tool_calls, split_tool_calls
from skyrl_gym.tools import ToolGroup, tool
from skyrl_gym.tools.signature import SOLE_ARGUMENT

FORMATS = ["xml", "hermes", "llama3_json", "gpt_oss"]
SEARCH = ToolCall("search", {"query": "cats"})


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", ["", "The answer is 4.", "a < b > c; {x} | y", "<think>hm</think> 4", '{"answer": 4}'])
def test_text_without_call_has_no_calls(text, format):
    assert parse_tool_calls(text, format) == []


def test_unknown_format_is_named():
    with pytest.raises(ValueError, match="'yaml'"):
        parse_tool_calls("", "yaml")  # type: ignore[arg-type]


def check_calls(text, format, expected):
    """Calls, or a part of why the one call is malformed."""
    parsed = parse_tool_calls(text, format)
    if isinstance(expected, str):
        assert [type(call) for call in parsed] == [Invalid] and expected in parsed[0].reason
    else:
        assert parsed == expected


@pytest.mark.parametrize(
    "text, calls",
    [
        ("<tool><search>cats</search></tool>", [("search", "cats")]),
        ("so <tool>\n <python> print(1)\nx < 2 </python>\n</tool> now", [("python", "print(1)\nx < 2")]),
        ("<tool><a>1</a></tool><tool><b>2</b></tool>", [("a", "1"), ("b", "2")]),
        ("<tool><a>1</a><b>2</b></tool>", [("a", "1")]),  # the first is the call
        ("<tool><br><a><b>1</b></a></tool>", [("a", "<b>1</b>")]),  # a tag that nothing closes is no tool
        ("<tool><a></a></tool>", [("a", "")]),
        ("<tool>cats</tool>", "No valid inner tool tag"),
        ("<tool><a>cats</b></tool>", "No valid inner tool tag"),
        ("<tool><a>cats</a>", "<tool> is not closed by </tool>"),
    ],
)
def test_xml(text, calls):
    if isinstance(calls, list):
        calls = [ToolCall(name, {SOLE_ARGUMENT: argument}) for name, argument in calls]
    check_calls(text, "xml", calls)


@pytest.mark.parametrize(
    "text, calls",
    [
        ('<tool_call>\n{"name": "search", "arguments": {"query": "cats"}}\n</tool_call>', [SEARCH]),
        ('I search.\n<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call><|im_end|>', [SEARCH]),
        ('<tool_call>{"name": "search", "arguments": {"query": "cats"}}', [SEARCH]),  # the stop string took the end
        ('<tool_call>{"name": "search", "arguments": {"query": "cats"}}\n<|im_end|>\n', [SEARCH]),
        ('<tool_call>{"name": "search", "parameters": {"query": "cats"}}</tool_call>', [SEARCH]),
        ('<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"cats\\"}"}</tool_call>', [SEARCH]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now")]),
        ('<tool_call>{"name": "now", "arguments": null, "id": "c1"}</tool_call>', [ToolCall("now", {}, "c1")]),
        (
            '<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>'
            '<tool_call>{"name": "say", "arguments": {"text": "a\nb"}}</tool_call>',
            [ToolCall("say", {"text": "</tool_call>"}), ToolCall("say", {"text": "a\nb"})],
        ),
        (
            "<tool_call>\n<function=run>\n<parameter=code>\nif a < 1:\n    b\n\n</parameter>\n"
            "<parameter=n>5</parameter>\n</function>\n</tool_call>",
            [ToolCall("run", {"code": "if a < 1:\n    b\n", "n": "5"})],
        ),
        ("<tool_call><function=now></function></tool_call>", [ToolCall("now")]),
        ("I look.\n<function=now>\n</function>\n</tool_call>", [ToolCall("now")]),  # as that model does at times
        ("There is <function=f> in the file.", []),
        ('<think>perhaps <tool_call>{"name": "a"}</tool_call></think><tool_call>{"name": "b"}', [ToolCall("b")]),
        ('perhaps <tool_call>{"name": "a"}</tool_call></think>no', []),  # the prompt opened the thought
        ('<think>perhaps <tool_call>{"name": "a"}</tool_call>', []),
        ("<tool_call>search(cats)</tool_call>", "must be a JSON object, beginning with {"),
        ("<tool_call></tool_call>", 'write {"name"'),
        ("<tool_call>", "must be a JSON object"),
        ("<tool_call>{'name': 'search'}</tool_call>", "property name enclosed in double quotes at character 1"),
        ('<tool_call>{"name": "search", "arguments": {"query": "ca', "not valid JSON: Unterminated string"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'needs "name"'),
        ('<tool_call>{"name": "search", "query": "cats"}</tool_call>', "'query' does not belong beside \"name\""),
        ('<tool_call>{"name": "search", "arguments": ["cats"]}</tool_call>', '"arguments" must be an object'),
        ('<tool_call>{"name": "a", "arguments": {}, "parameters": {}}</tool_call>', "not both"),
        ('<tool_call>{"name": "a"} {"name": "b"}</tool_call>', "must be followed by </tool_call>"),
        ("<tool_call>" + '{"a":' * 100_000, "nesting too deep"),
        ('<tool_call>{"name": "a", "arguments": {"n": ' + "9" * 5000 + "}}</tool_call>", "number is too long"),
        ("<tool_call><function=a><parameter=b>c</function></tool_call>", "<parameter=b> is not closed"),
        ("<tool_call><function=a>cats</function></tool_call>", "must hold <parameter=key>"),
    ],
)
def test_hermes(text, calls):
    check_calls(text, "hermes", calls)


def test_malformed_call_does_not_hide_next_call():
    text = '<tool_call>{bad}</tool_call> <tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>'
    first, second = parse_tool_calls(text, "hermes")
    assert isinstance(first, Invalid) and second == SEARCH


@pytest.mark.parametrize(
    "text, calls",
    [
        ('{"name": "search", "parameters": {"query": "cats"}}', [SEARCH]),
        ('<|python_tag|>{"name": "search", "parameters": {"query": "cats"}}<|eom_id|>', [SEARCH]),
        ('{"name": "search", "parameters": {"query": "cats"}}; {"name": "now"};<|eot_id|>', [SEARCH, ToolCall("now")]),
        ('I look. <|python_tag|>{"name": "now", "parameters": {}}', [ToolCall("now")]),
        ('{"type": "function", "name": "search", "arguments": {"query": "cats"}}', [SEARCH]),
        ('{"name": "say", "parameters": {"text": "a; b"}}', [ToolCall("say", {"text": "a; b"})]),
        ('The call would be {"name": "now"}', []),  # spoken about
        ('{"title": "x"}', []),  # an answer in JSON
        ("{x}", []),
        ('{"name": "search", "parameters": {"query": }}', "not valid JSON"),
        ('<|python_tag|>search.call(query="cats")', "must be a JSON object"),
        ('{"name": 3}', 'needs "name"'),
    ],
)
def test_llama3_json(text, calls):
    check_calls(text, "llama3_json", calls)


def test_llama_calls_require_semicolon():
    first, second = parse_tool_calls('{"name": "a"} {"name": "b"}', "llama3_json")
    assert first == ToolCall("a") and isinstance(second, Invalid) and "separated by ;" in second.reason


@pytest.mark.parametrize(
    "text, calls",
    [
        (
            "<|channel|>analysis<|message|>I search.<|end|><|start|>assistant<|channel|>commentary to=functions.search "
            '<|constrain|>json<|message|>{"query": "cats"}<|call|>',
            [SEARCH],
        ),
        ('<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{"query": "cats"}', [SEARCH]),
        (' to=functions.search<|channel|>commentary <|constrain|>json<|message|>{"query": "cats"}<|call|>', [SEARCH]),
        ('<|channel|>commentary to=functions.search<|message|>{"query": "cats"}<|call|>', [SEARCH]),
        ('<|channel|>analysis to=functions.search code<|message|>{"query": "cats"}<|call|>', [SEARCH]),
        ("<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", [ToolCall("now")]),
        (
            "<|channel|>commentary to=functions.a<|message|>{}<|call|><|start|>assistant<|channel|>commentary "
            'to=functions.search <|constrain|>json<|message|>{"query": "cats"}<|call|>',
            [ToolCall("a"), SEARCH],
        ),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", [ToolCall("python", {"": "print(1)"})]),
        (
            '<|channel|>analysis to=browser.search<|message|>{"query": "x"}',
            [ToolCall("browser.search", {"query": "x"})],
        ),
        ("<|channel|>commentary<|message|>First I search.<|end|>", []),
        ("<|channel|>final<|message|>use to=functions.search there<|return|>", []),
        ("<|start|>functions.search to=assistant<|channel|>commentary<|message|>{}<|end|>", []),  # a result
        ("<|start|>user to=functions.search<|message|>{}<|end|>", []),
        ("<|channel|>commentary to=functions.search <|constrain|>json<|message|>{query: 1}<|call|>", "not valid JSON"),
        ('<|channel|>commentary to=functions.search<|message|>{"a": 1} extra<|call|>', "something follows"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "must be functions.NAME"),
    ],
)
def test_gpt_oss(text, calls):
    check_calls(text, "gpt_oss", calls)


PIECES = st.sampled_from(
    [
        *("<tool>", "</tool>", "<a>", "</a>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<think>"),
        *("<parameter=p>", "</parameter>", "</think>", "<|python_tag|>", "<|eom_id|>", ";", " ", "\n", "json", "\x00"),
        *("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>", "assistant", "to="),
        *("functions.f", '{"name": "f"', ', "arguments": {', "}}", "}", "{", '"', "[", "1e999", "NaN", "\ud800", "é"),
    ]
)


@given(st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join), st.sampled_from(FORMATS))
def test_no_text_raises(text, format):
    for call in parse_tool_calls(text, format):
        assert isinstance(call, ToolCall | Invalid)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=5), JSON, max_size=3), min_size=1, max_size=3))
def test_json_format_round_trip(arguments):
    calls = [ToolCall(f"f{index}", values) for index, values in enumerate(arguments)]
    written = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    # the words that end a thought do not stand in a call of a model that thinks; "<|" is escaped by none of them
    if not any("</think>" in text or "<|" in text for text in written):
        assert parse_tool_calls("\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written), "hermes") == calls
        assert parse_tool_calls("; ".join(written), "llama3_json") == calls
        harmony = [
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{json.dumps(call.arguments)}"
            for call in calls
        ]
        assert parse_tool_calls("<|call|><|start|>assistant".join(harmony), "gpt_oss") == calls


def test_calls_beyond_hundred_give_single_error():
    calls = parse_tool_calls("<tool><a>1</a></tool>" * 150, "xml")
    assert len(calls) == 101 and isinstance(calls[-1], Invalid) and "more than 100 calls" in calls[-1].reason


@pytest.mark.parametrize(
    "format, text",
    [
        ("xml", "<tool>" * 50_000),
        ("xml", "<tool>" + "<a><b>" * 50_000 + "</tool>"),
        ("xml", "<tool><a></tool>" * 20_000),
        ("hermes", "<tool_call>" * 50_000),
        ("hermes", '<tool_call>{"' * 20_000),
        ("hermes", "<tool_call>{</tool_call>" * 20_000),
        ("hermes", "<tool_call><function=a>" + "<parameter=b>" * 20_000),
        ("llama3_json", '{"name": "a"};' * 20_000),
        ("llama3_json", "{" * 200_000),
        ("gpt_oss", "<|message|>" * 50_000),
        ("gpt_oss", "to=" * 100_000 + "<|message|>"),
        ("gpt_oss", "<|start|>assistant to=functions.a<|message|>{" * 20_000),
        ("deepseek", "<｜tool▁call▁begin｜>" * 20_000),
        ("glm", "<tool_call>a" + "<arg_key>b" * 20_000),
        ("kimi", "<|tool_call_begin|>a:0<|tool_call_argument_begin|>" * 20_000),
        ("mistral", "[TOOL_CALLS][" * 20_000),
        ("mistral", "[TOOL_CALLS]a[ARGS]" * 20_000),
        ("minimax", '<invoke name="a">' + '<parameter name="b">' * 20_000),
        ("gemma", "<|tool_call>call:a{" + 'b:<|"|>' * 20_000),
        ("gemma", "<|tool_call>call:a{b:" + "[" * 50_000 + "}<tool_call|>"),
    ],
)
def test_long_nonsense_is_read_in_no_time(format, text):
    started = time.process_time()
    parse_tool_calls(text, format)
    assert time.process_time() - started < 2


class Shop(ToolGroup):
    def __init__(self):
        super().__init__("Shop")

    @tool
    def order(self, item: str, count: int = 1) -> str:
        return f"{count} {item}"


@pytest.mark.parametrize(
    "format, text, answer",
    [
        ("xml", "<tool><order>nail</order></tool>", "1 nail"),
        ("hermes", '<tool_call>{"name": "order", "arguments": {"item": "nail", "count": 3}}</tool_call>', "3 nail"),
        (
            "hermes",
            "<tool_call><function=order><parameter=item>\nnail\n</parameter><parameter=count>\n3\n</parameter>"
            "</function></tool_call>",
            "3 nail",
        ),
        ("llama3_json", '{"name": "order", "parameters": {"item": "nail", "count": "3"}}', "3 nail"),
        ("gpt_oss", '<|channel|>commentary to=functions.order json<|message|>{"item": "nail"}<|call|>', "1 nail"),
    ],
)
def test_call_in_any_format_reaches_tool(format, text, answer):
    [call] = parse_tool_calls(text, format)
    assert isinstance(call, ToolCall)
    assert Shop().call(call.name, call.arguments) == answer


# the chat templates of real models


def render(test_data, name, messages, **context):
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = time.strftime
    source = (test_data / "tokenizers" / "chat_templates" / f"{name}.jinja").read_text()
    return environment.from_string(source).render(messages=messages, tools=Shop().schemas(), **context)


def conversation(*calls):
    functions = [{"function": {"name": name, "arguments": arguments}, "type": "function"} for name, arguments in calls]
    return [
        {"role": "user", "content": "Order."},
        {"role": "assistant", "content": "", "tool_calls": functions},
    ]


@pytest.mark.parametrize("template", ["Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-QwQ-32B"])
def test_qwen_template_round_trip(test_data, template):
    wanted = [ToolCall("order", {"item": "</tool_call> näil\n", "count": 2}), ToolCall("order", {"item": "x"})]
    text = render(test_data, template, conversation(*((call.name, call.arguments) for call in wanted)))
    assert '"name": "order"' in text.partition("<|im_start|>user")[0], "the template shows the schemas"
    assert parse_tool_calls(text.rpartition("<|im_start|>assistant")[2], "hermes") == wanted


def test_qwen_coder_template_round_trip(test_data):
    messages = conversation(("order", {"item": "a <b>\n\n", "count": 2}), ("order", {"item": "x"}))
    text = render(test_data, "Qwen-Qwen3-Coder-30B-A3B-Instruct", messages)
    assert parse_tool_calls(text.rpartition("<|im_start|>assistant")[2], "hermes") == [
        ToolCall("order", {"item": "a <b>\n\n", "count": "2"}),
        ToolCall("order", {"item": "x"}),
    ]


def test_gpt_oss_template_round_trip(test_data):
    wanted = ToolCall("order", {"item": "näil", "count": 2})
    messages = conversation((wanted.name, wanted.arguments))
    messages[1]["thinking"] = "I order to=functions.nothing."
    text = render(test_data, "openai-gpt-oss-120b", messages)
    assert parse_tool_calls(text, "gpt_oss") == [wanted]


GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CODER = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
ADD, F, G = ToolCall("add", {"a": 1}), ToolCall("f"), ToolCall("g")
ARGUMENTS_AS_TEXT = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"ä\\"}"}</tool_call>'
HARMONY_THOUGHT = "<|message|>Hm.<|end|>"


@pytest.mark.parametrize(
    "format, text, content, calls",
    [
        ("hermes", "Five.", None, []),
        ("hermes", GOOD, "", [ADD]),
        ("hermes", f"Let me see.\n{GOOD}", "Let me see.", [ADD]),
        ("hermes", f"<think>{GOOD}</think>Let me see.\n{GOOD}", f"<think>{GOOD}</think>Let me see.", [ADD]),
        ("hermes", f"<think>{GOOD}", None, []),
        ("hermes", f"{GOOD}\n{GOOD}", "", [ADD, ADD]),
        ("hermes", f"{GOOD} and so on", " and so on", [ADD]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [F]),
        ("hermes", ARGUMENTS_AS_TEXT, "", [ToolCall("f", {"a": "ä"})]),
        ("hermes", f"One. {CODER}", "One.", [ToolCall("add", {"a": "1"})]),
        ("hermes", "<tool_call>{add}</tool_call>", None, []),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "argum', None, []),
        ("hermes", f"<tool_call>nonsense</tool_call>{GOOD}", "<tool_call>nonsense</tool_call>", [ADD]),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}};', "", [F, G]),
        ("llama3_json", 'I see. <|python_tag|>{"name": "f"}<|eom_id|>', "I see.", [F]),
        ("llama3_json", 'I would write {"name": "add", "parameters": {}}', None, []),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}', None, []),
        ("llama3_json", '{"answer": 5}', None, []),
        ("llama3_json", '{"name": "add", "parameters": {}} and so on', None, []),
        ("xml", "Two. <tool><a>1</a></tool> Three.", "Two.  Three.", [ToolCall("a", {"": "1"})]),
        ("gpt_oss", " to=functions.f<|message|>{}<|call|>", "", [F]),
        ("gpt_oss", f"{HARMONY_THOUGHT}<|start|>assistant to=functions.f<|message|>{{}}", HARMONY_THOUGHT, [F]),
    ],
)
def test_valid_calls_are_split_off_and_malformed_calls_stay_in_text(format, text, content, calls):
    assert split_tool_calls(text, format) == (text if content is None else content, calls)


@pytest.mark.parametrize("format", ["hermes", "llama3_json"])
@pytest.mark.parametrize(
    "text",
    [
        f"So: {GOOD}",
        f"<think>{GOOD}</think> So: {GOOD}",
        f"{GOOD} hm</think> So",
        f"So: {CODER}",
        '{"name": "add", "parameters": {"a": 1}}',
        'hm</think> {"name": "add"}',
        'So <|python_tag|>{"name": "add"}',
        "a < b, <tool",
        "plain text",
    ],
)
def test_streamed_text_is_prefix_of_final_text(format, text):
    shown = ""
    for end in range(len(text) + 1):
        visible = before_tool_calls(text[:end], format)
        assert visible.startswith(shown)
        shown = visible
    assert split_tool_calls(text, format)[0].startswith(shown)
