"""The recursive language model environment and its REPL, in real sandboxes."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import skyrl_gym
from skyrl_gym.envs.rlm.env import BaseRLMEnv, RLMEnv
from skyrl_gym.envs.rlm.repl import RESERVED_TOOL_NAMES, Opaque, PersistentREPL
from skyrl_gym.episode import run_episode
from skyrl_gym.error import Error, InfraError, TaskError
from skyrl_gym.sandbox import make_sandbox
from skyrl_gym.sandbox.testing import require_sandbox

from .chat_server import ChatServer
from .sandboxed import processes_with

QUESTION = [{"role": "user", "content": "What is the code word?"}]


@pytest.fixture(autouse=True, scope="module")
def _a_sandbox():
    require_sandbox()


class TwoAtATime:
    """Model that answers with the prompt, the first ones after the longest time, and counts its calls under way."""

    def __init__(self):
        self.lock, self.at_work, self.most = threading.Lock(), 0, 0

    def __call__(self, prompt):
        with self.lock:
            self.at_work += 1
            self.most = max(self.most, self.at_work)
        time.sleep(0.02 * (6 - int(prompt)))
        with self.lock:
            self.at_work -= 1
        return prompt


def shout(prompts):
    return [prompt.upper() for prompt in prompts]


def fail(*_):
    raise RuntimeError("the model is asleep")


@pytest.fixture
def make_repl():
    made = []

    def make(*arguments, **settings):
        made.append(PersistentREPL(*arguments, **{"timeout": 20.0, **settings}))
        return made[-1]

    yield make
    for repl in made:
        repl.cleanup()


@pytest.fixture
def make_env():
    made = []

    def make(context="the code word is plum", env_class=RLMEnv, env_config=None, **extras):
        row = {"reward_spec": {"ground_truth": "plum"}, "extra_info": {"context_text": context}}
        env = env_class(env_config, {**row, **extras})
        messages, _ = env.init(list(QUESTION))
        made.append(env)
        return env, messages

    yield make
    for env in made:
        env.close()


def block(code):
    return f"Let me see.\n```repl\n{code}\n```"


def text_of(output):
    return "\n".join(message["content"] for message in output["observations"])


def wait_until_exited(marker):
    deadline = time.monotonic() + 10
    while processes_with(marker):
        assert time.monotonic() < deadline, f"still there: {processes_with(marker)}"
        time.sleep(0.02)


# The namespace


def test_variables_persist_between_executions(make_repl):
    repl = make_repl()
    repl.execute("numbers = [1, 2, 3]\ndef double(x): return 2 * x")
    result = repl.execute("print(double(sum(numbers)))")
    assert (result.stdout, result.stderr) == ("12\n", "")
    assert result.locals["numbers"] == repl.locals["numbers"] == [1, 2, 3]
    assert result.locals["double"] == Opaque("function")


def test_values_round_trip_through_pipe(make_repl):
    repl = make_repl(custom_tools={"echo": lambda value: value})
    value = {"a": (1, 2.5, None), 3: {"x", "y"}, "b": [b"\x00\xff", True, {"deep": frozenset({4})}], "text": "é\n漢"}
    repl.add_context(value)
    result = repl.execute("same = echo(context) == context; copy = echo(context)")
    assert result.locals["same"] is True
    assert result.locals["copy"] == value


def test_exception_traceback_shows_only_user_code(make_repl):
    result = make_repl().execute("x = 1\nprint(x / 0)")
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "print(x / 0)" in result.stderr
    assert result.stderr.count("File ") == 1


def test_child_process_output_is_captured_and_long_output_truncated(make_repl):
    result = make_repl().execute("import os\nprint('first')\nos.system('echo second; echo third >&2')\nprint('fourth')")
    assert (result.stdout, result.stderr) == ("first\nsecond\nfourth\n", "third\n")
    cut = make_repl(max_output=1000).execute("print('x' * 5000)")
    assert cut.stdout == "x" * 1000 + "\n... (4001 more bytes)"


def test_context_can_be_bound_again_after_execution(make_repl):
    repl = make_repl()
    repl.execute("x = 1")
    repl.add_context("first")
    repl.add_context({"second": 2}, index=1)
    assert repl.execute("print(context, context_0, context_1)\ncontext = 0").stdout == "first first {'second': 2}\n"
    assert repl.execute("print(x, context)").stdout == "1 first\n"
    assert repl.locals["context_1"] == {"second": 2}


def test_final_var_returns_variable_value(make_repl):
    repl = make_repl()
    assert repl.execute("answer = 6 * 7\nFINAL_VAR('answer')").final_answer == "42"
    assert repl.execute("1").final_answer is None
    wrong = repl.execute("print(FINAL_VAR('anwser'))")
    assert wrong.final_answer is None
    assert "answer: int" in wrong.stdout
    assert wrong.stderr == wrong.stdout


def test_imports_can_be_switched_off(make_repl):
    assert make_repl().execute("import math; print(math.floor(2.5))").stdout == "2\n"
    repl = make_repl(allow_imports=False)
    assert "ImportError" in repl.execute("import os").stderr
    assert repl.execute("print(sorted([2, 1]))").stdout == "[1, 2]\n"


# Functions of the host


QUERIES = """
one = llm_query('a', model='small'); many = llm_query_batched(['b', 'c'], 'small')
child = rlm_query('d', 'small', context='x'); children = rlm_query_batched(['e', 'f'], 'small', ['y', 'z'])
"""
IN_THREADS = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool: got = list(pool.map(llm_query, map(str, range(40))))
"""
VALUES = {"list": "[1, 2]", "text": "[1, 2 and more", "code": "__import__('os')"}


