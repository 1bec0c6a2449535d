import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_agent.errors import ConfigError
from skyrl_agent.functional.formats import FORMATS, Invalid, ToolCall, call_format
from skyrl_agent.functional.function_calling import (
    FunctionCallConversionError,
    FunctionCallValidationError,
    convert_fncall_messages_to_non_fncall_messages,
    convert_non_fncall_messages_to_fncall_messages,
    convert_str_to_completion_format,
    convert_tool_call_to_string,
    convert_tools_to_description,
)
from skyrl_agent.functional.history import (
    MessageHistory,
    check_truncated_tool_call,
    extract_tool_info,
    format_output_preview,
    parse_tool_call,
)
from skyrl_agent.functional.tagged_calls import read_call, write_call


def tool(name, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


EDIT = tool(
    "edit",
    ["path"],
    path={"type": "string", "description": "Where."},
    text={"type": "string"},
    line={"type": "integer"},
    share={"type": "number"},
    all={"type": "boolean"},
    lines={"type": "array"},
    options={"type": "object"},
    kind={"type": "string", "enum": ["view", "create"]},
    level={"enum": [1, 2]},
    either={"type": ["string", "array"]},
    maybe={"anyOf": [{"type": "integer"}, {"type": "null"}]},
    anything={},
)
LOOK = tool("look")
TOOLS = [EDIT, LOOK]


def written(*parameters, name="edit"):
    return "\n".join([f"<function={name}>", *(f"<parameter={k}>{v}</parameter>" for k, v in parameters), "</function>"])


@pytest.mark.parametrize(
    "text, arguments",
    [
        (written(("path", "a")), {"path": "a"}),
        (f"I edit.\n{written(('path', 'a'))} and then", {"path": "a"}),
        ("<function=edit>\n<parameter=path>a</parameter>\n</function", {"path": "a"}),  # a stop string took the rest
        ("<function=edit>\n<parameter=path>a</parameter>\n", {"path": "a"}),
        ("<function=edit>\n\n  <parameter=path>\na\nb\n</parameter>\n</function>", {"path": "a\nb"}),
        (written(("path", "a"), ("text", "    return x")), {"path": "a", "text": "    return x"}),  # indentation stays
        (written(("path", "</function>")), {"path": "</function>"}),
        (written(("path", "</think>")), {"path": "</think>"}),
        (f"<think>{written(('path', 'no'))}</think>{written(('path', 'yes'))}", {"path": "yes"}),
        (f"so <function=edit> it is</think>{written(('path', 'yes'))}", {"path": "yes"}),
    ],
)
def test_a_call_is_read(text, arguments):
    found = read_call(text, TOOLS)
    assert found is not None and found.call == ToolCall("edit", arguments) and found.more == 0
    assert text[found.start :].startswith("<function=edit>\n")


@pytest.mark.parametrize(
    "text", ["", "No call.", "<function>", "I could use <function=edit> here.", "<think>" + written(("path", "a"))]
)
def test_there_is_no_call(text):
    assert read_call(text, TOOLS) is None


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("line", " 5 ", 5),
        ("line", "5.0", 5),
        ("share", "0.5", 0.5),
        ("share", "2", 2),
        ("all", "true", True),
        ("all", "False", False),
        ("lines", '["a", 1]', ["a", 1]),
        ("options", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("kind", " view\n", "view"),
        ("level", "2", 2),
        ("either", "plain", "plain"),
        ("either", "[1, 2]", [1, 2]),
        ("maybe", "null", None),
        ("maybe", "3", 3),
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("anything", "free", "free"),
    ],
)
def test_values_have_the_type_of_their_schema(name, text, value):
    found = read_call(written(("path", "a"), (name, text)), TOOLS)
    assert found is not None
    read = found.call.arguments[name]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "text, message",
    [
        (written(("path", "a"), ("line", "five")), "parameter 'line' of 'edit' must be integer; got 'five'"),
        (written(("path", "a"), ("line", "true")), "must be integer"),
        (written(("path", "a"), ("all", "1")), "must be boolean"),
        (written(("path", "a"), ("lines", "a, b")), "must be array"),
        (written(("path", "a"), ("maybe", "x")), "must be integer or null"),
        (written(("path", "a"), ("kind", "delete")), 'must be one of "view", "create"; got \'delete\''),
        (written(("path", "a"), ("level", "3")), "must be one of 1, 2"),
        (written(), "needs the parameter 'path', which is missing"),
        (written(("path", "a"), ("pth", "b")), "has no parameter 'pth'; it takes path, text"),
        (written(("x", "1"), name="look"), "it takes none"),
        (written(name="edt"), "there is no function 'edt'; there are: edit, look"),
    ],
)
def test_a_call_that_does_not_fit_says_what_to_mend(text, message):
    with pytest.raises(FunctionCallValidationError, match=message.replace("(", r"\(")):
        read_call(text, TOOLS)


