"""The shape of the house: what may import what, what must stay cheap to import, and which names users rely on."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "skyrl-train" / "skyrl_train"

LAYERS = [
    {"errors", "types", "env_vars", "config", "library_versions"},
    {"training_batch", "expert_routes", "kept_tokens", "utils"},
    {"algorithms"},
    {"models", "distributed"},
    {"weight_sync"},
    {"inference_engines"},
    {"endpoint"},
    {"rollouts"},
    {"generators", "training_backends"},
    {"workers"},
    {"orchestration"},
    {
        "dataset",
        "evaluate",
        "checkpoints",
        "checkpoint_saver",
        "provenance",
        "run_record",
        "batch_preparation",
        "hooks",
        "step_plan",
        "memory_plan",
        "supervised",
    }
    | {"trainer", "training_run", "fully_async_trainer", "distillation_trainer", "teachers"},
    {"entrypoints", "report", "dashboard", "diff", "explain", "replay", "plan", "curve_bands"},
]
LAYERS = [{f"skyrl_train.{part}" for part in parts} for parts in LAYERS]
LEADS_UPWARD = "skyrl_train.utils.ppo_utils"
"""The door under its public name leads to the layer above it, and says so."""

INSPECT = REPOSITORY / "skyrl-train" / "skyrl_inspect"
INSPECT_LAYERS = [
    {"skyrl_inspect.defaults"},
    {"skyrl_inspect.plan", "skyrl_inspect.mismatch", "skyrl_inspect.simulate", "skyrl_inspect.curve_bands"}
    | {"skyrl_inspect.diff", "skyrl_inspect.explain", "skyrl_inspect.replay", "skyrl_inspect.diagnostics"},
    {"skyrl_inspect.dashboard"},
]

SERVER = REPOSITORY / "skyrl-tx" / "tx"
SERVER_LAYERS = [
    {"tx.errors", "tx.tinker.types", "tx.tinker.chunked_lists", "tx.tinker.file_limit"},
    {"tx.tinker.config", "tx.tinker.command_line", "tx.tinker.wire", "tx.tinker.base_model", "tx.tinker.texts"},
    {"tx.tinker.storage"},
    {"tx.tinker.backends"},
    {"tx.tinker.commands"},
    {"tx.tinker.engine"},
    {"tx.tinker.service"},
    {"tx.tinker.http"},
    {"tx.tinker.api"},
    {"tx.run", "tx.conformance", "tx.contract"},
]

AGENTS = REPOSITORY / "skyrl-agent" / "skyrl_agent"
AGENT_LAYERS = [
    {"skyrl_agent.types", "skyrl_agent.errors", "skyrl_agent.finish"},
    {"skyrl_agent.config", "skyrl_agent.integrations.base", "skyrl_agent.dotted_paths"},
    {"skyrl_agent.chat", "skyrl_agent.functional", "skyrl_agent.runtimes"},
    {"skyrl_agent.tools", "skyrl_agent.tasks"},
    {"skyrl_agent.agents", "skyrl_agent.dispatcher"},
    {"skyrl_agent.runner", "skyrl_agent.training_rows", "skyrl_agent.records", "skyrl_agent.datasets"},
    {"skyrl_agent.auto", "skyrl_agent.view", "skyrl_agent.integrations", "skyrl_agent.services", "skyrl_agent.testing"}
    | {"skyrl_agent.validate", "skyrl_agent.evaluate"},
]

GYM = REPOSITORY / "skyrl-gym" / "skyrl_gym"
GYM_LAYERS = [
    {
        "arrow_nulls",
        "call_arguments",
        "concurrency",
        "error",
        "core",
        "deadline",
        "finite_numbers",
        "tags",
        "suggestions",
        "syntax_trees",
    }
    | {"valid_unicode", "waits", "whole_folders"},
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
GYM_LAYERS = [{f"skyrl_gym.{part}" for part in parts} for parts in GYM_LAYERS]
MAY_IMPORT_THE_TRAINER = [
    (SERVER, ("tx.tinker.backends", "tx.run")),
    (AGENTS, ("skyrl_agent.integrations.skyrl_train",)),
    (GYM, ()),
]

PUBLIC_NAMES = {
    "skyrl_train.entrypoints.main_base": ["BasePPOExp", "config_dir", "validate_cfg"],
    "skyrl_train.utils": ["initialize_ray"],
    "skyrl_train.trainer": ["RayPPOTrainer"],
    "skyrl_train.fully_async_trainer": ["FullyAsyncRayPPOTrainer", "GeneratedOutputGroup"],
    "skyrl_train.generators.base": ["GeneratorInterface", "GeneratorInput", "GeneratorOutput", "TrajectoryID"],
    "skyrl_train.generators.skyrl_gym_generator": ["SkyRLGymGenerator"],
    "skyrl_train.inference_engines.base": ["InferenceEngineInterface", "InferenceEngineInput", "InferenceEngineOutput"],
    "skyrl_train.inference_engines.inference_engine_client": ["InferenceEngineClient"],
    "skyrl_train.training_batch": ["TensorBatch", "TrainingInputBatch", "TrainingOutputBatch"],
    "skyrl_train.utils.ppo_utils": [
        "register_policy_loss",
        "register_advantage_estimator",
        "PolicyLossRegistry",
        "AdvantageEstimatorRegistry",
        "compute_approx_kl",
    ],
    "skyrl_train.config": ["SkyRLConfig", "config_dir"],
    "skyrl_gym.tools.core": ["tool", "ToolGroup"],
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
    "skyrl_agent": ["AutoAgentRunner"],
    "skyrl_agent.agents.base": ["AgentRunner", "BaseTrajectory", "TrajectoryResult"],
    "skyrl_agent.agents.mapping": ["AGENT_GENERATOR_REGISTRY", "AGENT_TRAJECTORY_REGISTRY"],
    "skyrl_agent.agents.react": ["ReActAgent", "ReActTrajectory"],
    "skyrl_agent.agents.oh_codeact": ["OHCodeActAgent", "CodeActTrajectory"],
    "skyrl_agent.config.configuration_utils": ["TrajectoryConfig", "get_field_from_config"],
    "skyrl_agent.dispatcher.dispatchers": ["DISPATCHER_REGISTRY", "register_dispatcher"],
    "skyrl_agent.functional.utils": ["Transition", "transitions_to_training_data", "record_transition"],
    "skyrl_agent.functional.function_calling": [
        "convert_fncall_messages_to_non_fncall_messages",
        "convert_non_fncall_messages_to_fncall_messages",
        "FunctionCallValidationError",
    ],
    "skyrl_agent.functional.history": ["MessageHistory", "parse_tool_call"],
    "skyrl_agent.integrations.base": ["BACKEND_REGISTRY", "build_backend", "register_backend"],
    "skyrl_agent.tasks.general_react.utils": ["GeneralReactTask", "DummyReactTask"],
    "skyrl_agent.tasks.swebench.utils": ["SWEBenchTask"],
    "skyrl_agent.tasks.web_research_task": ["WebResearchTask"],
    "skyrl_agent.tools": ["TOOL_REGISTRY", "register_tool", "BaseTool"],
}


ENTRY_POINTS = ["main_base", "main_generate", "main_sft", "main_dpo", "serve"]


def imports_of(path: Path, package: str = "skyrl_train") -> set[str]:
    """Modules of a package that a file imports when it is imported."""
    return {name for name in iter_imports(path) if name.startswith(f"{package}.")}


def iter_imports(path: Path, for_types: bool = False) -> frozenset[str]:
    """Modules that a file imports when it is imported (not those it imports later, inside functions)."""
    at_run_time, by_type_checkers = read_imports(path)
    return at_run_time | by_type_checkers if for_types else at_run_time


@functools.cache  # seven tests read the files of a package
def read_imports(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Read the modules that a file imports at run time, and those below `TYPE_CHECKING`."""
    at_run_time: set[str] = set()
    by_type_checkers: set[str] = set()
    pending: list[tuple[ast.AST, set[str]]] = [(node, at_run_time) for node in ast.parse(path.read_text()).body]
    while pending:
        node, found = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found = by_type_checkers
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        pending += [(child, found) for child in ast.iter_child_nodes(node)]
    return frozenset(at_run_time), frozenset(by_type_checkers)


