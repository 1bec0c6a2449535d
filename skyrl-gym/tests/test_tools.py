import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.tools import CalculatorToolGroup, ToolGroup, tool
from skyrl_gym.tools.calculator import CalculatorError, evaluate_expression


class Greetings(ToolGroup):
    def __init__(self, language="en"):
        self.word = {"en": "hello", "de": "hallo"}[language]
        super().__init__(name="Greetings")

    @tool
    def greet(self, name, loudly=False):
        """Says hello."""
        return f"{self.word} {name}{'!' if loudly else ''}"

    def not_a_tool(self):
        return self.word


class MoreGreetings(Greetings):
    @tool
    def bye(self):
        return "bye"


def test_marked_methods_are_tools_and_know_their_instance():
    english, german = Greetings(), Greetings("de")
    assert english.get_tool_names() == ["greet"]
    assert english.execute_tool("greet", "Ann") == "hello Ann"
    assert german.execute_tool("greet", "Ann", loudly=True) == "hallo Ann!"
    assert german.greet("Bob") == "hallo Bob"  # still an ordinary method
    assert isinstance(Greetings.greet, tool) and Greetings.greet.__doc__ == "Says hello."


def test_inherited_tools_are_found_in_alphabetical_order():
    group = MoreGreetings()
    assert group.get_tool_names() == ["bye", "greet"]
    assert group.get_tool_to_group_mapping() == {"bye": "Greetings", "greet": "Greetings"}


def test_an_unknown_tool_is_named():
    group = Greetings()
    assert group.get_name() == "Greetings" and group.get_tool("shout") is None
    with pytest.raises(ValueError, match=r"Tool 'shout' not found in group 'Greetings'\."):
        group.execute_tool("shout")


def test_an_environment_calls_its_tools_by_group_and_name():
    env = BaseTextEnv()
    env.init_tool_groups([Greetings(), CalculatorToolGroup()])
    assert env.tool_to_toolgroup == {"greet": "Greetings", "calculator": "CalculatorToolGroup"}
    assert env._execute_tool("Greetings", "greet", ["Ann"]) == "hello Ann"
    with pytest.raises(ValueError, match=r"ToolGroup 'Search' not found\."):
        env._execute_tool("Search", "search", ["x"])
    with pytest.raises(TypeError, match="must be a list or tuple"):
        env._execute_tool("Greetings", "greet", "Ann")  # type: ignore[arg-type]


def test_two_groups_may_not_have_a_tool_of_the_same_name():
    with pytest.raises(ValueError, match="tool 'greet' is in two groups"):
        BaseTextEnv().init_tool_groups([Greetings(), MoreGreetings()])


@pytest.mark.parametrize(
    "expression, value",
    [
        ("37*48", 1776),
        (" 2 + 3 * (4 - 1) ", 11),
        ("84/2", 42),  # whole, so no 42.0
        ("1/4", 0.25),
        ("7//2", 3),
        ("7%4", 3),
        ("-2**2", -4),
        ("2**-1", 0.5),
        ("+.5", 0.5),
    ],
)
def test_the_calculator_knows_arithmetic(expression, value):
    assert evaluate_expression(expression) == value
    assert type(evaluate_expression(expression)) is type(value)


@pytest.mark.parametrize(
    "expression, reason",
    [
        ("", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("a+1", "only numbers"),
        ("1,2", "only numbers"),
        ("1+", "not an arithmetic expression"),
        ("((((1", "not an arithmetic expression"),
        ("()", "is not arithmetic"),
        ("1(2)", "is not arithmetic"),
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("9**9**9", "exponent 387420489 is over 64"),
        ("(9**60)**60", "too large"),
        ("(10.0**60)**60", "too large"),
        ("(-8)**.5", "not a real number"),
        ("1+" * 100 + "1", "longer than 200"),
        ("(" * 99 + "1" + ")" * 99, None),
    ],
)
def test_the_calculator_refuses_everything_else_at_once(expression, reason):
    if reason is None:  # deep, but arithmetic
        assert evaluate_expression(expression) == 1
        return
    with pytest.raises(CalculatorError, match=reason):
        evaluate_expression(expression)
