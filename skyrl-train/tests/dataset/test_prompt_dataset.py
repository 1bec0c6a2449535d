"""Rows from files, filtered by the length of their prompts."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from skyrl_gym.chat.template import ChatTemplate
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset import PromptDataset
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.errors import DataError
from skyrl_train.generators.tokenization import ChatFormat
from skyrl_train.utils.chat_templates import get_custom_chat_template


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """Every word is a token; the template writes the contents and, where an answer is due, one word more."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "</s>": 1, "go": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=template)


def row(content: str, **columns) -> dict:
    return {"prompt": [{"role": "user", "content": content}], **columns}


def write(path, rows) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_all_file_formats_give_same_items(tmp_path, words, suffix):
    rows = [row("a b", env_class="gsm8k", data_source="x", reward_spec={"ground_truth": "3"}), row("c d e f")]
    rows[1] |= {"env_class": None, "data_source": "y", "reward_spec": {"ground_truth": "4"}}
    dataset = PromptDataset([write(tmp_path / f"rows{suffix}", rows)], words, max_prompt_length=5)
    assert len(dataset) == 2
    assert dataset[0] == (
        [{"role": "user", "content": "a b"}],
        "gsm8k",
        {"data_source": "x", "reward_spec": {"ground_truth": "3"}},
        "0",
    )
    assert dataset.collate_fn([dataset[1]]) == [
        {
            "prompt": [{"role": "user", "content": "c d e f"}],
            "env_class": None,
            "env_extras": {"data_source": "y", "reward_spec": {"ground_truth": "4"}},
            "uid": "1",
        }
    ]


def test_prompt_without_tokens_names_row_and_tokenizer(tmp_path):
    """As of a vocabulary that another class of tokenizer saved: no unit of the text is known."""
    inner = Tokenizer(models.BPE({"user": 0, "</s>": 1}, []))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    loses = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", chat_template="{{ messages[0].content }}")
    prompts = [write(tmp_path / "rows.jsonl", [row("no"), row("what is 1 + 2 ?")])]
    with pytest.raises(DataError, match=r"rows.jsonl: row 1: .*'what is 1 \+ 2 \?' into 0 tokens"):
        PromptDataset(prompts, loses, max_prompt_length=5)


def test_overlong_prompts_are_dropped_before_uids_are_assigned(tmp_path, words):
    first = write(tmp_path / "first.jsonl", [row("one two three four"), row("a b c")])
    second = write(tmp_path / "second.parquet", [row("x y z"), row("too long " * 10)])
    # with the generation prompt's word the prompts have 5, 4, 4 and 21 tokens
    dataset = PromptDataset([first, second], words, max_prompt_length=4, num_workers=2)
    assert [(item[0][0]["content"], item[3]) for item in dataset] == [("a b c", "0"), ("x y z", "1")]


def test_configured_template_determines_prompt_length(tmp_path, words):
    """Rows of 3 and 5 tokens under the tokenizer's template, 53 and 55 under one that writes 50 more."""
    rows = write(tmp_path / "rows.jsonl", [row("a b"), row("a b c d")])
    longer = ChatTemplate(words, "x " * 50 + words.chat_template)

    def kept(limit: int, chat_template: ChatTemplate | None = None) -> list[str]:
        return [item[0][0]["content"] for item in PromptDataset([rows], words, limit, chat_template=chat_template)]

    assert kept(5) == ["a b", "a b c d"]
    assert kept(54, longer) == ["a b"]
    assert kept(55, longer) == ["a b", "a b c d"]
    with pytest.raises(DataError, match=r"trainer\.max_prompt_length=5"):
        kept(5, longer)


def test_experiment_filters_prompts_by_generator_chat_template(tmp_path, words):
    """Prompts are at most as long as the limit in the encoding of the experiment's generator, template variables
    included.
    """
    (tmp_path / "template.jinja").write_text("{{ greeting }} " * 10 + words.chat_template)
    generator = {
        "chat_template": {"source": "file", "name_or_path": str(tmp_path / "template.jinja")},
        "chat_template_kwargs": {"greeting": "good day"},
    }
    rows = write(tmp_path / "rows.jsonl", [row("a b"), row("a b c d")])
    experiment = BasePPOExp.__new__(BasePPOExp)  # settings and tokenizer suffice to read prompts: no engine starts
    experiment.tokenizer = words
    experiment.cfg = SkyRLConfig.from_dict({"trainer": {"max_prompt_length": 23}, "generator": generator})
    dataset = experiment.read_prompts([rows])
    kept = [dataset[index] for index in range(len(dataset))]
    assert [item[0][0]["content"] for item in kept] == ["a b"]
    chat = ChatFormat(words, get_custom_chat_template(experiment.cfg.generator.chat_template), {"greeting": "good day"})
    assert [len(chat.ids(item[0], add_generation_prompt=True)) for item in kept] == [23]


