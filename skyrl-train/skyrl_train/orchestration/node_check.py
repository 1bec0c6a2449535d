"""Check before the first step that all nodes of a run see the same files: run folder, models, data.

The driver writes a token into each shared folder. A task on every node reads it, writes a file next to it, and lists
the model's files. On a single node nothing is done.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from loguru import logger
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.config import SkyRLConfig
from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.errors import ConfigError
from skyrl_train.orchestration.bundles import nodes_of_run
from skyrl_train.utils.io import compute_sha256, expand_path
from skyrl_train.utils.nodes import get_node_name
from skyrl_train.utils.ray_calls import Call, gather_results
from skyrl_train.utils.storage import Place, get_size, list_names, location, read_text, replace_file

Listing = dict[str, str]
"""Files by name, each described by its size, the model's config.json by its hash as well."""

_HASHED = "config.json"
_MOST_NAMED = 3


@dataclass(frozen=True)
class Paths:
    """Paths to compare, keyed by the setting of each.

    Args:
        tokens: one file in each folder that the run writes to.
        models: folders or files that processes on every node read.
        data: files that the driver reads, and environments may.
    """

    tokens: dict[str, Place] = field(default_factory=dict)
    models: dict[str, Path] = field(default_factory=dict)
    data: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeView:
    """Files visible to one node: the text of each token (None: missing), the listing of each model and data file (None:
    missing), and errors of writing the response files."""

    node: str
    tokens: dict[str, str | None]
    models: dict[str, Listing | None]
    data: dict[str, Listing | None]
    write_errors: dict[str, str]


async def check_nodes(cfg: SkyRLConfig, data: Sequence[str], log_folder: Path) -> None:
    """Check that every node with processes of this run sees the driver's files.

    Args:
        data: names of datasets; names that are not files on this machine are ignored.

    Raises:
        ConfigError: a node does not. The message names node, setting and path.
    """
    own = ray.get_runtime_context().get_node_id()
    names = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes()}
    others = [node for node in nodes_of_run() if node != own]
    if not others:
        return
    token = secrets.token_hex(8)
    paths = paths_of(cfg, data, token)
    for path in paths.tokens.values():
        replace_file(path, token)
    try:
        calls = [
            Call(
                _get_node_view(node).remote(paths, node, names[node]),
                f"the file check on node {names[node]}",
                str(log_folder),
            )
            for node in others
        ]
        views = await gather_results(calls, scheduling_timeout_seconds(), "SKYRL_RAY_PG_TIMEOUT_IN_S")
        here = view_of(paths, own, get_node_name())
        problems = [
            problem
            for node, view in zip(others, views, strict=True)
            for problem in problems_of(here, view, paths, node)
        ]
        remarks = [remark for view in views for remark in differences(here.data, view.data, paths.data, view.node)]
    finally:
        for path in paths.tokens.values():
            for name in list_names(path.parent):
                if name.startswith(path.name):
                    (path.parent / name).unlink()
    for remark in remarks:
        logger.warning(f"{remark} (only the driver reads data, so this affects only environments)")
    if problems:
        raise ConfigError(
            "nodes of this run see different files:\n  " + "\n  ".join(problems) + "\nPut the run folder and "
            "the models on a file system that every node mounts under the same path"
        )
    logger.info(f"{len(others) + 1} nodes see the same run folder and models")


