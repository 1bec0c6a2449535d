"""Downloaded checkpoint: a tar with a PEFT adapter, read with numpy only."""

import io
import json
import tarfile
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import numpy as np

from tx_conformance.checks import Skip, expect, expect_equal
from tx_conformance.wire import Wire


@dataclass(frozen=True)
class PeftAdapter:
    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    """Weights by PEFT's name: `base_model.model.….lora_A.weight` [rank, in], `….lora_B.weight` [out, rank]."""

    def all(self, part: str) -> np.ndarray:
        """The weights of all A, or all B, in a row."""
        return np.concatenate([w.ravel() for name, w in sorted(self.weights.items()) if f".lora_{part}." in name])


def archive_url(wire: Wire, path: str) -> str:
    """Return the URL of the archive of a `tinker://` path."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    answer = wire.call("GET", f"training_runs/{run}/checkpoints/{kind}/{name}/archive", follow_redirects=False)
    if answer.status_code in (404, 501) and "checkpoint" not in answer.text.lower():
        raise Skip("the server gives no archives")
    expect_equal(answer.status_code, 302, "archive status")
    expect("location" in answer.headers and "expires" in answer.headers, "no Location, or no Expires")
    return urljoin(str(answer.request.url), answer.headers["location"])


def fetch(wire: Wire, path: str) -> PeftAdapter:
    """Download a checkpoint and read its adapter. The URL needs no key: users receive it unchanged."""
    import httpx

    answer = httpx.get(archive_url(wire, path), timeout=60, trust_env=False)
    expect_equal(answer.status_code, 200, "download status")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        files = {member.name.rsplit("/", 1)[-1]: tar.extractfile(member) for member in tar if member.isfile()}
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            expect(name in files, f"no {name} in the archive, but {sorted(files)}")
        config, weights = (files[name].read() for name in ("adapter_config.json", "adapter_model.safetensors"))  # pyright: ignore
    return PeftAdapter(json.loads(config), safetensors(weights))


def safetensors(data: bytes) -> dict[str, np.ndarray]:
    """Parse float tensors: 8 bytes of header length, the header as JSON, the numbers."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = _numbers(data[begin:end], entry["dtype"]).reshape(entry["shape"])
    return tensors


def _numbers(raw: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype])
