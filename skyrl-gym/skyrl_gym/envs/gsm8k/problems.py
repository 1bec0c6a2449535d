"""A few word problems in the form of GSM8K's, for trying the environments without data."""

from skyrl_gym.envs.base_text_env import Example

INSTRUCTION = "Think step by step and write the final number after `####`."

_PROBLEMS = [
    (
        "A farm has 14 hives. Each gives 23 jars of honey, and 37 jars break on the way. How many are left?",
        "14 hives give 14 * 23 = 322 jars, of which 322 - 37 = 285 are left.",
        285,
    ),
    (
        "A train covers 84 km in each of 13 hours and then 29 km more. How far does it go, in km?",
        "In 13 hours it covers 84 * 13 = 1092 km, and 1092 + 29 = 1121 km in all.",
        1121,
    ),
    (
        "Nora saves 125 coins a week for 9 weeks and spends 268 of them. How many has she now?",
        "She saves 125 * 9 = 1125 coins; 1125 - 268 = 857 are left.",
        857,
    ),
    (
        "A shelf holds 47 books. A library has 32 full shelves and lends out 619 books. How many stay?",
        "There are 47 * 32 = 1504 books, and 1504 - 619 = 885 stay.",
        885,
    ),
]


def examples() -> list[Example]:
    """Rows as of the dataset, with solutions."""
    return [
        Example.ruled(f"{question} {INSTRUCTION}", str(answer), f"{steps}\n#### {answer}", data_source="openai/gsm8k")
        for question, steps, answer in _PROBLEMS
    ]
