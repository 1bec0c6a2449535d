"""Adapters are compared with their checksums before their first sample, and again once their files were written."""

import asyncio
from pathlib import Path

from tx.tinker.backends.base import SamplingBackend
from tx.tinker.commands import Sample
from tx.tinker.engine.messages import Done, Failed, FromEngine
from tx.tinker.engine.sampling import Sampling
from tx.tinker.storage import manifests
from tx.tinker.storage.folders import Folders
from tx.tinker.types import SampleOutput, SampleParams, SampleSpec, Sequence


class OneToken(SamplingBackend):
    """Answers with the first byte of an adapter's file."""

    async def start(self) -> None: ...

    async def sample(self, spec: SampleSpec, adapter: Path | None, *, tenant: str = "") -> SampleOutput:
        assert adapter is not None
        return SampleOutput([Sequence([(adapter / "adapter").read_bytes()[0]], [0.0], "stop")])

    def num_running(self) -> int:
        return 0

    async def close(self) -> None: ...


async def test_adapter_is_read_once_and_reread_after_write(tmp_path: Path, monkeypatch):
    folders, said = Folders(str(tmp_path / "base"), tmp_path / "cache"), list[FromEngine]()
    with folders.writing(folders.place("a")) as scratch:
        (scratch / "adapter").write_bytes(b"\5")
    sampling, hashed = Sampling(OneToken(), folders, said.append), []
    sha256_of = manifests.compute_sha256
    monkeypatch.setattr(manifests, "compute_sha256", lambda path: hashed.append(path) or sha256_of(path))

    async def sample(number: int) -> FromEngine:
        spec = SampleSpec(prompt=[1], params=SampleParams(seed=0))
        sampling.begin(Sample(request_id=f"s:{number}", tenant="t", spec=spec, adapter=folders.place("a")))
        while len(said) <= number:
            await asyncio.sleep(0.001)
        return said[number]

    assert isinstance(await sample(0), Done) and isinstance(await sample(1), Done)
    assert len(hashed) == 1
    Path(folders.place("a"), "adapter").write_bytes(b"\6")
    damaged = await sample(2)
    assert isinstance(damaged, Failed) and "adapter is damaged (its sha256" in damaged.error
    assert str(tmp_path) not in damaged.error
