"""Small tasks in the form of LiveCodeBench's, with solutions."""

import json

from skyrl_gym.envs.base_text_env import Example

STDIN_FORMAT = "Read the input from standard input, and print the answer. Put the whole program in a ```python block."
STARTER_FORMAT = "Complete this class, in a ```python block:\n\nclass Solution:\n    def {name}(self, {parameters}):"


def make_examples() -> list[Example]:
    return [
        _make_program_example(
            "There are t cases, each a line with a and b. For each, print how many whole numbers from a to b, both "
            "included, read the same backwards.",
            "for _ in range(int(input())):\n"
            "    a, b = map(int, input().split())\n"
            "    print(sum(str(n) == str(n)[::-1] for n in range(a, b + 1)))",
            {"2\n1 100\n95 130\n": "18\n4", "1\n1000 3000": "20", "1\n12 12": "0"},
        ),
        _make_program_example(
            "Given n, and then n words each on a line of its own, print the words in order of their length, words of "
            "one length in the order given, with single spaces between.",
            "words = [input().strip() for _ in range(int(input()))]\nprint(*sorted(words, key=len))",
            {"4\npear\nfig\nbanana\nkiwi\n": "fig pear kiwi banana", "2\nbb\na\n": "a bb", "1\nplum\n": "plum"},
        ),
        _make_method_example(
            "Given a list of prices by day, return the most that one can earn by buying on one day and selling on a "
            "later one, or 0.",
            "max_profit",
            "prices: list[int]",
            "        best, low = 0, prices[0]\n"
            "        for price in prices:\n"
            "            low = min(low, price)\n"
            "            best = max(best, price - low)\n"
            "        return best",
            {"[7, 1, 5, 3, 6, 4]": "5", "[7, 6, 4]": "0", "[2, 9, 1, 7]": "7"},
        ),
        _make_method_example(
            "Given words and a letter, return the places of the words, counted from 0, that have that letter.",
            "words_with",
            "words: list[str], letter: str",
            "        return [place for place, word in enumerate(words) if letter in word]",
            {'["leet", "code"]\n"e"': "[0, 1]", '["abc", "bcd", "aaaa"]\n"a"': "[0, 2]", '["abc"]\n"z"': "[]"},
        ),
    ]


def _make_program_example(question: str, solution: str, cases: dict[str, str]) -> Example:
    tests: list[dict[str, object]] = [
        {"input": given, "output": expected, "testtype": "stdin"} for given, expected in cases.items()
    ]
    return _make_example(f"{question}\n\n{STDIN_FORMAT}", solution, tests)


def _make_method_example(question: str, name: str, parameters: str, body: str, cases: dict[str, str]) -> Example:
    metadata = {"func_name": name}
    tests = [
        {"input": given, "output": expected, "testtype": "functional", "metadata": metadata}
        for given, expected in cases.items()
    ]
    solution = f"class Solution:\n    def {name}(self, {parameters}):\n{body}"
    return _make_example(f"{question}\n\n{STARTER_FORMAT.format(name=name, parameters=parameters)}", solution, tests)


def _make_example(prompt: str, solution: str, tests: list[dict[str, object]]) -> Example:
    return Example.ruled(prompt, json.dumps(tests), f"```python\n{solution}\n```")
