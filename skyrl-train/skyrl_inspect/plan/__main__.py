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

from skyrl_inspect.plan.changes import Overrides, as_text, smallest_change
from skyrl_inspect.plan.devices import DEVICES, Device, find_device, present_gpu
from skyrl_inspect.plan.memory import memory_plan, roles_of
from skyrl_inspect.plan.report import memory_lines, shape_lines, slow_step_warning, time_lines, undivided_lines
from skyrl_inspect.plan.shapes import shapes_of
from skyrl_inspect.plan.speed import measured_factors, step_time
from skyrl_train.config import SkyRLConfig, compose_config, validate_cfg
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.step_plan import step_plan
from skyrl_train.utils.run_folder import RunFolder


def main(arguments: list[str] | None = None) -> int:
    options, overrides = _parser().parse_known_args(arguments)
    unknown = [each for each in overrides if each.startswith("-")]
    try:
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]}; see --help. Settings of the run are written key=value")
        return _plan(options, overrides)
    except SkyRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.plan",
        description="Estimates memory, time and cost of a training run from its settings (key=value, as for "
        "skyrl_train.entrypoints.main_base), without weights and before anything starts.",
        epilog="Exit status: 0 if the run fits, 1 if not, 2 if it cannot be planned.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", metavar="NAME", help=f"device to plan for: cpu, {', '.join(DEVICES)}; default: this machine's"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="machines that there are; the run must need no more")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="devices of each (default 8)")
    parser.add_argument(
        "--config-file", action="append", default=[], metavar="[MODEL=]FILE",
        help="config.json of a model that is not in the hub's cache; without MODEL, of the policy",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="mean prompt, for the time (default: the longest)"
    )
    parser.add_argument(
        "--answer-tokens", type=int, metavar="N", help="mean answer, for the time (default: the longest)"
    )
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", help="prompts of the training set, for time and cost of the run"
    )
    parser.add_argument("--price-per-hour", type=float, metavar="X", help="price of a device and hour, for the cost")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="RUN",
        help="run folder whose times on the same kind of device correct the estimate",
    )
    return parser


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    device = _device(options.device)
    if device is not None:
        given = {each.partition("=")[0].lstrip("+~") for each in overrides}
        if "trainer.placement.device" not in given:
            overrides = [*overrides, f"trainer.placement.device={device.kind}"]
    cfg = composed(overrides)
    kind = cfg.trainer.placement.device
    device = device or (present_gpu() if kind == "cuda" else find_device("cpu"))
    if device.kind != kind:
        raise ConfigError(f"--device {device.name} contradicts trainer.placement.device={kind}; leave one of them out")
    notes = _assume_engine(cfg)
    if options.nodes is not None:
        check_nodes(cfg, options.nodes, options.gpus_per_node)
    files = _config_files(options.config_file, cfg)
    shapes = shapes_of(cfg, files)
    plan = memory_plan(cfg, shapes, device)
    division = step_plan(cfg, num_prompts=options.num_prompts)
    lengths: dict[str, Any] = dict(prompt_tokens=options.prompt_tokens, answer_tokens=options.answer_tokens)
    factors = None
    if options.measured is not None:
        factors = _factors(options.measured, device, files, lengths)
    time = step_time(cfg, shapes, device, plan.engine, factors=factors, **lengths)
    lines = [*shape_lines(cfg, shapes), "", *division.lines(), "", *memory_lines(plan)]
    if not plan.shortages:  # the time of a step that cannot be taken would be a number without meaning
        lines += ["", *time_lines(time, num_devices(cfg), options.price_per_hour, division.num_steps)]
    print("\n".join([*lines, *notes, *undivided_lines(cfg, shapes, plan)]))
    if not plan.shortages:
        print("\nfits" + slow_step_warning(time, plan.engine))
        return 0
    print("\ndoes not fit: " + "; ".join(plan.shortages))

    def check(change: Overrides) -> None:
        changed = composed([*overrides, *as_text(change).split()])
        if options.nodes is not None:
            check_nodes(changed, options.nodes, options.gpus_per_node)
        shapes_of(changed, files)

    found = smallest_change(cfg, shapes, device, check)
    if found is None:
        print("no change of up to four settings was found with which it fits; use more or larger devices")
    else:
        print(f"the smallest change with which it fits:\n  {as_text(found)}")
    return 1