@functools.cache
def modules_of(package: Path) -> dict[str, Path]:
    """The files of a package, by their modules' names."""
    names = {path: path.relative_to(package).with_suffix("").parts for path in sorted(package.rglob("*.py"))}
    return {".".join([package.name, *parts]).removesuffix(".__init__"): path for path, parts in names.items()}


def part_of(module: str, parts: Iterable[str]) -> str | None:
    """Return the part with the longest name that fits a module."""
    return max((part for part in parts if module == part or module.startswith(f"{part}.")), key=len, default=None)


@pytest.mark.parametrize(
    "package, layers", [(PACKAGE, LAYERS), (SERVER, SERVER_LAYERS), (AGENTS, AGENT_LAYERS), (GYM, GYM_LAYERS)]
)
def test_modules_do_not_import_each_other_for_types(package, layers):
    parts = set().union(*layers)
    edges = {
        (part_of(module, parts), part_of(name, parts))
        for module, path in modules_of(package).items()
        if module != LEADS_UPWARD
        for name in iter_imports(path, for_types=True)
    }
    assert not [(a, b) for a, b in edges if a and b and a < b and (b, a) in edges]


@pytest.mark.parametrize(
    "package, layers",
    [(PACKAGE, LAYERS), (INSPECT, INSPECT_LAYERS), (SERVER, SERVER_LAYERS), (AGENTS, AGENT_LAYERS), (GYM, GYM_LAYERS)],
)
def test_imports_point_down(package, layers):
    """Parts are modules or packages; the longest name that fits a module is its part."""
    layer_of = {part: number for number, parts in enumerate(layers) for part in parts}
    upward = []
    for module, path in modules_of(package).items():
        own = part_of(module, layer_of)
        if own is None:
            assert path.name == "__init__.py", f"{module} is in no layer: add it"
        elif module != LEADS_UPWARD:
            others = {imported: part_of(imported, layer_of) for imported in imports_of(path, package.name)}
            upward += [
                f"{module} imports {name}" for name, part in others.items() if part and layer_of[part] > layer_of[own]
            ]
    assert not upward


