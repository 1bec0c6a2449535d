"""Signed URLs that serve a checkpoint's files without an API key for a limited time.

Users open such a URL in a browser or `curl`. So it contains tenant, expiry time, and a signature over everything in it.
The secret is stored in the state folder, so URLs survive a restart.
"""

import hashlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlencode

from tx.errors import RequestError
from tx.tinker.http.auth import DOWNLOADS
from tx.tinker.types import TinkerPath

VALID_SECONDS = 3600
_SECRET = "downloads.secret"


@dataclass(frozen=True)
class Download:
    """Content of a download address."""

    tenant: str
    path: TinkerPath
    expires: int
    """Seconds since the epoch."""
    file: str = ""
    """One file of the checkpoint; empty: a tar of all of them."""

    @property
    def file_name(self) -> str:
        """File name under which clients save it."""
        return self.file or f"{self.path.name}.tar"

    @property
    def expires_header(self) -> str:
        return formatdate(self.expires, usegmt=True)


class Downloads:
    """Signs and checks.

    Args:
        secret: 32 bytes
    """

    def __init__(self, secret: bytes):
        self._secret = secret

    @classmethod
    def load_or_create(cls, folder: Path) -> "Downloads":
        """Read the secret from a folder, where the first server creates it."""
        path = folder / _SECRET
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            made = folder / f"{_SECRET}.{os.getpid()}"
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            made.rename(path)
        return cls(path.read_bytes())

    def of(self, tenant: str, path: TinkerPath, file: str = "") -> Download:
        return Download(tenant, path, int(time.time()) + VALID_SECONDS, file)

    def build_url(self, base_url: str, download: Download) -> str:
        """
        Args:
            base_url: of the server, as the client reached it
        """
        query = {"tenant": download.tenant, "file": download.file, "expires": download.expires}
        query = {name: value for name, value in query.items() if value != ""} | {
            "signature": self._compute_signature(download)
        }
        path = "/".join(quote(part, safe="") for part in download.path)
        return f"{base_url.rstrip('/')}{DOWNLOADS}{path}?{urlencode(query)}"

    def check(self, download: Download, signature: str) -> None:
        """Verify a signature. Raises RequestError: not signed by this server (403), or expired (410)."""
        if not hmac.compare_digest(self._compute_signature(download).encode(), signature.encode(errors="replace")):
            raise RequestError("this download URL was not issued by this server; request the archive again", 403)
        if time.time() > download.expires:
            raise RequestError("this download URL has expired; request the archive again", 410)

    def _compute_signature(self, download: Download) -> str:
        text = "\n".join((download.tenant, str(download.path), str(download.expires), download.file))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
