"""Kind, image and folders of rows of each data set. Pure functions of a row."""

from dataclasses import dataclass
from typing import Literal

from skyrl_agent.types import Row

Kind = Literal["r2e-gym", "swe-smith", "swe-gym", "swt-ci", "multimodal", "swe-bench"]
KINDS: tuple[Kind, ...] = ("r2e-gym", "swe-smith", "swe-gym", "swt-ci", "multimodal")
REPOSITORY = "/testbed"
"""Folder of the repository in all of these images."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_PREFIX = "xingyaoww/"


@dataclass(frozen=True)
class Source:
    """Kind, image and environment of a row."""

    kind: Kind
    image: str
    path: str
    """PATH with the interpreter that the repository is installed for in front."""


def get_kind(data_source: str) -> Kind:
    """Return the kind by a part of the name; SWE-bench if none matches."""
    for kind in KINDS:
        if kind in data_source.lower():
            return kind
    return "swe-bench"


def get_image(kind: Kind, row: Row, instance_id: str, prefix: str = DEFAULT_PREFIX) -> str:
    """
    Args:
        prefix: of images of SWE-bench and SWE-Gym: registry and user, with the slash.
    """
    if named := row.get("docker_image"):
        return named
    if kind == "r2e-gym":
        return instance_id  # R2E-Gym uses the image name as id
    if kind == "swe-smith":
        return f"jyangballin/{row['image_name'].replace('__', '_1776_')}"
    return f"{prefix}sweb.eval.x86_64.{instance_id.replace('__', '_s_')}".lower()


def get_source(data_source: str, row: Row, instance_id: str, prefix: str = DEFAULT_PREFIX) -> Source:
    """Return the kind, image and environment of a row."""
    kind = get_kind(data_source)
    homes = ["/testbed/.venv/bin", "/root/.venv/bin", "/root/.local/bin"]
    if kind != "r2e-gym":
        homes = ["/opt/miniconda3/envs/testbed/bin", "/opt/miniconda3/bin"]
    return Source(kind, get_image(kind, row, instance_id, prefix), ":".join([*homes, SYSTEM_PATH]))
