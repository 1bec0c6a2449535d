"""Lists of JSON that are read one item at a time: the same items as `json.loads`, the same files refused."""

import io
import json
import random

import pytest

from skyrl_train.dataset import json_list


def read(text: str) -> list[object]:
    return list(json_list.iter_list_items(io.StringIO(text)))


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1 << 20])
def test_items_match_json_for_any_chunk_boundary(monkeypatch, block):
    monkeypatch.setattr(json_list, "_BLOCK", block)
    draw = random.Random(0)

    def value(depth: int) -> object:
        plain = [draw.random(), -1, 10**20, True, None, "é\n\\u", '"]}', -1e-30, "𝄞", float("inf"), ""]
        if depth and draw.random() < 0.6:
            items = [value(depth - 1) for _ in range(draw.randrange(4))]
            return items if draw.random() < 0.5 else {str(number): item for number, item in enumerate(items)}
        return draw.choice(plain)

    for indent, ascii_only in ((None, True), (2, False)):
        items = [value(3) for _ in range(12)]
        assert read(f" {json.dumps(items, indent=indent, ensure_ascii=ascii_only)}\n") == items
    assert read("[]") == read(" [ \n] ") == []
    assert read("[123,45]") == [123, 45]


@pytest.mark.parametrize("block", [1, 1 << 20])
@pytest.mark.parametrize(
    "text, error",
    [
        ('[{"a": 1}, {"a": 2}', "after 2 items of the list, found the end of the file"),
        ('[{"a": 1} {"a": 2}]', "after 1 items of the list, found '{', expected , or ]"),
        ('[{"a": 1}, {"a": tru}]', "item 1 of the list is not valid JSON: Expecting value"),
        ('[{"a": 1}, {"a": "x]', "item 1 of the list is not valid JSON: Unterminated string"),
        ("[1,]", "item 1 of the list is not valid JSON"),
        ("[1], 2", "',' found after the end of the list"),
        ("[", "item 0 of the list is not valid JSON"),
    ],
)
def test_non_list_is_rejected_with_item(monkeypatch, block, text, error):
    monkeypatch.setattr(json_list, "_BLOCK", block)
    with pytest.raises(ValueError, match=error.replace("[", r"\[")):
        read(text)


def test_reading_stops_at_invalid_item(monkeypatch):
    monkeypatch.setattr(json_list, "_BLOCK", 64)
    file = io.StringIO('[{"a": nonsense}' + " " * 10_000)
    with pytest.raises(ValueError, match="item 0"):
        list(json_list.iter_list_items(file))
    assert file.tell() == 64
