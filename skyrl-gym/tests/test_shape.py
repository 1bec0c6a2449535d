"""The shape of the package: imports point down, and names that users rely on are where they were."""

import ast
import importlib
from pathlib import Path

import pytest

import skyrl_gym
from skyrl_gym.envs.registration import env_class_of

PACKAGE = Path(skyrl_gym.__file__).parent

LAYERS = [
    {
        "arrow_nulls",
        "error",
        "core",
        "deadline",
        "finite_numbers",
        "tags",
        "suggestions",
        "syntax_trees",
        "valid_unicode",
        "waits",
        "whole_folders",
    },
    {"services"},
    {"chat_model"},
    {"envs.registration"},
    {"metrics"},
    {"tools.core", "tools.signature"},
    {"envs.base_text_env"},
    {"sandbox"},
    {"graders"},
    {"chat"},
    {"tools"},
    {"rubrics"},
    {"envs"},
    {"episode", "datasets"},
    {"wrappers", "check", "gymnasium_envs"},
    {"audit", "eval"},
    {"hubs"},
]
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}

PUBLIC_NAMES = {
    "skyrl_gym": [
        "Env",
        "check_env",
        "deregister",
        "envs",
        "error",
        "make",
        "pprint_registry",
        "register",
        "registry",
        "spec",
        "tools",
    ],
    "skyrl_gym.core": ["Env", "EnvStepOutput", "ObsType", "ActType"],
    "skyrl_gym.error": ["Error", "RegistrationError", "TaskError", "InfraError"],
    "skyrl_gym.metrics": ["aggregate_for_environment", "default_aggregate_metrics"],
    "skyrl_gym.envs": ["register", "deregister"],
    "skyrl_gym.envs.base_text_env": ["BaseTextEnv", "BaseTextEnvStepOutput", "MessageType", "ConversationType"],
    "skyrl_gym.envs.registration": ["EnvSpec", "register", "registry", "make", "spec", "load_env_creator"],
    "skyrl_gym.envs.aime.env": ["AIMEEnv"],
    "skyrl_gym.envs.aime.utils": ["compute_score", "normalize_final_answer", "last_boxed_only_string", "remove_boxed"],
    "skyrl_gym.envs.gsm8k.env": ["GSM8kEnv"],
    "skyrl_gym.envs.gsm8k.multi_turn_env": ["GSM8kMultiTurnEnv"],
    "skyrl_gym.envs.gsm8k.utils": ["extract_solution", "compute_score"],
    "skyrl_gym.envs.lcb.env": ["LCBEnv"],
    "skyrl_gym.envs.lcb.livecodebench": [
        "compute_score",
        "extract_code_from_model",
        "lcb_check_correctness",
        "run_test",
    ],
    "skyrl_gym.envs.search.env": ["SearchEnv", "SearchEnvConfig"],
    "skyrl_gym.envs.search.utils": ["extract_solution", "em_check", "subem_check", "normalize_answer", "compute_score"],
    "skyrl_gym.envs.searchcode.env": ["SearchCodeEnv"],
    "skyrl_gym.envs.sql.env": ["SQLEnv", "Text2SQLEnvConfig"],
    "skyrl_gym.envs.sql.utils": ["verify_format_and_extract", "compute_score_single"],
    "skyrl_gym.envs.llm_as_a_judge.env": ["GSM8kLLMJudgeEnv", "GSM8kLLMJudgeEnvConfig"],
    "skyrl_gym.envs.multiply.env": ["MultiplyEnv"],
    "skyrl_gym.envs.rlm.env": ["BaseRLMEnv"],
    "skyrl_gym.envs.rlm.repl": ["PersistentREPL", "REPLResult", "RESERVED_TOOL_NAMES"],
    "skyrl_gym.graders": ["Score", "Invalid", "Timeout", "InfraError"],
    "skyrl_gym.sandbox": ["Sandbox", "Limits", "ExecResult", "make_sandbox"],
    "skyrl_gym.tools": [
        "tool",
        "ToolGroup",
        "PythonCodeExecutorToolGroup",
        "SQLCodeExecutorToolGroup",
        "SearchToolGroup",
        "MCPToolGroup",
    ],
    "skyrl_gym.tools.search": ["call_search_api", "SearchToolGroup"],
    "skyrl_gym.tools.retrieval": ["RetrievalServer"],
}


def part_of(module: str) -> str | None:
    """The layer's name of a module of ours, given without the package's name."""
    pieces = module.split(".")
    for name in (".".join(pieces[:2]), pieces[0]):
        if name in LAYER_OF:
            return name
    return None


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports when it is imported (not those it imports later, inside functions)."""
    found = set()
    pending: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        pending += list(ast.iter_child_nodes(node))
    return {name.removeprefix("skyrl_gym.") for name in found if name.startswith("skyrl_gym.")}


def test_imports_point_down():
    upward = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if module == "__init__":
            continue
        own = part_of(module)
        assert own is not None, f"{module} is in no layer: add it to LAYERS"
        for imported in imports_of(path):
            other = part_of(imported)
            if other is not None and other != own and LAYER_OF[other] > LAYER_OF[own]:
                upward.append(f"{module} imports {imported}")
    assert not upward


def test_environments_do_not_import_each_other():
    """Each folder of `envs` can be read, copied or deleted alone (but for two that are a kind of another)."""
    crossing = []
    for path in sorted((PACKAGE / "envs").rglob("*/*.py")):
        own = path.relative_to(PACKAGE / "envs").parts[0]
        others = {name.split(".")[1] for name in imports_of(path) if name.startswith("envs.")}
        crossing += [f"{own} imports {other}" for other in others - {own, "base_text_env", "registration"}]
    assert set(crossing) == {"calculator imports arithmetic", "lcb imports code"}


@pytest.mark.parametrize("module", sorted(PUBLIC_NAMES))
def test_public_names_are_there(module):
    missing = [name for name in PUBLIC_NAMES[module] if not hasattr(importlib.import_module(module), name)]
    assert not missing


@pytest.mark.parametrize("env_id", sorted(skyrl_gym.registry))
def test_the_module_behind_every_id_exists(env_id):
    assert env_class_of(skyrl_gym.spec(env_id)) is not None
