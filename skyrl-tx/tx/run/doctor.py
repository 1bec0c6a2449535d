"""`tx doctor`: what a server needs of this machine, looked at one by one, with what to do about the rest."""

import importlib.metadata
import importlib.util
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from skyrl_train.errors import ConfigError as TrainerConfigError
from tx.errors import ConfigError
from tx.run.integrity import Finding, check_integrity
from tx.tinker.api import open_socket
from tx.tinker.backends.build import check_backend, extract_training_settings
from tx.tinker.base_model import read_base_model
from tx.tinker.command_line import read_config
from tx.tinker.config import EngineConfig
from tx.tinker.file_limit import FEW, raise_file_limit
from tx.tinker.http.api_keys import read_api_keys
from tx.tinker.http.connections import compute_connection_limit
from tx.tinker.service.run_folders import run_folders
from tx.tinker.storage.database import Database
from tx.tinker.storage.db_models import SCHEMA_VERSION
from tx.tinker.storage.folders import Folders, remove_local_scheme

INTEGRITY = "--integrity"
"""Option of this command alone: read all files of the (stopped) server."""
SDK_VERSIONS = ((0, 16, 1), (0, 38, 0))
"""Oldest and newest version of the tinker SDK that the server is tested with."""
LITTLE_DISK_GB = 2


def main(argv: Sequence[str]) -> int:
    """Print the table. Returns 1 if a server would not start or its files are damaged, 2 for invalid options."""
    reads_all, argv = INTEGRITY in argv, [word for word in argv if word != INTEGRITY]
    try:
        # Without a model everything else can be looked at all the same.
        named = "TX_BASE_MODEL" in os.environ or any(word.split("=")[0] == "--base-model" for word in argv)
        config = read_config(argv if named or "--help" in argv else [*argv, "--base-model", _NO_MODEL])
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    findings = [*examine(config), *(check_integrity(config) if reads_all else ())]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict:5}  {finding.subject:{width}}  {finding.text}")
    return 1 if any(finding.verdict == "wrong" for finding in findings) else 0


_NO_MODEL = "-"


def examine(config: EngineConfig) -> Iterator[Finding]:
    """Return all findings, in the order in which a server would hit them."""
    yield _check_python()
    yield _check_torch()
    yield _run_check(
        "API keys", lambda: f"{'keys are set' if read_api_keys(config) else 'none needed'} for --host {config.host}"
    )
    yield _run_check("backend", lambda: _check_backend(config))
    yield _check_base_model(config)
    yield from _check_memory(config)
    yield _run_check("port", lambda: _check_port(config))
    yield _run_check("state folder", lambda: _check_writable(config.state_folder))
    yield _run_check("checkpoints", lambda: _check_checkpoints(config))
    yield _run_check("database", lambda: _check_database(config))
    yield _check_disk(config)
    yield _run_folders(config)
    yield _open_files()
    yield _check_sdk()


def _run_check(subject: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, "ok", look())
    except (ConfigError, OSError) as error:
        return Finding(subject, "wrong", str(error))


def _check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info < (3, 13):
        return Finding("Python", "ok", version)
    return Finding("Python", "wrong", f"{version}; use 3.11 or 3.12")


def _check_torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "wrong", "not installed; see INSTALL.md for the build that suits this machine")
    import torch  # heavy

    if torch.cuda.is_available():
        return Finding("torch", "ok", f"{torch.__version__}, {torch.cuda.get_device_name(0)}")
    if shutil.which("nvidia-smi"):
        text = (
            f"{torch.__version__} finds no GPU, although this machine has nvidia-smi; install the CUDA build of torch"
        )
        return Finding("torch", "note", text)
    return Finding("torch", "ok", f"{torch.__version__}, on the CPU")


def _check_backend(config: EngineConfig) -> str:
    check_backend(config)
    return config.backend


def _check_base_model(config: EngineConfig) -> Finding:
    if config.base_model == _NO_MODEL:
        return Finding("base model", "note", "not checked; set --base-model NAME_OR_DIR")
    if not Path(config.base_model).expanduser().is_dir():
        text = f"{config.base_model} is not a local folder; the server downloads it from the hub at startup"
        return Finding("base model", "note", text)
    try:
        facts = read_base_model(config.base_model)
    except ConfigError as error:
        return Finding("base model", "wrong", str(error))
    text = f"{facts.architecture}, vocabulary {facts.vocab_size:,}, context {facts.max_context:,}"
    if facts.tokenizer_id is None:
        return Finding("base model", "note", f"{text}; no tokenizer, so clients need their own")
    if not list(facts.folder.glob("*.safetensors")):
        return Finding("base model", "wrong", f"{facts.folder} has no *.safetensors; save the model in this format")
    return Finding("base model", "ok", text)