def test_environments_do_not_import_each_other():
    """Each folder of `envs` can be read, copied or deleted alone, except two that extend another."""
    crossing = set()
    for path in (GYM / "envs").rglob("*/*.py"):
        own = path.relative_to(GYM / "envs").parts[0]
        others = {name.split(".")[2] for name in imports_of(path, "skyrl_gym.envs")}
        crossing |= {f"{own} imports {other}" for other in others - {own, "base_text_env", "registration"}}
    assert crossing == {"calculator imports arithmetic", "lcb imports code"}


@pytest.mark.parametrize("package, except_in", MAY_IMPORT_THE_TRAINER)
def test_few_modules_import_trainer(package, except_in):
    importers = [name for name, path in modules_of(package).items() if imports_of(path)]
    assert [name for name in importers if not name.startswith(except_in)] == []


def test_conformance_suite_and_server_are_independent():
    for path in (SERVER.parent / "tx_conformance").rglob("*.py"):
        assert not {name for name in iter_imports(path) if re.match(r"(tx|skyrl_\w+)(\.|$)", name)}, path
    for path in SERVER.rglob("*.py"):
        assert "tx_conformance" not in {name.partition(".")[0] for name in iter_imports(path)}, path


@pytest.mark.parametrize(
    ("package", "may_import"), [("skyrl_train_testing", ()), ("skyrl_inspect", (SERVER / "run", INSPECT))]
)
def test_runtime_packages_import_neither_test_kit_nor_inspection(package, may_import):
    """The trainer names default hooks of `skyrl_inspect` in a setting; it works without the package."""
    for root in (PACKAGE, INSPECT, SERVER, AGENTS, GYM):
        for path in root.rglob("*.py"):
            if not any(path.is_relative_to(folder) for folder in may_import):
                assert package not in {name.partition(".")[0] for name in iter_imports(path)}, path


def test_no_circular_imports():
    graph = {name: imports_of(path) for name, path in modules_of(PACKAGE).items()}
    state: dict[str, str] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if state.get(name) == "done" or name not in graph:
            return
        assert name not in trail, f"a cycle: {' -> '.join([*trail, name])}"
        for other in graph[name]:
            if other != name:
                visit(other, (*trail, name))
        state[name] = "done"

    for name in graph:
        visit(name, ())


