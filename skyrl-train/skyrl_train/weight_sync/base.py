"""Data types and interfaces of weight sync between trainer and engines. Independent of both."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TypedDict

from skyrl_train.errors import WeightSyncError
from skyrl_train.types import JsonObject

Transport = Literal["shared_memory", "cuda_ipc", "broadcast", "checkpoint"]
"""Transport of bytes to an engine. `shared_memory`: a memory segment mapped by both processes (one machine).
`cuda_ipc`: the same with GPU memory. `broadcast`: a process group of trainer rank 0 and all processes of all engines.
`checkpoint`: files."""

Encoding = Literal["full", "delta"]
"""Content of the bytes. `full`: whole tensors. `delta`: values that changed since the previous version, compressed."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncInitInfo:
    """Description of an engine's connection to the trainer. Serializable as JSON.

    Examples:
        The second engine in a process group with the trainer and one engine of two processes:

        >>> info = WeightSyncInitInfo(
        ...     transport="broadcast", master_address="10.0.0.1", master_port=29500, rank=3, world_size=4
        ... )
        >>> info.encoding, info.verification
        ('full', 'sampled')
    """

    transport: Transport
    encoding: Encoding = "full"
    sources: tuple[int, ...] = (0,)
    """Policy ranks whose bytes the engine takes: those on its GPUs (`cuda_ipc`), or one."""
    backend: str = "gloo"
    """`broadcast`: gloo or nccl."""
    master_address: str = ""
    master_port: int = 0
    rank: int = 0
    """`broadcast`: the rank of the engine's first process; its k-th process has `rank` + k. Trainer: 0."""
    world_size: int = 1
    directory: str = ""
    """`delta`: where an engine may keep the last weights that it was sent (files of its own below it)."""
    verification: Literal["sampled", "full", "off"] = "sampled"
    """Part of each tensor that its fingerprint reads."""
    timeout_seconds: float = 600.0


class BytesLocation(TypedDict, total=False):
    """Fields of a `WeightUpdateRequest` that locate its bytes."""

    location: str
    handles: JsonObject


@dataclass(frozen=True, kw_only=True)
class WeightUpdateRequest:
    """Description of one bucket of parameters, in order. JSON-serializable. `dtypes` are torch names such as
    `bfloat16`.

    The bytes of a `full` bucket are its concatenated tensors.

    Examples:
        The first bucket of version 7: a matrix of three elements in bfloat16, 2 bytes each, and a scalar:

        >>> request = WeightUpdateRequest(
        ...     names=["layer.weight", "layer.scale"], dtypes=["bfloat16", "float32"], shapes=[(1, 3), ()],
        ...     version=7, index=0, num_bytes=10, location="/skyrl_0",
        ... )
        >>> WeightUpdateRequest.from_json_dict(request.to_json_dict()) == request
        True
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    version: int
    """The version that this update leads to."""
    index: int
    """The bucket's number within the update, from 0: a receiver refuses a gap."""
    num_bytes: int
    """Bytes of the payload."""
    base_version: int | None = None
    """`delta`: the version that the bytes are changes to. None: they are whole tensors."""
    location: str = ""
    """`shared_memory`: the segment's name. `checkpoint`: the file."""
    handles: JsonObject = field(default_factory=dict, repr=False)
    """`cuda_ipc`: a GPU's UUID -> what opens its memory."""

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"a weight bucket needs as many dtypes and shapes as names; got {len(self.names)} names, "
                f"{len(self.dtypes)} dtypes, {len(self.shapes)} shapes"
            )

    def __len__(self) -> int:
        return len(self.names)

    def describe(self) -> str:
        """Describe the bucket and its tensors, for errors."""
        return f"bucket {self.index} of version {self.version} ({self.names[0]} to {self.names[-1]})"

    def to_json_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json_dict(cls, values: JsonObject) -> "WeightUpdateRequest":
        # JSON has no tuples, and shapes are compared with torch's.
        return cls(**{**values, "shapes": [tuple(shape) for shape in values["shapes"]]})


@dataclass(frozen=True, kw_only=True)
class LoraLoadRequest:
    """Adapter in a folder in peft's format (`adapter_config.json`, `adapter_model.safetensors`).

    Examples:
        >>> LoraLoadRequest(name="policy", path="/tmp/adapter", version=7).version
        7
    """

    name: str
    path: str
    version: int = 0


@dataclass(kw_only=True)
class ProcessReport:
    """Report of one engine process about its weights after an update. Serializable as JSON.

    Examples:
        A process with half of an 8-byte tensor, all of which was read:

        >>> report = ProcessReport(process="rank 0", fingerprints={"w": 99}, read=["w"], held_bytes=4, read_bytes=4)
    """

    process: str
    """Name of the process."""
    fingerprints: dict[str, int]
    """Fingerprints of all tensors as received."""
    read: list[str] = field(default_factory=list)
    """Tensors whose numbers were read from the layers of this process."""
    wrong: list[str] = field(default_factory=list)
    """Tensors in `read` whose numbers differ from those received."""
    held_bytes: int = 0
    """Size of the parts of tensors that can be read in this process."""
    read_bytes: int = 0
    """Part of `held_bytes` that was read at this sync."""


