"""Tool formats: explanation, parsing, answer and result messages."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.chat.function_xml import (
    FunctionCallConversionError,
    FunctionCallValidationError,
    describe,
    read_call,
    write_call,
)
from skyrl_gym.chat.tool_formats import TOOL_FORMATS, Invalid, ToolCall


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
def test_call_is_parsed(text, arguments):
    first = read_call(text, TOOLS)
    assert first is not None and first.call == ToolCall("edit", arguments) and first.num_further == 0
    assert text[first.start :].startswith("<function=edit>\n")


@pytest.mark.parametrize(
    "text", ["", "No call.", "<function>", "I could use <function=edit> here.", "<think>" + written(("path", "a"))]
)
def test_text_without_call(text):
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
def test_values_have_schema_type(name, text, value):
    first = read_call(written(("path", "a"), (name, text)), TOOLS)
    assert first is not None
    read = first.call.arguments[name]
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
def test_mismatched_call_error_names_correction(text, message):
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
def test_malformed_call_error_names_correction(text, message):
    with pytest.raises(FunctionCallConversionError) as raised:
        read_call(text, TOOLS)
    assert message in str(raised.value)
    assert TOOL_FORMATS["function_xml"].parse(text, TOOLS) == [Invalid(f"Malformed function call: {raised.value}")]


def test_ignored_calls_are_reported_to_model():
    call, note = TOOL_FORMATS["function_xml"].parse(written(("path", "a")) + "\n" + written(name="look"), TOOLS)
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
def test_written_call_is_read_back(given):
    first = read_call("Thus:\n" + write_call("edit", given), TOOLS)
    assert first is not None and first.call == ToolCall("edit", given)


PIECES = [
    "<function=edit>\n", "<function=", ">", "<parameter=path>", "</parameter>", "</function>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", '{"name": "edit", "arguments": ', "}", "{", "<|channel|>", "<|message|>",
    "<|start|>assistant", "<|end|>", " to=functions.edit", "<|python_tag|>", "\n", "a", "é", "\x00", '"',
]  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join), st.sampled_from([*TOOL_FORMATS])
)
def test_formats_raise_on_no_text(text, name):
    calls = TOOL_FORMATS[name].parse(text, TOOLS)
    assert all(isinstance(call, ToolCall | Invalid) for call in calls)
    valid = [call for call in calls if isinstance(call, ToolCall)]
    assert TOOL_FORMATS[name].answer_message(text, valid)["role"] == "assistant"


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "piece", [*PIECES, "<function=edit>\n<parameter=path>", "<function=<parameter=", "<think></think>"]
)
def test_adversarial_text_is_parsed_in_linear_time(name, piece):
    text = piece * (200_000 // len(piece))
    before = time.process_time()
    calls = TOOL_FORMATS[name].parse(text, TOOLS)
    TOOL_FORMATS[name].answer_message(text, [call for call in calls if isinstance(call, ToolCall)])
    assert time.process_time() - before < 5  # quadratic would be minutes


def test_function_description():
    text = describe(TOOLS)
    assert (
        "---- BEGIN FUNCTION #1: edit ----\nDescription: Does edit.\nParameters:\n  (1) path (string, required): Where."
        in text
    )
    assert '(8) kind (string, optional): Allowed values: "view", "create".' in text
    assert "#2: look ----\nDescription: Does look.\nNo parameters.\n---- END FUNCTION #2 ----" in text
    suffix = TOOL_FORMATS["function_xml"].system_suffix(TOOLS)
    assert text in suffix and TOOL_FORMATS["function_xml"].system_suffix([]) == ""


HERMES = '<tool_call>\n{"name": "edit", "arguments": {"path": "a"}}\n</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.edit "
    '<|constrain|>json<|message|>{"path": "a"}<|call|>'
)


@pytest.mark.parametrize(
    "name, text",
    [("hermes", f"I edit.\n{HERMES}"), ("llama3_json", '{"name": "edit", "parameters": {"path": "a"}}')],
)
def test_native_call_keeps_model_text(name, text):
    native = TOOL_FORMATS[name]
    assert native.parse(text, TOOLS) == [ToolCall("edit", {"path": "a"})]
    assert native.answer_message(text, [ToolCall("edit", {"path": "a"})]) == {"role": "assistant", "content": text}
    assert native.schemas_in_template and native.system_suffix(TOOLS) == ""


def test_results_of_several_native_calls():
    calls = TOOL_FORMATS["hermes"].parse(f"{HERMES}<tool_call>nothing</tool_call>{HERMES}", TOOLS)
    first, wrong, last = calls
    assert isinstance(wrong, Invalid) and "Malformed tool call" in wrong.reason
    messages = TOOL_FORMATS["hermes"].result_messages(
        [(first, "1"), (wrong, wrong.reason), (last, "2"), (None, "Go on.")]
    )
    assert [(m["role"], m["content"]) for m in messages] == [
        *(("tool", text) for text in ("1", wrong.reason, "2")),
        ("user", "Go on."),
    ]
    assert [m.get("tool_call_id") for m in messages] == ["call00000", "call00001", "call00002", None]


def test_mistral_response_passes_calls_to_template():
    mistral = TOOL_FORMATS["mistral"]
    text = 'Hm.[TOOL_CALLS]edit[ARGS]{"path": "a"}</s>'
    message = mistral.answer_message(text, [ToolCall("edit", {"path": "a"})])
    assert message["content"] == "Hm." and message["tool_calls"][0]["id"] == "call00000"
    wrong = mistral.parse("[TOOL_CALLS]edit", TOOLS)
    assert mistral.result_messages([(wrong[0], "why")]) == [{"role": "user", "content": "why"}]


def test_harmony_answer_is_split_into_channels():
    gpt_oss = TOOL_FORMATS["gpt_oss"]
    (call,) = gpt_oss.parse(HARMONY, TOOLS)
    message = gpt_oss.answer_message(HARMONY, [call])
    assert call == ToolCall("edit", {"path": "a"})
    assert message["thinking"] == "Hm." and message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "edit", "arguments": '{"path": "a"}'}
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>"
    assert gpt_oss.answer_message(final, []) == {"role": "assistant", "content": "2", "thinking": "Hm."}
    assert gpt_oss.answer_message("2", []) == {"role": "assistant", "content": "2"}


def test_tagged_results_share_message():
    results = [(ToolCall("edit", {}), "done"), (None, "one more ignored")]
    assert TOOL_FORMATS["function_xml"].result_messages(results) == [
        {"role": "user", "content": "EXECUTION RESULT of [edit]:\ndone\n\none more ignored"}
    ]
    assert TOOL_FORMATS["function_xml"].result_messages([]) == []