IMPORTED_BY_NAME = [
    "skyrl_train.algorithms.advantages",
    "skyrl_train.algorithms.losses",
    "skyrl_train.inference_engines.native.engine",
    "skyrl_train.inference_engines.native.registration",
    "skyrl_train.orchestration.inline_launcher",
    "skyrl_train.training_backends.fsdp2.backend",
]
"""Modules of a run in one process that registries import, at the first look-up."""


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_entry_points_import_no_ray(entry_point):
    """A run in one process (`trainer.placement.launcher=inline`) has no use for it."""
    pending, seen = [f"skyrl_train.entrypoints.{entry_point}", *IMPORTED_BY_NAME], set()
    while pending:
        module = pending.pop()
        path = PACKAGE.parent.joinpath(*module.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if module in seen or not file.exists():
            continue
        seen.add(module)
        assert "ray" not in {name.partition(".")[0] for name in iter_imports(file)}, f"{module} imports ray"
        pending += imports_of(file)
    assert len(seen) > 50


UNUSED = "ray vllm deepspeed peft sklearn scipy pandas datasets wandb mlflow"
"""Left to the settings that ask for them, or to nobody: each costs a process up to a second of processor time."""

IMPORTED_IN_TURN = {
    "skyrl_train.config": f"{UNUSED} torch transformers hydra skyrl_gym",
    "skyrl_train.algorithms.losses": f"{UNUSED} transformers hydra skyrl_gym",
    # The driver and what it serves: models are in processes of their own.
    "skyrl_train.entrypoints.main_base": f"{UNUSED} transformers.modeling_utils torch.distributed.tensor torch._dynamo",
    "skyrl_train.inference_engines.remote.vllm": f"{UNUSED} transformers.modeling_utils",
    # A rank, and an engine.
    "skyrl_train.workers.policy_worker": UNUSED,
    "skyrl_train.training_backends.fsdp2.backend": UNUSED,
    "skyrl_train.inference_engines.native.engine": UNUSED,
    "tx.tinker.engine.main": "sqlmodel sqlalchemy",
}
"""Modules with what neither they nor those before them may import."""


RECORD_IMPORTS = """
import importlib, sys


class Recorder:
    # Sees imports that fail too: a package that is not installed here costs its second where it is.
    asked = set()

    def find_spec(self, name, path=None, target=None):
        if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":  # no mere look whether it is installed
            self.asked.add(name)


sys.meta_path.insert(0, Recorder())
for module, unwanted in {modules!r}.items():
    importlib.import_module(module)
    if found := set(unwanted.split()) & Recorder.asked:
        print(module, "imports", *sorted(found))
"""


def imports_in_turn(modules: dict[str, str], path: Path = REPOSITORY) -> str:
    """Import modules in a process. Returns: lines `MODULE imports UNWANTED …`.

    Args:
        modules: names with what they may not import.
    """
    program = RECORD_IMPORTS.replace("{modules!r}", repr(modules))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120, cwd=path
    ).stdout


def test_run_processes_import_only_required_modules():
    assert not imports_in_turn(IMPORTED_IN_TURN)


def test_imports_of_missing_packages_are_detected(tmp_path: Path):
    looks = "from importlib.util import find_spec\nfind_spec('absent_one')\n"
    (tmp_path / "tries_absent.py").write_text(looks + "try:\n    import absent_two.part\nexcept ImportError: pass\n")
    unwanted = {"tries_absent": "absent_one absent_two json.tool"}
    assert imports_in_turn(unwanted, tmp_path) == "tries_absent imports absent_two\n"


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_exist(module):
    loaded = importlib.import_module(module)
    missing = [name for name in PUBLIC_NAMES[module] if not hasattr(loaded, name)]
    assert not missing


def test_main_loop_fits_on_page():
    tree = ast.parse((PACKAGE / "trainer.py").read_text())
    [train] = [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) and node.name == "train"]
    assert train.end_lineno is not None
    assert train.end_lineno - train.lineno < 60