@dataclass(frozen=True, kw_only=True)
class WeightReport:
    """Report of an engine about its weights after an update.

    Examples:
        Two processes with half of a tensor each, one with wrong values:

        >>> half = {"fingerprints": {"w": 99}, "read": ["w"], "held_bytes": 4, "read_bytes": 4}
        >>> good, bad = ProcessReport(process="rank 0", **half), ProcessReport(process="rank 1", wrong=["w"], **half)
        >>> report = WeightReport.of_processes(7, [good, bad])
        >>> report.wrong, report.held_bytes
        ({'w': ['rank 1']}, 8)
    """

    version: int
    fingerprints: dict[str, int]
    """Fingerprint of every tensor of the update by its name (`fingerprint.fingerprint_of`), as the
    engine holds it or, for those in `received_only` and of engines that divide or pack their weights, as it came. Empty
    with verification off."""
    wrong: dict[str, list[str]] = field(default_factory=dict)
    """Tensors whose values in the engine's layers differ from those received -> the processes in which they do."""
    received_only: list[str] = field(default_factory=list)
    """Tensors that nothing was read of once they had been handed to the engine."""
    held_bytes: int = 0
    """Size of the weights that can be read from the engine's layers, over all processes."""
    read_bytes: int = 0
    """Part of `held_bytes` that was read at this sync."""

    @classmethod
    def of_processes(cls, version: int, reports: Sequence[ProcessReport]) -> "WeightReport":
        """Combine the reports of an engine's processes, each of which received every tensor completely.

        Raises:
            WeightSyncError: two processes received different bytes.
        """
        fingerprints: dict[str, int] = {}
        wrong: dict[str, list[str]] = {}
        for report in reports:
            for name, value in report.fingerprints.items():
                # Each process received the whole tensor before taking its shard, so all fingerprints must agree.
                if fingerprints.setdefault(name, value) != value:
                    raise WeightSyncError(
                        f"{reports[0].process} and {report.process} were given other values of {name}"
                    )
            for name in report.wrong:
                wrong.setdefault(name, []).append(report.process)
        # One process is sufficient: with pipeline parallelism each layer is in one process.
        read = {name for report in reports for name in report.read}
        return cls(
            version=version,
            fingerprints=fingerprints,
            wrong=wrong,
            received_only=[name for name in fingerprints if name not in read],
            held_bytes=sum(report.held_bytes for report in reports),
            read_bytes=sum(report.read_bytes for report in reports),
        )


class WeightUpdates(ABC):
    """Weight sync methods that every engine implements."""

    @abstractmethod
    async def weight_version(self) -> int:
        """Return the weight version of the next token; 0 before the first update."""

    @abstractmethod
    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None: ...

    @abstractmethod
    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        """Receive one bucket of named parameters. No token is computed until `finish_weight_update`; running requests
        are kept and new requests wait, with or without `pause_generation`."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> WeightReport:
        """Finish the update after its last bucket: switch to `version`, invalidate cached prefixes of older versions,
        and report a fingerprint of every updated tensor as held by the engine."""


@dataclass(frozen=True, kw_only=True)
class WrittenBucket:
    """Bucket written by one policy rank.

    Examples:
        The second bucket; the fingerprint is of a tensor of the first one:

        >>> request = WeightUpdateRequest(
        ...     names=["layer.bias"], dtypes=["float32"], shapes=[(3,)], version=7, index=1, num_bytes=12,
        ...     location="/skyrl_1",
        ... )
        >>> WrittenBucket(request=request, fingerprints={"layer.weight": 99}).request.index
        1
    """

    request: WeightUpdateRequest | None
    """Request to the engines that read from this rank; None: the previous bucket was the last, or the ranks send staged
    buckets, which only rank 0 has."""
    fingerprints: dict[str, int] = field(default_factory=dict)
    """Fingerprints of tensors of earlier buckets that were computed since the last call, of all that remain after the
    last bucket, and of staged ones only then; on rank 0."""
    write_seconds: float = 0.0
    fingerprint_seconds: float = 0.0


class WeightSource(ABC):
    """Weight sync methods that every policy rank implements. Each is a collective of all ranks."""

    @abstractmethod
    def connect_engines(self, init_infos: Sequence[WeightSyncInitInfo]) -> None:
        """Connect to the engines, replacing earlier connections. Returns before the engines have joined."""

    @abstractmethod
    def stage_bucket(self, version: int, index: int) -> bool:
        """Gather bucket `index` and, on rank 0, write or encode it without engines (`needs_staging`). Returns False if
        the previous bucket was the last.

        Raises:
            WeightSyncError: the files cannot be written.
        """

    @abstractmethod
    def write_bucket(self, version: int, index: int, held_version: int | None) -> WrittenBucket:
        """Gather bucket `index` and write it to a location that engines can read. Called while the engines read bucket
        `index - 1`, after they have read the one before.

        Args:
            held_version: the version of every engine, to which staged deltas may refer; None: unknown.

        Raises:
            WeightSyncError: not enough memory or disk space, or an engine left the process group.
        """

    @abstractmethod
    def finish_sync(self, version: int) -> None:
        """Record that every engine holds `version`."""

    @abstractmethod
    def abort_sync(self) -> None:
        """End the sync after a failure: engines that wait for bytes of this rank fail."""


def needs_staging(init_info: WeightSyncInitInfo) -> bool:
    """Return whether part of the work is done before generation pauses: writing files, encoding."""
    return init_info.encoding == "delta" or init_info.transport == "checkpoint"