@pytest.mark.parametrize(
    "child, code, expected",
    [
        (None, "one = llm_query('a'); many = llm_query_batched(['b', 'c'])", {"one": "A", "many": ["B", "C"]}),
        (None, "one = rlm_query('a'); many = rlm_query_batched(['b', 'c'])", {"one": "A", "many": ["B", "C"]}),
        (
            lambda prompt, *, context=None: f"{prompt}+{context}",
            QUERIES,
            {"one": "A", "many": ["B", "C"], "child": "d+x", "children": ["e+y", "f+z"]},
        ),
        # a value if it spells one, and text otherwise; one that fails is one error among the answers
        (
            VALUES.__getitem__,
            "got = rlm_query_batched(['list', 'text', 'bad', 'code'])",
            {"got": [[1, 2], "[1, 2 and more", "Error: RLM query failed - 'bad'", "__import__('os')"]},
        ),
        (None, IN_THREADS, {"got": [str(number) for number in range(40)]}),
    ],
    ids=["model", "no children", "skyrl's arguments", "values", "threads"],
)
def test_queries_call_callbacks(make_repl, child, code, expected):
    repl = make_repl(lm_callback=shout, subcall_fn=child)
    result = repl.execute(code)
    assert result.stderr == ""
    assert {name: result.locals[name] for name in expected} == expected
    assert {"llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched"} <= set(repl.globals)


def test_queries_require_callback(make_repl):
    repl = make_repl()
    assert "NameError" in repl.execute("llm_query('a')").stderr
    assert "llm_query" not in repl.globals
    assert {"FINAL_VAR", "SHOW_VARS"} <= set(repl.globals)


def test_overwritten_names_are_restored(make_repl):
    repl = make_repl(lm_callback=shout, custom_tools={"seven": 7})
    repl.execute("llm_query = FINAL_VAR = seven = None\ndel SHOW_VARS\n__builtins__ = {}")
    assert repl.globals["llm_query"] == repl._llm_query
    result = repl.execute("print(llm_query('again'), seven, SHOW_VARS())\nFINAL_VAR('seven')")
    assert result.stdout.startswith("AGAIN 7 Variables:")
    assert result.final_answer == "7"


def test_failing_callback_returns_error_text(make_repl):
    repl = make_repl(lm_callback=fail)
    result = repl.execute("one = llm_query('a'); many = llm_query_batched(['b', 'c'])")
    assert result.locals["one"].startswith("Error: LM query failed")
    assert "the model is asleep" in result.locals["one"]
    assert [answer.startswith("Error: LM query failed") for answer in result.locals["many"]] == [True, True]


def test_child_queries_run_two_at_a_time_in_order(make_repl):
    child = TwoAtATime()
    repl = make_repl(lm_callback=shout, subcall_fn=child)
    assert repl.execute("got = rlm_query_batched(list('012345'))").locals["got"] == [0, 1, 2, 3, 4, 5]
    assert child.most == 2


