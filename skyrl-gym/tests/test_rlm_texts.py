"""Parsing of a turn in the recursive language model environment, and values that pass the pipe of its REPL."""

import json

import pytest

from skyrl_gym.envs.rlm.answers import extract_final_variable, extract_last_repl_block, final_text
from skyrl_gym.envs.rlm.repl_process import TooLarge, decode, encode


@pytest.mark.parametrize(
    "text, code",
    [
        ("no block", None),
        ("```python\nx\n```", None),
        ("```repl\nx = 1\n```", "x = 1"),
        ("```repl\nfirst\n```\nand\n```repl\nsecond\nthird\n```\n", "second\nthird"),
        ("```repl\nx = 1", None),
        ("```repl\nprint('```')\n```", "print('```')"),
        ("```repl\n\n```", ""),
    ],
)
def test_last_repl_block_is_executed(text, code):
    assert extract_last_repl_block(text) == code


@pytest.mark.parametrize(
    "text, answer",
    [
        ("FINAL(42)", "42"),
        ("I think\n  FINAL(it is (about) 3)\nreally", "it is (about) 3"),
        ("FINAL(one)\nFINAL(two)", "two"),
        ("FINAL(a\nb)", "a\nb"),
        ("FINAL(:()", ":("),
        ("the form FINAL(x) in a sentence", None),
        ("FINAL(never closed", None),
        ("```repl\nFINAL(3)\n```", None),
        ("FINAL_VAR(x)", None),
    ],
)
def test_final_answer_must_start_line(text, answer):
    assert final_text(text) == answer


@pytest.mark.parametrize(
    "text, name",
    [
        ("FINAL_VAR(x)", "x"),
        ("so\nFINAL_VAR('best_one')\nFINAL_VAR(last)", "last"),
        ("```repl\nif False:\n    FINAL_VAR('x')\n```", None),
        ("say FINAL_VAR(x)", None),
    ],
)
def test_final_variable_must_start_line_outside_code(text, name):
    assert extract_final_variable(text) == name


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -7,
        2.5,
        "text \n é 漢",
        b"\x00\xff",
        [1, [2, (3,)]],
        {"a": 1, 2: {"b"}, (1, 2): None},
        {frozenset({1}), "x"},
    ],
)
def test_plain_values_cross_as_they_are(value):
    crossed = decode(json.loads(json.dumps(encode(value))))
    assert crossed == value
    assert type(crossed) is type(value)


def test_non_plain_values_do_not_cross():
    loop: list = []
    loop.append(loop)
    for value in (object(), print, [lambda: 1], loop):
        with pytest.raises(TypeError):
            encode(value)
    for value in ("x" * 1000, [0] * 1000, 10**5000):
        with pytest.raises(TooLarge):
            encode(value, 1000)


@pytest.mark.parametrize(
    "frame", [{}, {"a": 1, "b": 2}, {"pickle": "x"}, {"bytes": "é"}, {"dict": [1]}, {"dict": [[[], 1]]}, {"set": [[1]]}]
)
def test_invalid_encodings_are_refused(frame):
    with pytest.raises(ValueError):
        decode(frame)


def test_nesting_without_end_is_refused():
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match="recursion"):
        decode(value)


def test_keys_with_chosen_hashes_do_not_cross_pipe():
    with pytest.raises(TooLarge):
        encode({number: None for number in range(2000)})
    with pytest.raises(TooLarge):
        decode({"set": list(range(2000))})
    many = {number: None for number in range(2000)}
    assert decode(encode(many, for_host=False), from_host=True) == many
    assert len(decode(encode({str(number): None for number in range(2000)}))) == 2000
