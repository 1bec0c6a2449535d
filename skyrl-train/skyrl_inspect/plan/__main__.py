"""`python -m skyrl_train.plan key=value … --device h100-80`: memory, time and cost of a run before it starts.

Takes the overrides of `skyrl_train.entrypoints.main_base` and composes them alike. Reads the models' config.json and no
weights. Exit status: 0 the run fits, 1 it does not, 2 it cannot be planned.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_inspect.plan.changes import Overrides, find_smallest_change, format_overrides
from skyrl_inspect.plan.report import format_memory, format_shapes, format_slow_step, format_times, format_undivided
from skyrl_inspect.plan.speed import measure_factors, step_time
from skyrl_train.config import SkyRLConfig, compose_config, validate_cfg
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.memory_plan.decisions import decide_memory
from skyrl_train.memory_plan.devices import DEVICES, Device, find_device, find_gpu
from skyrl_train.memory_plan.memory import estimate_memory, list_roles
from skyrl_train.memory_plan.shapes import load_shapes
from skyrl_train.step_plan import step_plan
from skyrl_train.utils.run_folder import RunFolder


def main(arguments: list[str] | None = None) -> int:
    options, overrides = _build_parser().parse_known_args(arguments)
    unknown = [each for each in overrides if each.startswith("-")]
    try:
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]}; see --help. Settings of the run are written key=value")
        return _plan(options, overrides)
    except SkyRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.plan",
        description="Estimate memory, time and cost of a training run from its settings (key=value, as for "
        "skyrl_train.entrypoints.main_base), before it starts and without loading weights.",
        epilog="Exit status: 0 if the run fits, 1 if not, 2 if it cannot be planned.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", metavar="NAME", help=f"device to plan for: cpu, {', '.join(DEVICES)}; default: this machine's"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of available machines, the maximum for the run")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="devices per machine (default 8)")
    parser.add_argument(
        "--config-file", action="append", default=[], metavar="[MODEL=]FILE",
        help="config.json of a model that is not in the hub cache; without MODEL, of the policy",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="mean prompt length for time estimates (default: the maximum)"
    )
    parser.add_argument(
        "--answer-tokens", type=int, metavar="N", help="mean response length for time estimates (default: the maximum)"
    )
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", help="number of training prompts, for time and cost of the run"
    )
    parser.add_argument("--price-per-hour", type=float, metavar="X", help="price per device and hour, for the cost")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="RUN",
        help="run folder whose measured times on the same kind of device correct the estimate",
    )
    return parser


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    device = _find_device(options.device)
    if device is not None:
        given = {each.partition("=")[0].lstrip("+~") for each in overrides}
        if "trainer.placement.device" not in given:
            overrides = [*overrides, f"trainer.placement.device={device.kind}"]
    cfg = compose_settings(overrides)
    kind = cfg.trainer.placement.device
    device = device or (find_gpu() if kind == "cuda" else find_device("cpu"))
    if device.kind != kind:
        raise ConfigError(f"--device {device.name} contradicts trainer.placement.device={kind}; remove one of them")
    notes = _set_default_engine(cfg)
    if options.nodes is not None:
        check_nodes(cfg, options.nodes, options.gpus_per_node)
    files = _parse_config_files(options.config_file, cfg)
    shapes = load_shapes(cfg, files)
    decision = decide_memory(cfg, shapes, device)
    plan = estimate_memory(decision.apply(cfg), shapes, device)
    division = step_plan(cfg, num_prompts=options.num_prompts)
    lengths: dict[str, Any] = dict(prompt_tokens=options.prompt_tokens, answer_tokens=options.answer_tokens)
    factors = None
    if options.measured is not None:
        factors = _measure_factors(options.measured, device, files, lengths)
    time = step_time(cfg, shapes, device, plan.engine, factors=factors, **lengths)
    lines = [*format_shapes(cfg, shapes), "", *division.lines(), "", *format_memory(plan)]
    if decision.reasons:
        lines.append(str(decision))
    if not plan.shortages:  # the time of a step that cannot be taken would be a number without meaning
        lines += ["", *format_times(time, count_devices(cfg), options.price_per_hour, division.num_steps)]
    print("\n".join([*lines, *notes, *format_undivided(cfg, shapes, plan)]))
    if not plan.shortages:
        print("\nfits" + format_slow_step(time, plan.engine))
        return 0
    print("\ndoes not fit: " + "; ".join(plan.shortages))

    def check(change: Overrides) -> None:
        changed = compose_settings([*overrides, *format_overrides(change).split()])
        if options.nodes is not None:
            check_nodes(changed, options.nodes, options.gpus_per_node)
        load_shapes(changed, files)

    found = find_smallest_change(cfg, shapes, device, check)
    if found is None:
        print("no change of up to four settings makes it fit; use more or larger devices")
    else:
        print(f"the smallest change that makes it fit:\n  {format_overrides(found)}")
    return 1


def compose_settings(overrides: Sequence[str]) -> SkyRLConfig:
    """Compose and check settings as `main_base` does.

    Raises:
        ConfigError: what a run would refuse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the run gives them
        return validate_cfg(compose_config(overrides))


