"""A Parquet file, and a dataset of the hub, read as the JSONL file of the same rows does."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from skyrl_train.config.supervised import SupervisedDataConfig
from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.dataset.supervised import SupervisedDataset
from skyrl_train.errors import DataError
from skyrl_train_testing.tiny_models import build_character_tokenizer

WITH_CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<start>{{ m.role }}{{ ' ' + m.name if m.name is defined else '' }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c | tojson }}]{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer(WITH_CALLS)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **kinds):
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("weather", city="string"), tool("find", text="string", k="integer")]
TALKS = [
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [made]}, *rest]
    for made, rest in (
        (call("weather", city="Rome"), []),
        (call("find", text="x", k=3), [{"role": "tool", "name": "find", "content": "r"}]),
    )
]
DEMONSTRATIONS = [{"messages": TALKS[0], "tools": TOOLS[:1]}, {"messages": TALKS[1][:2], "tools": TOOLS}]
PAIRS = [
    {"prompt": TALKS[0][:1], "chosen": TALKS[0][1:], "rejected": [{"role": "assistant", "content": "no"}]},
    {"prompt": TALKS[1][:1], "chosen": TALKS[1][1:2], "rejected": [{"role": "assistant", "content": "no"}]},
]
PROMPTS = [
    {"prompt": TALKS[0], "reward_spec": {"ground_truth": {"a": 1}}, "answers": [{"a": [1, None]}]},
    {"prompt": TALKS[1], "reward_spec": {"ground_truth": {"b": "2"}}, "env_class": "e", "hint": {"text": "t"}},
]


@pytest.fixture(params=["jsonl", "parquet", "hub"])
def write(request, tmp_path, monkeypatch):
    def write(rows):
        path = tmp_path / f"rows.{request.param}"
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows])
        if request.param == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        elif request.param == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            made = datasets.Dataset(table)
            monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": made})
        return [str(path) if request.param != "hub" else "some/rows"]

    return write


def test_trained_texts_omit_fields_of_other_row_kinds(write, tokenizer, tmp_path):
    config = SupervisedDataConfig(cache_dir=str(tmp_path / "cache"), train_on="all")
    dataset = SupervisedDataset(write(DEMONSTRATIONS), tokenizer, config)
    for (example,), row in zip(dataset, DEMONSTRATIONS, strict=True):
        expected = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        assert tokenizer.decode(example.ids) == expected


def test_pairs_omit_fields_of_other_row_kinds(write, tokenizer, tmp_path):
    config = SupervisedDataConfig(cache_dir=str(tmp_path / "cache"), train_on="last_assistant")
    dataset = SupervisedDataset(write(PAIRS), tokenizer, config, with_pairs=True)
    for pair, row in zip(dataset, PAIRS, strict=True):
        expected = [
            tokenizer.apply_chat_template([*row["prompt"], *row[kind]], tokenize=False)
            for kind in row
            if kind != "prompt"
        ]
        assert [tokenizer.decode(example.ids) for example in pair] == expected


def test_prompts_and_extras_omit_fields_of_other_row_kinds(write, tokenizer, tmp_path):
    dataset = PromptDataset(write(PROMPTS), tokenizer, 10**6, cache_dir=str(tmp_path / "cache"))
    assert len(dataset) == len(PROMPTS)
    for number, row in enumerate(PROMPTS):
        prompt, env_class, extras, _ = dataset[number]
        assert prompt == row["prompt"]
        assert env_class == row.get("env_class")
        assert extras == {key: value for key, value in row.items() if key not in ("prompt", "env_class")}


def test_json_tools_keep_nulls(write, tokenizer, tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    rows = [{"messages": TALKS[0], "tools": json.dumps(tools)}]
    config = SupervisedDataConfig(cache_dir=str(tmp_path / "cache"), train_on="all")
    ((example,),) = SupervisedDataset(write(rows), tokenizer, config)
    assert json.dumps(tools[0]) in tokenizer.decode(example.ids)


@pytest.mark.parametrize("tools", ["[not JSON", '{"type": "function"}', "[1]"])
def test_invalid_tool_schema_error_names_row(write, tokenizer, tmp_path, tools):
    rows = [{"messages": TALKS[0], "tools": tools}]
    with pytest.raises(DataError, match="row 0: tools"):
        SupervisedDataset(write(rows), tokenizer, SupervisedDataConfig(cache_dir=str(tmp_path / "cache")))


def test_unrenderable_tools_error_names_row(tmp_path):
    strict = build_character_tokenizer(WITH_CALLS.replace("{{ t | tojson }}", "{{ t['function']['name'] | upper }}"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TALKS[0], "tools": [{"function": {}}, {"other": 1}]}))
    with pytest.raises(DataError, match="row 0") as error:
        SupervisedDataset([str(path)], strict, SupervisedDataConfig(cache_dir=str(tmp_path / "cache")))
    assert "chat_template_kwargs" not in str(error.value)


def test_reserved_column_is_rejected_by_name(tokenizer, tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([{**PROMPTS[0], "skyrl:length": 3}]), path)
    with pytest.raises(DataError, match=r"rows\.parquet.*skyrl:length"):
        PromptDataset([str(path)], tokenizer, 10**6, cache_dir=str(tmp_path / "cache"))


def test_any_column_name_is_kept_in_json(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**PROMPTS[0], "skyrl:length": 3, "skyrl:other": 4}))
    _, _, extras, _ = PromptDataset([str(path)], tokenizer, 10**6, cache_dir=str(tmp_path / "cache"))[0]
    assert (extras["skyrl:length"], extras["skyrl:other"]) == (3, 4)
