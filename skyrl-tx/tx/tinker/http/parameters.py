"""Path and query parameters, with their limits."""

from typing import Annotated

from fastapi import Path, Query

from tx.tinker.types import CheckpointKind

Id = Annotated[str, Path(max_length=1024, pattern=r"^[^\x00-\x1f]+$")]
"""Id of a session or sampler, without control characters, which databases reject."""
RunId = Annotated[str, Path(max_length=1024, pattern=r"^[A-Za-z0-9_:.-]+$")]
Kind = Annotated[CheckpointKind, Path()]
Name = Annotated[str, Path(max_length=255, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
"""Name of a checkpoint."""
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]
