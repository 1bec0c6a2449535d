"""Checkpoint downloads: signed URLs that are valid for an hour without a key, and the files they serve."""

import asyncio
import logging
import tarfile
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request, Response
from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from tx.errors import RequestError
from tx.tinker.http import responses
from tx.tinker.http.auth import DOWNLOADS
from tx.tinker.http.downloads import Download, Downloads
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.parameters import Kind, Name, RunId
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.routes.runs import CHECKPOINT
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.manifests import DamagedFilesError, list_files
from tx.tinker.types import TinkerPath

T = TypeVar("T")
logger = logging.getLogger(__name__)

router = APIRouter(tags=["downloads"])
downloads = APIRouter(prefix=DOWNLOADS.rstrip("/"), tags=["downloads"])

_MARK = "checkpoint_complete"
"""An empty file; `tinker checkpoint push-hf` asks for it."""
_MOVED = {
    302: {
        "description": "The tar archive is available at `Location` until `Expires`",
        "headers": {"Location": {"schema": {"type": "string"}}, "Expires": {"schema": {"type": "string"}}},
    }
}


@router.get(
    f"{CHECKPOINT}/archive",
    **describe_route(responses.Nothing, response_model=None, response_class=Response, status_code=302, also=_MOVED),
)
async def archive(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    path = TinkerPath(run_id, kind, name)
    await get_service(request).checkpoints.archive(get_tenant(request), *path)  # whether there is one
    signer: Downloads = request.app.state.downloads
    download = signer.of(get_tenant(request), path)
    where = signer.build_url(str(request.base_url), download)
    return Response(status_code=302, headers={"Location": where, "Expires": download.expires_header})


@router.get(f"{CHECKPOINT}/external_weights_urls", **describe_route(responses.FileAddresses))
async def external_weights_urls(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Return a signed URL for each file."""
    path = TinkerPath(run_id, kind, name)
    folder = await get_service(request).checkpoints.archive(get_tenant(request), *path)
    local = await asyncio.to_thread(_read, request.app.state.folders.verified, folder)
    files = [file.relative_to(local).as_posix() for file in list_files(local)]
    signer: Downloads = request.app.state.downloads
    made = [signer.of(get_tenant(request), path, file) for file in files]
    urls = {download.file: signer.build_url(str(request.base_url), download) for download in made}
    expires = min((download.expires for download in made), default=0)
    return to_json_response({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})


@downloads.get(
    "/{run_id}/{kind}/{name}",
    **describe_route(
        responses.Nothing,
        response_model=None,
        also={
            200: {"description": "The files", "content": {"application/octet-stream": {}, "application/x-tar": {}}},
            403: {"model": responses.Problem, "description": "Not signed by this server"},
            410: {"model": responses.Problem, "description": "Expired"},
        },
    ),
)
async def download(
    request: Request,
    run_id: RunId,
    kind: Kind,
    name: Name,
    expires: Annotated[int, Query(ge=0, le=2**40)],
    signature: str,
    tenant: str,
    file: str = "",
) -> Response:
    """Download from an address of `archive` or `external_weights_urls`."""
    asked = Download(tenant, TinkerPath(run_id, kind, name), expires, file)
    request.app.state.downloads.check(asked, signature)
    folder = await get_service(request).checkpoints.archive(tenant, *asked.path)
    folders: Folders = request.app.state.folders
    if file:
        local = await asyncio.to_thread(_read, folders.local, folder)
        return FileResponse(local / file, filename=Path(file).name, media_type="application/octet-stream")
    packed = await asyncio.to_thread(_build_tar, folders, folder)
    remove = BackgroundTask(packed.unlink, missing_ok=True)
    return FileResponse(packed, filename=asked.file_name, media_type="application/x-tar", background=remove)


def _read(read: Callable[[str], T], folder: str) -> T:
    try:
        return read(folder)
    except FileNotFoundError:
        raise RequestError("this checkpoint's files no longer exist", 404) from None
    except DamagedFilesError as error:
        logger.error("checkpoint %s: %s", folder, error)
        raise RequestError(
            f"this checkpoint is damaged on the server's disk: {error}. Save it again, or take another one", 410
        ) from None


def _build_tar(folders: Folders, folder: str) -> Path:
    """Build a tar of the folder in a temporary file."""
    with tempfile.NamedTemporaryFile(suffix=".tar", prefix="tx-archive-", delete=False) as file:
        path = Path(file.name)
    try:
        _read(lambda folder: folders.archive(folder, path), folder)
        with tarfile.open(path, "a") as tar:
            tar.addfile(tarfile.TarInfo(_MARK))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path
