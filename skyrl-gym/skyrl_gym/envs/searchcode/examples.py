"""Small tasks with solutions, for which Python is enough."""

from skyrl_gym.envs.base_text_env import Example

INSTRUCTION = (
    "\n\nYou can run a Python program by <tool><python>program</python></tool> and search documents by "
    "<tool><search>query</search></tool>, one a turn. Give the final answer as <solution>#### NUMBER</solution>."
)


def make_examples() -> list[Example]:
    return [
        _make_example("What is the sum of the squares of the first 200 prime numbers?", SUM_OF_SQUARES, 88_778_899),
        _make_example(
            "How many of the numbers from 1 to 100000 have digits that add up to 23?",
            "print(sum(sum(map(int, str(number))) == 23 for number in range(1, 100_001)))",
            6000,
        ),
        _make_example(
            "What are the last seven digits of 3 to the power of 5000?", "print(pow(3, 5000, 10**7))", 6_100_001
        ),
        _make_example(
            "In how many ways can 10 dollars be paid in coins of 5, 10, 25 and 50 cents?",
            "ways = [1] + [0] * 1000\n"
            "for coin in (5, 10, 25, 50):\n"
            "    for total in range(coin, 1001):\n"
            "        ways[total] += ways[total - coin]\n"
            "print(ways[1000])",
            15_211,
        ),
    ]


SUM_OF_SQUARES = """primes = []
number = 2
while len(primes) < 200:
    if all(number % prime for prime in primes):
        primes.append(number)
    number += 1
print(sum(prime * prime for prime in primes))"""


def _make_example(question: str, program: str, answer: int) -> Example:
    oracle = (f"<tool><python>{program}</python></tool>", f"<solution>#### {answer}</solution>")
    return Example.ruled(question + INSTRUCTION, str(answer), *oracle, max_turns=3)