def test_unrenderable_prompt_is_named(tmp_path, words):
    template = "{% if messages[0].content == 'c' %}{{ raise_exception('no weather') }}{% endif %}a"
    with pytest.raises(DataError, match=r"rows\.jsonl: row 2: prompt: .*no weather"):
        PromptDataset(
            [write(tmp_path / "rows.jsonl", [row("a"), row("b"), row("c")])],
            words,
            max_prompt_length=9,
            chat_template=ChatTemplate(words, template),
        )


def test_lone_surrogate_in_prompt_is_replaced(tmp_path, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row("a \ud83d")))
    assert len(PromptDataset([str(path)], words, max_prompt_length=9)) == 1


def test_parquet_null_keys_are_removed(tmp_path, words):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": "c"}]
    dataset = PromptDataset([write(tmp_path / "rows.parquet", [{"prompt": messages}])], words, max_prompt_length=9)
    assert dataset[0][0] == messages


def test_columns_may_have_other_names(tmp_path, words):
    rows = [{"question": [{"role": "user", "content": "a"}], "env": "multiply", "x": 1}]
    dataset = PromptDataset(
        write(tmp_path / "rows.jsonl", rows), words, max_prompt_length=9, prompt_key="question", env_class_key="env"
    )
    assert dataset[0][1:] == ("multiply", {"x": 1}, "0")


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"question": "x", "answer": "y"}], r"row 0 has no column 'prompt'; it has question, answer"),
        ([{"prompt": "2+2="}], r"row 0: prompt is plain text \('2\+2='\).*role.*user"),
        ([row("a"), {"prompt": [{"content": "no role"}]}], "row 1: prompt must be a list of chat messages"),
        ([{"prompt": []}], "must be a list of chat messages"),
        ([row("much too long for the limit of nine tokens that holds here")], "all 1 prompts"),
        ([], "has no rows"),
        ([row("a"), "b"], "row 1 is a str, not an object"),
    ],
)
def test_invalid_rows_are_rejected(tmp_path, words, rows, message):
    with pytest.raises(DataError, match=message) as caught:
        PromptDataset([write(tmp_path / "rows.jsonl", rows)], words, max_prompt_length=9)
    assert "rows.jsonl" in str(caught.value)


def test_missing_parquet_column_error_lists_columns(tmp_path, words):
    path = write(tmp_path / "rows.parquet", [{"question": "x", "answer": "y"}])
    with pytest.raises(DataError, match="'prompt'"):
        PromptDataset([path], words, max_prompt_length=9)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("gone.parquet", None, "no such file"),
        ("broken.parquet", b"not parquet", "cannot be read"),
        ("broken.jsonl", b'{"prompt": []}\n{"prom', "line 2 is not JSON"),
        ("broken.json", b"\xff\xfe", "cannot be read"),
    ],
)
def test_unreadable_files_are_rejected(tmp_path, words, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        PromptDataset([str(tmp_path / name)], words, max_prompt_length=9)


def test_missing_dataset_is_rejected(words):
    with pytest.raises(DataError, match=r"data\.train_data"):
        PromptDataset([], words, max_prompt_length=9)


def test_hub_dataset_is_read_by_name_and_split(tmp_path, words):
    """A folder of files is what the hub library loads without a network."""
    folder = tmp_path / "numbers"
    folder.mkdir()
    write(folder / "train.jsonl", [row("a")])
    write(folder / "test.jsonl", [row("b"), row("c")])
    assert [item[0][0]["content"] for item in PromptDataset([str(folder)], words, 9)] == ["a"]
    assert [item[0][0]["content"] for item in PromptDataset([f"{folder}:test"], words, 9)] == ["b", "c"]
    with pytest.raises(DataError, match="`dev`"):
        PromptDataset([f"{folder}:dev"], words, 9)


def test_real_prompts_are_measured_with_real_template(tmp_path, test_data):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5")
    tokenizer.chat_template = (test_data / "tokenizers/chat_templates/Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    with gzip.open(test_data / "gsm8k" / "test.jsonl.gz", "rt") as lines:
        rows = [row(json.loads(line)["question"]) for line in lines]
    dataset = PromptDataset([write(tmp_path / "gsm8k.parquet", rows)], tokenizer, max_prompt_length=100)
    by_hand = [
        r["prompt"]
        for r in rows
        if len(tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False)) <= 100
    ]
    assert [item[0] for item in dataset] == by_hand
    assert 0 < len(by_hand) < len(rows)