@pytest.mark.parametrize(
    "text, message",
    [
        ("<function=edit><parameter=path>a</parameter></function>", "<function=edit> must be followed by a line break"),
        ("<function=edit>\n<parameter=path>a</function>", "<parameter=path> is not closed by </parameter>"),
        (
            "<function=edit>\npath: a\n</function>",
            "only <parameter=name>value</parameter> may stand; there is 'path: a",
        ),
        (written(("path", "a"), ("path", "b")), "parameter 'path' of 'edit' is given twice"),
    ],
)
def test_a_call_that_cannot_be_read_says_what_to_mend(text, message):
    with pytest.raises(FunctionCallConversionError) as raised:
        read_call(text, TOOLS)
    assert message in str(raised.value)
    assert FORMATS["function_xml"].parse(text, TOOLS) == [Invalid(f"Malformed function call: {raised.value}")]


def test_the_model_is_told_of_calls_that_were_ignored():
    call, note = call_format("function_xml").parse(written(("path", "a")) + "\n" + written(name="look"), TOOLS)
    assert call == ToolCall("edit", {"path": "a"})
    assert isinstance(note, Invalid) and "Only the first" in note.reason and "1 more ignored" in note.reason


values = st.text().filter(lambda text: "</parameter>" not in text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
arguments = st.fixed_dictionaries(
    {"path": values},
    optional={
        "text": values,
        "line": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "all": st.booleans(),
        "lines": st.lists(json_values, max_size=3),
        "options": st.dictionaries(st.text(max_size=3), json_values, max_size=3),
        "kind": st.sampled_from(["view", "create"]),
        "maybe": st.none() | st.integers(),
    },
)


def has_tag(value):
    return "</parameter>" in json.dumps(value, ensure_ascii=False)


@given(arguments.filter(lambda given: not has_tag(given)))
@settings(deadline=None)
def test_what_is_written_is_read(given):
    found = read_call("Thus:\n" + write_call("edit", given), TOOLS)
    assert found is not None and found.call == ToolCall("edit", given)


@given(arguments.filter(lambda given: not has_tag(given)))
@settings(deadline=None)
def test_calls_survive_as_plain_text(given):
    call = {"id": "toolu_01", "type": "function", "function": {"name": "edit", "arguments": json.dumps(given)}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "I edit.", "tool_calls": [call]},
        {"role": "tool", "name": "edit", "content": "done", "tool_call_id": "toolu_01"},
        {"role": "assistant", "content": "Over."},
    ]
    plain = convert_fncall_messages_to_non_fncall_messages(messages, TOOLS)
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user", "assistant"]
    assert plain[3]["content"] == "EXECUTION RESULT of [edit]:\ndone"
    back = convert_non_fncall_messages_to_fncall_messages(plain, TOOLS)
    assert json.loads(back[2]["tool_calls"][0]["function"].pop("arguments")) == given
    call["function"].pop("arguments")
    call["index"] = 1
    assert back == messages


PIECES = [
    "<function=edit>\n", "<function=", ">", "<parameter=path>", "</parameter>", "</function>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", '{"name": "edit", "arguments": ', "}", "{", "<|channel|>", "<|message|>",
    "<|start|>assistant", "<|end|>", " to=functions.edit", "<|python_tag|>", "\n", "a", "é", "\x00", '"',
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join), st.sampled_from([*FORMATS]))
@settings(deadline=None)
def test_no_text_makes_a_format_raise(text, name):
    calls = call_format(name).parse(text, TOOLS)
    assert all(isinstance(call, ToolCall | Invalid) for call in calls)
    valid = [call for call in calls if isinstance(call, ToolCall)]
    assert call_format(name).answer_message(text, valid)["role"] == "assistant"
    assert not parse_tool_call(text, TOOLS)[0] or not parse_tool_call(text, TOOLS)[1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "piece", [*PIECES, "<function=edit>\n<parameter=path>", "<function=<parameter=", "<think></think>"]
)
def test_hostile_text_takes_linear_time(name, piece):
    text = piece * (200_000 // len(piece))
    before = time.process_time()
    calls = call_format(name).parse(text, TOOLS)
    call_format(name).answer_message(text, [call for call in calls if isinstance(call, ToolCall)])
    assert time.process_time() - before < 5  # quadratic would be minutes


def test_the_functions_are_described():
    text = convert_tools_to_description(TOOLS)
    assert (
        "---- BEGIN FUNCTION #1: edit ----\nDescription: Does edit.\nParameters:\n  (1) path (string, required): Where."
        in text
    )
    assert '(8) kind (string, optional): Allowed values: "view", "create".' in text
    assert "#2: look ----\nDescription: Does look.\nNo parameters.\n---- END FUNCTION #2 ----" in text
    suffix = call_format("function_xml").system_suffix(TOOLS)
    assert text in suffix and call_format("function_xml").system_suffix([]) == ""


def test_without_a_system_message_nothing_is_explained():
    messages = [{"role": "user", "content": "U"}]
    assert convert_fncall_messages_to_non_fncall_messages(messages, TOOLS, False) == messages
    (shown,) = convert_fncall_messages_to_non_fncall_messages(messages, TOOLS)
    assert write_call("edit", {"path": "<path>"}) in shown["content"]


def test_messages_that_cannot_be_converted():
    with pytest.raises(FunctionCallConversionError, match=r"needs function\.name"):
        convert_tool_call_to_string({"function": {"name": "edit", "arguments": "[1]"}})
    with pytest.raises(FunctionCallConversionError, match="role must be"):
        convert_fncall_messages_to_non_fncall_messages([{"role": "judge", "content": ""}], TOOLS)
    with pytest.raises(ConfigError, match="litellm"):
        convert_str_to_completion_format([{"role": "assistant", "content": "a"}])


HERMES = '<tool_call>\n{"name": "edit", "arguments": {"path": "a"}}\n</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.edit "
    '<|constrain|>json<|message|>{"path": "a"}<|call|>'
)