def _check_memory(config: EngineConfig) -> Iterator[Finding]:
    """Compare free memory with the CPU weights of the `torch` backend: the model (plus a sharded copy when several
    processes train) and the packed copy of the linear layers used for sampling.
    """
    folder = Path(config.base_model).expanduser()
    files = list(folder.glob("*.safetensors"))
    if config.backend != "torch" or not files:
        return
    import torch  # heavy, like the imports below

    from tx.tinker.backends.torch.settings import DTYPES, TrainingSettings

    try:
        settings = TrainingSettings.from_dict(extract_training_settings(config.backend_config))
        facts = read_base_model(config.base_model)
    except (ConfigError, TrainerConfigError):
        return  # a finding of its own, or an error of the server's start
    if not settings.device.startswith("cpu"):
        return
    shapes, damaged = _read_shapes(files)
    if damaged:
        yield from damaged
        return
    total = packed = 0
    for name, shape in shapes:
        is_table = shape[:1] == [facts.vocab_size] and "head" not in name and not facts.tied_embeddings
        total += math.prod(shape)
        packed += math.prod(shape) if len(shape) == 2 and ".experts." not in name and not is_table else 0
    size = torch.finfo(DTYPES[settings.dtype or "float32"]).bits // 8
    weights, copies = size * total * (1 if settings.num_processes == 1 else 2) / 1e9, size * packed / 1e9
    free = psutil.virtual_memory().available / 1e9
    text = f"weights take {weights:,.1f} GB and their packed copy {copies:,.1f} of the {free:,.1f} GB of free memory"
    if weights + copies < free:
        yield Finding("memory", "ok", text)
    else:
        fix = "; serve a smaller model" + ("" if size == 2 else ', or --backend-config \'{"dtype": "bfloat16"}\'')
        yield Finding("memory", "note", text + fix)


def _read_shapes(files: Sequence[Path]) -> tuple[list[tuple[str, list[int]]], list[Finding]]:
    """Read name and shape of each tensor from the files' headers. Returns: them, and a finding for each other file."""
    from safetensors import SafetensorError, safe_open

    shapes, damaged = [], []
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                shapes += [(name, file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118  # no mapping
        except (OSError, SafetensorError) as error:
            text = f"{path} cannot be read ({error}): it may be an incomplete download or a git-lfs pointer"
            damaged.append(Finding("weights", "wrong", f"{text}; download the file again (`git lfs pull`)"))
    return shapes, damaged


def _check_port(config: EngineConfig) -> str:
    open_socket(config.host, config.port).close()
    return f"{config.host}:{config.port} is free"


def _check_writable(folder: Path) -> str:
    """Test writing to a folder, or to its nearest existing parent, so that a mistyped name creates nothing."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with tempfile.NamedTemporaryFile(dir=nearest):
        return f"{folder} is writable" if nearest == folder else f"the server creates {folder} at startup"


def _check_checkpoints(config: EngineConfig) -> str:
    base = remove_local_scheme(config.checkpoints_base)
    if "://" not in base:
        return _check_writable(Path(base).expanduser())
    with tempfile.TemporaryDirectory() as cache:
        Folders(base, Path(cache))
    return f"{base} is supported by fsspec"


def _check_database(config: EngineConfig) -> str:
    database = Database(config.store_url)
    if database.is_sqlite and not (file := Path(str(database.url.database))).exists():
        _check_writable(file.parent)
        return f"the server creates {file} at startup"
    with database.reading() as (_, version):
        opened = "the sqlite database in the state folder can be opened" if database.is_sqlite else "PostgreSQL answers"
    if version == SCHEMA_VERSION:
        return opened
    return f"{opened}; the server {f'migrates its schema {version}' if version else 'creates its tables'} at startup"


def _check_disk(config: EngineConfig) -> Finding:
    free = shutil.disk_usage(config.state_folder if config.state_folder.exists() else Path.home()).free / 2**30
    text = f"{free:,.1f} GiB free at the state folder"
    return Finding("disk", "ok", text) if free > LITTLE_DISK_GB else Finding("disk", "note", f"{text}: this is little")


def _run_folders(config: EngineConfig) -> Finding:
    try:
        folders = run_folders(config.state_folder / "runs")
    except OSError as error:
        return Finding("run folders", "note", f"cannot be read: {error}")
    num_gb = sum(folder.num_bytes for folder in folders) / 1e9
    text = f"{len(folders)} take {num_gb:,.3g} GB; --max-runs-gb is {config.max_runs_gb:g}"
    if num_gb <= config.max_runs_gb:
        return Finding("run folders", "ok", text)
    return Finding("run folders", "note", f"{text}: the server removes the oldest ones of models that are not live")


def _open_files() -> Finding:
    files = raise_file_limit()
    text = f"at most {files:,} at a time, which allows {compute_connection_limit(files):,} connections"
    if files >= FEW:
        return Finding("open files", "ok", text)
    return Finding("open files", "note", f"{text}; raise the hard limit (`ulimit -Hn`, systemd's LimitNOFILE)")


def _check_sdk() -> Finding:
    oldest, newest = (".".join(map(str, version)) for version in SDK_VERSIONS)
    try:
        version = importlib.metadata.version("tinker")
    except importlib.metadata.PackageNotFoundError:
        return Finding("tinker SDK", "note", f"not installed in this environment; clients need {oldest} to {newest}")
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:3])
    if SDK_VERSIONS[0] <= numbers <= SDK_VERSIONS[1]:
        return Finding("tinker SDK", "ok", version)
    return Finding("tinker SDK", "note", f"{version}; the server is tested with {oldest} to {newest}")
