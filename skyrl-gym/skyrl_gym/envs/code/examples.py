"""Small tasks with solutions, and ways to pass tests without solving them, which must earn nothing."""

from skyrl_gym.envs.base_text_env import Example

MEDIAN_PROMPT = '''def is_even(number: int) -> bool:
    """Whether a number is even."""
    return number % 2 == 0


def median(numbers: list[float]) -> float:
    """The middle one of the numbers in order of size, or the mean of the two in the middle.
    >>> median([3, 1, 2])
    2
    """
'''
MEDIAN_SOLUTION = """def median(numbers: list[float]) -> float:
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return (ordered[half - 1] + ordered[half]) / 2 if is_even(len(ordered)) else ordered[half]"""
MEDIAN_TEST = """def check(candidate):
    assert candidate([3, 1, 2]) == 2
    assert candidate([4, 1, 3, 2]) == 2.5
    for length in range(1, 6):
        numbers = list(range(10, 10 + length))
        assert candidate(numbers[::-1]) == (10 + numbers[-1]) / 2, is_even(length)
"""


def make_examples() -> list[Example]:
    return [
        _make_example(
            "Write a function `run_lengths(text)` that returns, for each run of one letter, the letter and its length.",
            "def run_lengths(text):\n    return [(letter, len(list(run))) for letter, run in itertools.groupby(text)]",
            {
                "tests": [
                    "assert run_lengths('aab') == [('a', 2), ('b', 1)]",
                    "assert run_lengths('') == []",
                    "assert run_lengths('abba') == [('a', 1), ('b', 2), ('a', 1)]",
                ],
                "entry_point": "run_lengths",
            },
        ),
        _make_example(
            f"Complete this function:\n\n{MEDIAN_PROMPT}",
            MEDIAN_SOLUTION,
            {"tests": [MEDIAN_TEST], "entry_point": "median", "prompt": MEDIAN_PROMPT},
        ),
        _make_example(
            "Write a function `digits_of(number)` that returns the digits of a whole number as a list, and raises "
            "ValueError for a negative one.",
            "def digits_of(number):\n"
            "    if number < 0:\n"
            "        raise ValueError('negative')\n"
            "    return [int(digit) for digit in str(number)]",
            {
                "tests": [
                    "assert digits_of(4096) == [4, 0, 9, 6]",
                    "try:\n    digits_of(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
                ],
                "entry_point": "digits_of",
            },
        ),
        _make_example(
            "A line of standard input has whole numbers with spaces between. Print the sum of their squares.",
            "print(sum(int(word) ** 2 for word in input().split()))",
            {"tests": [{"input": "1 2 3\n", "output": "14"}, {"input": "-4", "output": "16"}]},
        ),
    ]


def _make_example(question: str, solution: str, ground_truth: dict[str, object]) -> Example:
    prompt = f"{question}\n\nPut the code in a ```python block."
    return Example.ruled(prompt, ground_truth, f"```python\n{solution}\n```")


def make_always_equal(example: Example) -> list[str]:
    """Return a program whose result compares equal to, less than, and contains everything."""
    methods = ("eq", "ne", "lt", "gt", "le", "ge", "contains", "bool")
    body = "\n".join(f"    def __{name}__(self, *others): return True" for name in methods)
    return [
        _format_block(
            f"class Any(list):\n{body}\n    __hash__ = object.__hash__\n{_format_function(example, 'return Any()')}"
        )
    ]


def exit_early(example: Example) -> list[str]:
    """End the process with success before a test can fail."""
    return [_format_block(f"import os\n{_format_function(example, 'os._exit(0)')}\nos._exit(0)")]


def patch_builtins(example: Example) -> list[str]:
    """Make everything that a test might use say yes."""
    code = "import builtins\nfor name in ('all', 'any', 'isinstance', 'abs', 'len'):\n"
    code += "    setattr(builtins, name, lambda *arguments: True)\nbuiltins.AssertionError = Warning\n"
    return [_format_block(code + _format_function(example, "return True"))]


def _format_function(example: Example, body: str) -> str:
    ground_truth = example.extras["reward_spec"]["ground_truth"]
    name = ground_truth.get("entry_point", "answer") if isinstance(ground_truth, dict) else "answer"
    return f"def {name}(*arguments):\n    {body}\n"


def _format_block(code: str) -> str:
    return f"```python\n{code}\n```"