def composed(overrides: Sequence[str]) -> SkyRLConfig:
    """Compose and check settings as `main_base` does.

    Raises:
        ConfigError: what a run would refuse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the run gives them
        return validate_cfg(compose_config(overrides))


def _device(name: str | None) -> Device | None:
    return None if name is None else find_device(name)


def _assume_engine(cfg: SkyRLConfig) -> list[str]:
    """Plan with vLLM where the settings leave the engine of GPUs open and this machine has none."""
    if (
        cfg.trainer.placement.device == "cuda"
        and not EngineRegistry.get_requirements(cfg.generator.backend).reserves_memory
        and cfg.generator.run_engines_locally
    ):
        cfg.generator.backend = "vllm"
        return ["engines are planned as vLLM, which generator.backend=auto takes where it is installed"]
    return []


def num_devices(cfg: SkyRLConfig) -> int:
    """Return the devices that a run takes."""
    placement, generator = cfg.trainer.placement, cfg.generator
    engines = generator.num_inference_engines * generator.engine_world_size if generator.run_engines_locally else 0
    sizes = {role: getattr(placement, f"{role}_world_size") for role in roles_of(cfg)}
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
    wanted = num_devices(cfg)
    for role in roles_of(cfg):
        each = getattr(placement, f"{role}_num_gpus_per_node")
        if each > gpus_per_node:
            raise ConfigError(
                f"trainer.placement.{role}_num_gpus_per_node={each} is more than the {gpus_per_node} devices of a "
                f"machine (--gpus-per-node): set it to {gpus_per_node}"
            )
    if wanted > there:
        raise ConfigError(
            f"the settings place the run on {wanted} devices (trainer.placement.*_num_nodes x *_num_gpus_per_node"
            f"{', and engines' if not placement.colocate_all else ''}), and --nodes {nodes} x --gpus-per-node "
            f"{gpus_per_node} has {there}: give fewer nodes in trainer.placement, or more with --nodes"
        )
    if wanted * 2 <= there:
        fitting = nodes * placement.policy_num_nodes // max(1, -(-wanted // gpus_per_node))
        print(
            f"the run takes {wanted} of {there} devices; to use all: trainer.placement.policy_num_nodes={fitting} and "
            "the nodes of the other models and generator.num_inference_engines in proportion"
        )


def _config_files(given: Sequence[str], cfg: SkyRLConfig) -> dict[str, str]:
    files = {}
    for each in given:
        model, equals, file = each.rpartition("=")
        files[model if equals else cfg.trainer.policy.model.path] = file
    used = {getattr(cfg.trainer, role).model.path for role in roles_of(cfg)}
    for model in files:
        if model not in used:
            raise ConfigError(
                f"--config-file {model}=…: no model of the run has this path; it has {', '.join(sorted(used))}"
            )
    return files


def _factors(folder: Path, device: Device, files: dict[str, str], lengths: dict[str, Any]) -> dict[str, float]:
    """Compare a run's own times with the estimate of its settings."""
    run = RunFolder(folder)
    if not run.config_path.is_file():
        raise ConfigError(f"--measured {folder} is no run folder: it has no {run.config_path.name}")
    import yaml

    cfg = SkyRLConfig.from_dict(yaml.safe_load(run.config_path.read_text()))
    _assume_engine(cfg)
    shapes = shapes_of(cfg, files)
    engine = memory_plan(cfg, shapes, device).engine
    return measured_factors(run, step_time(cfg, shapes, device, engine, **lengths))


if __name__ == "__main__":
    sys.exit(main())