@pytest.mark.parametrize(
    "name, text",
    [("hermes", f"I edit.\n{HERMES}"), ("llama3_json", '{"name": "edit", "parameters": {"path": "a"}}')],
)
def test_native_calls_stay_in_the_model_s_own_words(name, text):
    native = call_format(name)
    assert native.parse(text, TOOLS) == [ToolCall("edit", {"path": "a"})]
    assert native.answer_message(text, [ToolCall("edit", {"path": "a"})]) == {"role": "assistant", "content": text}
    assert native.schemas_in_template and native.system_suffix(TOOLS) == ""


def test_several_native_calls_and_one_that_is_malformed():
    calls = call_format("hermes").parse(f"{HERMES}<tool_call>nothing</tool_call>{HERMES}", TOOLS)
    first, wrong, last = calls
    assert isinstance(wrong, Invalid) and "Malformed tool call" in wrong.reason
    messages = call_format("hermes").result_messages([(first, "1"), (None, wrong.reason), (last, "2")])
    assert [(m["role"], m["content"]) for m in messages] == [("tool", "1"), ("tool", "2"), ("user", wrong.reason)]
    assert [m.get("tool_call_id") for m in messages] == ["call00000", "call00001", None]


def test_the_parts_of_a_harmony_answer():
    gpt_oss = call_format("gpt_oss")
    (call,) = gpt_oss.parse(HARMONY, TOOLS)
    message = gpt_oss.answer_message(HARMONY, [call])
    assert call == ToolCall("edit", {"path": "a"})
    assert message["thinking"] == "Hm." and message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "edit", "arguments": '{"path": "a"}'}
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>"
    assert gpt_oss.answer_message(final, []) == {"role": "assistant", "content": "2", "thinking": "Hm."}
    assert gpt_oss.answer_message("2", []) == {"role": "assistant", "content": "2"}


def test_tagged_results_are_one_message():
    results = [(ToolCall("edit", {}), "done"), (None, "one more ignored")]
    assert call_format("function_xml").result_messages(results) == [
        {"role": "user", "content": "EXECUTION RESULT of [edit]:\ndone\n\none more ignored"}
    ]
    assert call_format("function_xml").result_messages([]) == []


def test_an_unknown_format_is_named():
    with pytest.raises(ConfigError, match=r"tool_format must be one of function_xml, hermes.*got 'xml'"):
        call_format("xml")


def test_a_history_of_messages():
    history = MessageHistory()
    with pytest.raises(ValueError, match="history is empty"):
        history.append_to_last_message("x")
    first = [{"role": "user", "content": "U"}]
    history.initialize(first)
    assert history.was_reset() and len(history) == 1
    history.clear_reset_flag()
    history.add_assistant("A")
    history.add_tool_error("no such file")
    history.add_tool_response({"n": 1})
    history.add_user_guidance("go on")
    history.add_turn_reminder("2 left")
    assert [m["content"] for m in history.get_messages()] == [
        "U", "A", '{"error": "no such file"}', '{"n": 1}', "go on\n\n2 left"
    ]  # fmt: skip
    assert first == [{"role": "user", "content": "U"}] and not history.was_reset()


def test_calls_read_for_a_history():
    call, error = parse_tool_call(written(("path", "a")), TOOLS)
    assert call is not None and error is None
    assert extract_tool_info(call) == ("edit", '{"path": "a"}')
    assert parse_tool_call("none", TOOLS) == (None, None)
    assert parse_tool_call(written(), TOOLS) == (None, "function 'edit' needs the parameter 'path', which is missing")
    assert check_truncated_tool_call("<function=edit>\n<parameter=path>a") and not check_truncated_tool_call(written())
    assert format_output_preview("a\n" * 300, 5) == "a a a..."