def _get_node_view(node: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(view_of).options(num_cpus=0, max_retries=0, scheduling_strategy=there)


def paths_of(cfg: SkyRLConfig, data: Sequence[str], token: str) -> Paths:
    """Return the paths that must be equal on all nodes, with a token file in each folder."""
    trainer = cfg.trainer
    folders: dict[str, Place] = {
        "trainer.run_dir": expand_path(trainer.run_dir),
        "trainer.ckpt_path": location(trainer.ckpt_path),
        "trainer.export_path": location(trainer.export_path),
    }
    if cfg.generator.weight_sync_strategy in ("checkpoint", "adapter"):
        folders["generator.weight_sync_directory"] = expand_path(cfg.generator.weight_sync_directory)
    outer = {
        name: folder
        for name, folder in folders.items()
        if name == "trainer.run_dir" or not str(folder).startswith(f"{folders['trainer.run_dir']}/")
    }
    models = {"trainer.policy.model.path": trainer.policy.model.path}
    if trainer.critic.model.path is not None:
        models["trainer.critic.model.path"] = trainer.critic.model.path
    if trainer.algorithm.uses_reference_model:
        models["trainer.ref.model.path"] = trainer.ref.model.path
    return Paths(
        tokens={name: folder / f".node_check_{token}" for name, folder in outer.items()},
        models={name: path for name, text in models.items() if (path := Path(text).expanduser().absolute()).exists()},
        data={f"data {text}": path for text in data if (path := Path(text).expanduser().absolute()).is_file()},
    )


def view_of(paths: Paths, node_id: str, node: str) -> NodeView:
    """Return the files visible on this machine, after writing a response file next to each visible token."""
    tokens: dict[str, str | None] = {}
    errors: dict[str, str] = {}
    for name, path in paths.tokens.items():
        tokens[name] = None
        try:
            tokens[name] = read_text(path) if get_size(path) is not None else None
            if tokens[name] is not None:
                replace_file(get_response_path(path, node_id), "seen")
        except (OSError, ConfigError) as error:
            errors[name] = str(error)
    models = {name: listing(path) for name, path in paths.models.items()}
    return NodeView(node, tokens, models, {name: listing(path) for name, path in paths.data.items()}, errors)


def get_response_path(token_path: Place, node_id: str) -> Place:
    """Return the path of a node's response file for a token."""
    return token_path.with_name(f"{token_path.name}.{node_id}")


def listing(path: Path) -> Listing | None:
    """Return the files of a folder (or one file) with their sizes; None if the path does not exist."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = {
        str(file.relative_to(path if path.is_dir() else path.parent)): f"{file.stat().st_size} bytes" for file in files
    }
    if _HASHED in found:
        found[_HASHED] += f", sha256 {compute_sha256(path / _HASHED)[:12]}"
    return found


def problems_of(here: NodeView, there: NodeView, paths: Paths, node_id: str) -> list[str]:
    """Return the reasons why a run cannot use a node, one line each.

    Args:
        here: the driver's view. It must also contain the node's response files.
    """
    problems = []
    for name, path in paths.tokens.items():
        if name in there.write_errors:
            problems.append(f"node {there.node} cannot write into {name}={path.parent}: {there.write_errors[name]}")
        elif there.tokens[name] != here.tokens[name] or get_size(get_response_path(path, node_id)) is None:
            problems.append(
                f"node {there.node} has a different folder, or none, at {name}={path.parent} than node {here.node}"
            )
    return problems + differences(here.models, there.models, paths.models, there.node)


def differences(
    here: Mapping[str, Listing | None], there: Mapping[str, Listing | None], paths: Mapping[str, Path], node: str
) -> list[str]:
    """Return one line for each path that differs between a node and the driver."""
    lines = []
    for name, path in paths.items():
        if there[name] is None:
            lines.append(f"node {node} cannot see {name}={path}")
        elif there[name] != here[name]:
            expected, found = here[name] or {}, there[name] or {}
            other = [file for file in sorted(expected | found) if expected.get(file) != found.get(file)]
            parts = [
                f"{file}: {found.get(file, 'absent')} there, {expected.get(file, 'absent')} here" for file in other
            ]
            more = f" and {len(other) - _MOST_NAMED} more" if len(other) > _MOST_NAMED else ""
            lines.append(f"node {node} sees different files at {name}={path}: {'; '.join(parts[:_MOST_NAMED])}{more}")
    return lines
