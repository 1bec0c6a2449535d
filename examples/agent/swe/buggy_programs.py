"""Small programs with one bug each, their tests and their fixed versions: software tasks without a download."""

from typing import Any, NamedTuple


class Program(NamedTuple):
    name: str
    says: str
    """Description of the program's intended behaviour."""
    wrong: str
    right: str
    """`code` with `wrong` in it, and what should stand there."""
    code: str
    tests: str


PROGRAMS = [
    Program(
        "median",
        "median(values) gives the middle value, or the mean of the two in the middle; the list stays as it was.",
        "values.sort()\n    ordered = values",
        "ordered = sorted(values)",
        """def median(values):
    values.sort()
    ordered = values
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
""",
        """def test_odd():
    assert median([3, 1, 2]) == 2

def test_even():
    assert median([4, 1, 2, 3]) == 2.5

def test_the_list_stays_as_it_was():
    values = [3, 1, 2]
    median(values)
    assert values == [3, 1, 2]
""",
    ),
    Program(
        "chunks",
        "chunks(text, size) cuts a text into pieces of that size; the last may be shorter.",
        "range(0, len(text) - size, size)",
        "range(0, len(text), size)",
        """def chunks(text, size):
    return [text[start : start + size] for start in range(0, len(text) - size, size)]
""",
        """def test_whole():
    assert chunks("abcdef", 2) == ["ab", "cd", "ef"]

def test_a_rest():
    assert chunks("abcde", 2) == ["ab", "cd", "e"]

def test_nothing():
    assert chunks("", 3) == []
""",
    ),
    Program(
        "roman",
        "roman(number) writes a number from 1 to 3999 in Roman numerals.",
        '(50, "L"), (10, "X")',
        '(50, "L"), (40, "XL"), (10, "X")',
        """SIGNS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (10, "X")]
SIGNS += [(9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def roman(number):
    text = ""
    for value, sign in SIGNS:
        while number >= value:
            text += sign
            number -= value
    return text
""",
        """def test_small():
    assert [roman(n) for n in (1, 4, 9, 14)] == ["I", "IV", "IX", "XIV"]

def test_large():
    assert roman(1994) == "MCMXCIV"

def test_forty():
    assert roman(48) == "XLVIII"
""",
    ),
    Program(
        "first_index",
        "first_index(values, wanted) gives the first position of `wanted` in a sorted list, or -1.",
        "if values[middle] <= wanted:",
        "if values[middle] < wanted:",
        """def first_index(values, wanted):
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(values) and values[low] == wanted else -1
""",
        """def test_found():
    assert first_index([1, 3, 5], 3) == 1

def test_the_first_of_several():
    assert first_index([1, 2, 2, 2, 3], 2) == 1

def test_missing():
    assert first_index([1, 3], 2) == -1
""",
    ),
]


def rows() -> list[dict[str, Any]]:
    """Return the rows in the form that `LocalSWETask` reads, plus the `solution`."""
    return [
        {
            "id": f"made-{program.name}",
            "problem_statement": f"{program.says} It does not; find the mistake and correct it.",
            "files": {
                f"{program.name}.py": program.code,
                f"test_{program.name}.py": f"from {program.name} import {program.name}\n\n\n{program.tests}",
            },
            "edit_file": f"{program.name}.py",
            "solution": program.code.replace(program.wrong, program.right),
            "test_cmd": f"python -m pytest -q test_{program.name}.py",
        }
        for program in PROGRAMS
    ]