def test_custom_tools_are_functions_and_values(make_repl):
    repl = make_repl(custom_tools={"add": lambda a, b=1: a + b, "table": {"x": 1}, "broken": fail})
    assert repl.execute("print(add(2), add(2, b=5), table['x'])").stdout == "3 7 1\n"
    assert "RuntimeError: the model is asleep" in repl.execute("broken()").stderr
    assert "TypeError" in repl.execute("add()").stderr


@pytest.mark.parametrize("name", [*sorted(RESERVED_TOOL_NAMES), "context_0", "not a name"])
def test_tool_must_be_function_or_plain_value_with_unreserved_name(name):
    with pytest.raises(ValueError, match=name):
        PersistentREPL(custom_tools={name: 1})
    with pytest.raises(TypeError, match="object"):
        PersistentREPL(custom_tools={"thing": object()})


def test_service_failure_raises_infra_error(make_repl):
    def unreachable(prompts):
        raise InfraError("no server at this address")

    repl = make_repl(lm_callback=unreachable)
    with pytest.raises(InfraError, match="no server"):
        repl.execute("llm_query('a')")


# Limits


@pytest.mark.parametrize("body", ["pass", "llm_query('x')"])
def test_slow_code_is_interrupted_and_variables_persist(make_repl, body):
    repl = make_repl(timeout=1.0, lm_callback=shout)
    started = time.monotonic()
    result = repl.execute(f"x = 5\nprint('before')\nwhile True: {body}")
    assert time.monotonic() - started < 3
    assert "interrupted after 1 seconds" in result.stderr
    assert result.stdout == "before\n"
    assert repl.execute("print(x)").stdout == "5\n"


@pytest.mark.parametrize(
    "code",
    [
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        "while True:\n  try:\n    while True: sum(range(1000))\n  except BaseException: pass",
    ],
    ids=["ignores the signal", "catches everything"],
)
def test_uninterruptible_code_is_killed_and_repl_restarts(make_repl, code):
    repl = make_repl(timeout=0.5, lm_callback=shout, custom_tools={"seven": 7})
    repl.add_context("plum")
    repl.execute("x = 5")
    result = repl.execute(code)
    assert "variables are gone" in result.stderr
    assert result.locals == {"context": "plum", "context_0": "plum"}
    after = repl.execute("print(context, seven, llm_query('a'), 'x' in globals())")
    assert after.stdout == "plum 7 A False\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.closerange(3, 100)",
    ],
)
def test_code_that_exits_process_is_reported(make_repl, code):
    repl = make_repl()
    assert "The REPL was started anew" in repl.execute(code).stderr
    assert repl.execute("print(1)").stdout == "1\n"


def test_memory_limit_gives_error_or_new_process(make_repl):
    repl = make_repl(memory_bytes=1 << 29)
    stderr = repl.execute("hog = [bytes(10**8) for _ in range(100)]").stderr
    assert "MemoryError" in stderr or "started anew" in stderr
    assert repl.execute("print(1)").stdout == "1\n"


def test_fork_in_code_keeps_single_repl(make_repl):
    repl = make_repl(lm_callback=shout)
    code = "import os\nx = 'child' if os.fork() == 0 else 'parent'\nif x == 'child': llm_query('a')\nelse: os.wait()"
    assert repl.execute(code).locals["x"] == "parent"
    assert repl.execute("print(x, llm_query('b'))").stdout == "parent B\n"


def test_given_sandbox_is_not_closed(make_repl):
    with make_sandbox() as sandbox:
        repl = make_repl(sandbox=sandbox)
        repl.execute("open('note.txt', 'w').write('plum')")
        repl.cleanup()
        assert sandbox.read("note.txt") == b"plum"


FORGE = """
import os, stat
def tell(line):
    for number in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode): os.write(number, line)
        except OSError: pass
"""


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"{}\n",
        b'["done", {}]\n',
        b'["done", {"stdout": 1, "stderr": "", "final_answer": null, "variables": []}]\n',
        b'["done", {"stdout": "", "stderr": "", "final_answer": null, "variables": [[{"list": 1}, true, 1]]}]\n',
        b'["call", "eval", ["1"], {}]\n',
        b'["call", "add", [{"dict": [[[], 1]]}], {}]\n',
        b'["call", "add", [{"pickle": "x"}], {}]\n',
        b"[" * 100_000 + b"\n",
        b"1" * 10_000 + b"\n",
        b"\xff\xfe\n",
        pytest.param(b"", id="a line without end"),
    ],
)
def test_forged_frames_only_end_process(make_repl, line):
    repl = make_repl(custom_tools={"add": lambda a, b: a + b})
    result = repl.execute(f"{FORGE}\ntell({line!r})" if line else f"{FORGE}\nwhile True: tell(b'x' * 65536)")
    assert ("The code broke the REPL" if line else "a line of more than") in result.stderr
    assert repl.execute("print(add(1, 2))").stdout == "3\n"