def _find_device(name: str | None) -> Device | None:
    return None if name is None else find_device(name)


def _set_default_engine(cfg: SkyRLConfig) -> list[str]:
    """Plan with vLLM where the settings leave the engine of GPUs open and this machine has none."""
    if (
        cfg.trainer.placement.device == "cuda"
        and not EngineRegistry.get_requirements(cfg.generator.backend).reserves_memory
        and cfg.generator.run_engines_locally
    ):
        cfg.generator.backend = "vllm"
        return ["engines are planned as vLLM, which generator.backend=auto selects if it is installed"]
    return []


def count_devices(cfg: SkyRLConfig) -> int:
    """Return the devices that a run takes."""
    placement, generator = cfg.trainer.placement, cfg.generator
    engines = generator.num_inference_engines * generator.engine_world_size if generator.run_engines_locally else 0
    sizes = {role: getattr(placement, f"{role}_world_size") for role in list_roles(cfg)}
    if placement.colocate_all:
        return max(engines, *sizes.values())
    if placement.colocate_policy_ref and "ref" in sizes:
        sizes["policy"] = max(sizes["policy"], sizes.pop("ref"))
    return engines + sum(sizes.values())


def check_nodes(cfg: SkyRLConfig, nodes: int, gpus_per_node: int) -> None:
    """Check that a run needs no more than the machines that there are.

    Raises:
        ConfigError: it does; names the settings.
    """
    placement, there = cfg.trainer.placement, nodes * gpus_per_node
    wanted = count_devices(cfg)
    for role in list_roles(cfg):
        each = getattr(placement, f"{role}_num_gpus_per_node")
        if each > gpus_per_node:
            raise ConfigError(
                f"trainer.placement.{role}_num_gpus_per_node={each} is more than the {gpus_per_node} devices of a "
                f"machine (--gpus-per-node): set it to {gpus_per_node}"
            )
    if wanted > there:
        raise ConfigError(
            f"the settings place the run on {wanted} devices (trainer.placement.*_num_nodes x "
            f"*_num_gpus_per_node{', and engines' if not placement.colocate_all else ''}), and --nodes {nodes} x "
            f"--gpus-per-node {gpus_per_node} has {there}: lower the nodes in trainer.placement, or raise --nodes"
        )
    if wanted * 2 <= there:
        fitting = nodes * placement.policy_num_nodes // max(1, -(-wanted // gpus_per_node))
        print(
            f"the run takes {wanted} of {there} devices; to use all: trainer.placement.policy_num_nodes={fitting} and "
            "the nodes of the other models and generator.num_inference_engines in proportion"
        )


def _parse_config_files(given: Sequence[str], cfg: SkyRLConfig) -> dict[str, str]:
    files = {}
    for each in given:
        model, equals, file = each.rpartition("=")
        files[model if equals else cfg.trainer.policy.model.path] = file
    used = {getattr(cfg.trainer, role).model.path for role in list_roles(cfg)}
    for model in files:
        if model not in used:
            raise ConfigError(
                f"--config-file {model}=…: no model of the run has this path; it has {', '.join(sorted(used))}"
            )
    return files


def _measure_factors(folder: Path, device: Device, files: dict[str, str], lengths: dict[str, Any]) -> dict[str, float]:
    """Compare a run's own times with the estimate of its settings."""
    run = RunFolder(folder)
    if not run.config_path.is_file():
        raise ConfigError(f"--measured {folder} is not a run folder: it has no {run.config_path.name}")
    import yaml

    cfg = SkyRLConfig.from_dict(yaml.safe_load(run.config_path.read_text()))
    _set_default_engine(cfg)
    shapes = load_shapes(cfg, files)
    engine = estimate_memory(cfg, shapes, device).engine
    return measure_factors(run, step_time(cfg, shapes, device, engine, **lengths))


if __name__ == "__main__":
    sys.exit(main())