def test_only_offered_functions_can_be_called(make_repl):
    calls = []
    repl = make_repl(custom_tools={"add": calls.append})
    for name in ("_add_tool", "execute", "__init__", "cleanup"):
        frame = json.dumps(["call", name, ["x"], {}]).encode() + b"\n"
        assert "not offered" in repl.execute(f"{FORGE}\ntell({frame!r})").stderr
    assert calls == []


def test_unencodable_text_is_replaced(make_repl):
    asked = []

    def remember(prompts):
        asked.extend(prompts)
        return prompts

    repl = make_repl(lm_callback=remember)
    result = repl.execute("text = 'a\\ud800b'\nllm_query(text)\nFINAL_VAR('text')")
    assert (asked, result.final_answer, result.locals["text"]) == (["a?b"], "a?b", "a?b")


def test_host_is_not_visible(make_repl, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("plum")
    result = make_repl().execute(f"print(open({str(secret)!r}).read())")
    assert "plum" not in result.stdout
    assert "FileNotFoundError" in result.stderr or "PermissionError" in result.stderr


def test_process_starts_at_first_execution_and_ends_with_repl(make_repl):
    repl = make_repl(max_output=987_654_321)  # an argument of its process, to know it by
    assert not processes_with("987654321")
    repl.execute("import subprocess\nchild = subprocess.Popen(['sleep', '4321.5'])")
    assert processes_with("987654321")
    repl.cleanup()
    repl.cleanup()
    wait_until_exited("987654321")
    wait_until_exited("4321.5")
    with pytest.raises(ValueError, match="closed"):
        repl.execute("1")


def test_sixteen_at_once_do_not_mix(make_repl):
    repls = [make_repl(lm_callback=lambda prompts, n=number: [f"{n}!"] * len(prompts)) for number in range(16)]

    def work(number):
        repl = repls[number]
        repl.add_context(f"context {number}")
        outputs = []
        for turn in range(3):
            repl.execute(f"x = {number}")
            outputs.append(repl.execute(f"for i in range(50): print(x, context, llm_query('?'), {turn})").stdout)
        return outputs

    with ThreadPoolExecutor(16) as pool:
        for number, outputs in enumerate(pool.map(work, range(16))):
            assert outputs == [f"{number} context {number} {number}! {turn}\n" * 50 for turn in range(3)]


# The environment


@pytest.mark.parametrize("number", range(len(RLMEnv.examples())))
def test_examples_are_solvable(number):
    example = RLMEnv.examples()[number]
    turns = iter(example.oracle)
    result = run_episode(RLMEnv(None, example.extras), example.prompt, lambda _: next(turns))
    assert result.total_reward == 1.0
    assert result.metrics == {
        "turns_used": len(example.oracle),
        "final_value_set": True,
        "final_answer": example.extras["reward_spec"]["ground_truth"],
        "reward": 1.0,
    }


TRUTHS = ["plum", ["pear", "plum"], {"target": "plum"}, {"target": ["Plum"]}]  # one text or several


@pytest.mark.parametrize(
    "action, reward, extras",
    [
        ("I know it.\nFINAL(a plum)", 1.0, {}),
        ("FINAL(plum pear apple)", 0.0, {}),
        (block("x = 'plum'\nFINAL_VAR('x')") + "\nFINAL(pear)", 1.0, {}),  # the code's goes before the text's
        (block("x = 'pear'") + "\nFINAL(plum)\nFINAL_VAR(x)", 0.0, {}),
        *(("FINAL(The plum!)", 1.0, {"reward_spec": {"ground_truth": truth}}) for truth in TRUTHS),
        ("FINAL(anything)", 1.0, {"env_class": BaseRLMEnv}),
        ("FINAL( )", 0.0, {"env_class": BaseRLMEnv}),
    ],
)
def test_answer_ends_episode_and_is_graded(make_env, action, reward, extras):
    env, _ = make_env(**extras)
    output = env.step(action)
    assert (output["done"], output["reward"], output["observations"]) == (True, reward, [])
    assert "repl" in action or env.repl._process is None  # none is started without code
    again = env.step("FINAL(plum)")  # changes nothing
    assert (again["done"], again["reward"], env.turns) == (True, 0.0, 1)


@pytest.mark.parametrize(
    "action, says, extras",
    [
        (block("answer = llm_query('plum'); print(answer)"), "PLUM\n", {"lm_callback": shout}),
        (block("answer = llm_query('plum'); print(answer)"), "REPL variables: answer", {"lm_callback": shout}),
        (block("llm_query('plum')"), "NameError", {}),
        ("I wonder.", "```repl", {}),
        ("FINAL_VAR(missing)", "no variable missing", {}),
        (block("print(context['plum'])"), "[1, 2]", {"context": '{"plum": [1, 2]}'}),
        (block("print(type(context))"), "<class 'str'>", {"context": "[1, 2]"}),
        (block("print(context)"), QUESTION[0]["content"], {"extra_info": None}),  # the prompt is the default
    ],
)
def test_turn_without_answer_returns_observation(make_env, action, says, extras):
    env, messages = make_env(**extras)
    assert ("a dict with 1 keys" in messages[1]["content"]) == (extras.get("context") == '{"plum": [1, 2]}')
    output = env.step(action)
    assert (output["done"], output["reward"]) == (False, 0.0)
    assert says in text_of(output)
    assert env.step(block("answer = 'plum'") + "\nFINAL_VAR(answer)")["reward"] == 1.0


def test_first_messages_explain_queries_when_available(make_env):
    _, messages = make_env(context="x" * 1234)
    _, with_callback = make_env(lm_callback=shout)
    assert [message["role"] for message in messages] == ["system", "user", "user"]
    assert "1234 characters" in messages[1]["content"]
    assert QUESTION[0]["content"] in messages[2]["content"]
    assert "{custom_tools_section}" not in messages[0]["content"]
    assert "llm_query" not in messages[0]["content"] and "llm_query" in with_callback[0]["content"]


def test_out_of_turns_is_truncated_and_worth_nothing(make_env):
    env, _ = make_env(max_turns=2)
    first = env.step(block("print(1)"))
    assert "last turn" in text_of(first)
    output = env.step(block("print(2)"))
    assert (output["done"], output["truncated"], output["reward"], output["observations"]) == (True, True, 0.0, [])
    assert env.get_metrics() == {"turns_used": 2, "final_value_set": False, "final_answer": None, "reward": 0.0}


def test_long_output_is_cut(make_env):
    env, _ = make_env()
    content = env.step(block("print('x' * 50_000)"))["observations"][0]["content"]
    assert "(30001 more characters)" in content
    assert len(content) < 21_000


def test_forged_variable_report_does_not_end_episode(make_env):
    env, _ = make_env()
    report = {"stdout": "", "stderr": "", "final_answer": None, "variables": [[5, True, 1], ["NAME", True, 2]]}
    frame = json.dumps(["done", report]).encode() + b"\n"
    output = env.step(block(f"{FORGE}\ntell({frame!r}.replace(b'NAME', b'x' * 10**6))"))
    assert not output["done"]
    assert len(text_of(output)) < 10_000


def test_subclass_adds_and_explains_tools(make_env):
    class Library(BaseRLMEnv):
        def _get_system_prompt(self):
            return "Find the book. {custom_tools_section}"

        def _get_repl_tools(self):
            return {
                "words": {"tool": lambda: len(self._context.split()), "description": "number of words"},
                "shelf": "B7",
            }

    env, messages = make_env(env_class=Library)
    assert messages[0]["content"].startswith("Find the book.")
    assert "- words: number of words" in messages[0]["content"]
    assert "5 B7" in text_of(env.step(block("print(words(), shelf)")))


@pytest.mark.parametrize(
    "extras, message",
    [
        ({}, "reward_spec"),
        ({"reward_spec": {}}, "ground_truth"),
        ({"reward_spec": {"ground_truth": []}}, "reward_spec.ground_truth"),
        ({"reward_spec": {"ground_truth": 5}}, "reward_spec.ground_truth"),
        ({"reward_spec": {"ground_truth": "x"}, "extra_info": {"context_text": 5}}, "context_text"),
    ],
)
def test_invalid_row_is_named(extras, message):
    with pytest.raises(TaskError, match=message):
        skyrl_gym.make("rlm", env_config={}, extras=extras).init(QUESTION)


def test_ephemeral_turn_prompt_is_removed_from_shared_history(make_env):
    env, history = make_env(env_config={"ephemeral_turn_prompt": True})
    for _ in range(3):
        output = env.step(block("print(1)"))
        history += [{"role": "assistant", "content": "..."}, *output["observations"]]
    prompts = [message for message in history if "Question:" in message["content"]]
    assert len(prompts) == 1
    assert prompts == history[-1:]


def test_ephemeral_turn_prompt_raises_without_shared_history(make_env):
    env, _ = make_env(env_config={"ephemeral_turn_prompt": True})
    env.step(block("print(1)"))
    with pytest.raises(Error, match="ephemeral_turn_prompt"):
        env.step(block("print(2)"))


def test_close_ends_process_and_is_idempotent(make_env):
    env, _ = make_env()
    env.step(block("x = 1"))
    env.close()
    env.close()
    assert env.repl._process is None
    RLMEnv(None, {"reward_spec": {"ground_truth": "x"}}).close()  # one that never began


# Queries to a server


def asking(server, **settings):
    return {"base_url": server.base_url, "model": "small", "retry_seconds": 0.1, **settings}


def test_row_and_settings_enable_queries(monkeypatch):
    monkeypatch.setenv("SMALL_KEY", "secret")
    row = {"reward_spec": {"ground_truth": "plum"}, "extra_info": {"context_text": "the code word is plum"}}
    with ChatServer(lambda messages: messages[0]["content"].split()[-1], api_key="secret") as server:
        settings = asking(server, api_key_env="SMALL_KEY", max_tokens=7)
        with skyrl_gym.make("rlm", env_config=settings, extras=row) as env:
            messages, _ = env.init(list(QUESTION))
            assert "llm_query" in messages[0]["content"]
            assert env.step(block("word = llm_query(context)\nFINAL_VAR('word')"))["reward"] == 1.0
    assert server.requests == [
        {"max_tokens": 7, "model": "small", "messages": [{"role": "user", "content": "the code word is plum"}]}
    ]


def test_callback_overrides_server(make_env):
    with ChatServer(lambda messages: "from the server") as server:
        env, _ = make_env(env_config=asking(server), lm_callback=shout)
        assert "PLUM" in text_of(env.step(block("print(llm_query('plum'))")))
    assert server.requests == []


def test_query_batch_runs_two_at_a_time_in_order(make_env):
    model = TwoAtATime()
    with ChatServer(lambda messages: model(messages[0]["content"])) as server:
        env, _ = make_env(env_config=asking(server))
        assert "['0', '1', '2', '3', '4', '5']" in text_of(env.step(block("print(llm_query_batched(list('012345')))")))
    assert model.most == 2


def test_rejected_prompt_is_reported_to_code(make_env):
    def answer(messages):
        text = messages[0]["content"]
        return (400, {"error": "too long"}) if len(text) > 10 else text

    with ChatServer(answer) as server:
        env, _ = make_env(env_config=asking(server))
        told = text_of(env.step(block("print(llm_query_batched(['plum', 'x' * 100]))")))
    assert "['plum', 'Error: LM query failed - status 400" in told and "too long" in told


@pytest.mark.parametrize("fault", [(503, {"error": "no GPU"}), (401, {"error": "no such key"}), (200, b"<html>")])
def test_server_failure_raises_infra_error(make_env, fault):
    with ChatServer(lambda messages: fault) as server:
        env, _ = make_env(env_config=asking(server))
        with pytest.raises(InfraError, match=server.base_url):
            env.step(block("llm_query_batched(['plum'] * 50)"))
    assert len(server.requests) <= 4


def test_no_query_starts_after_deadline(make_env):
    def answer(messages):
        time.sleep(0.2)
        return "plum"

    with ChatServer(answer) as server:
        env, _ = make_env(env_config=asking(server), repl_timeout=1.0)
        told = text_of(env.step(block("words = llm_query_batched(['a'] * 100)")))
        assert "interrupted after 1 seconds" in told
    assert 2 <= len(server.requests) <= 14


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"base_url": "http://127.0.0.1:1"}, "base_url"),
        ({"model": "small"}, "base_url"),
        ({"repl_timout": 5}, "repl_timeout"),
    ],
)
def test_invalid_setting_is_named(settings, text):
    with pytest.raises(ValueError, match=text):
        RLMEnv(settings, {"reward_spec": {"ground_truth": "x"}})
