"""A relay's certificate and private key in their files, which are renewed every few months."""

from __future__ import annotations

import ssl
from pathlib import Path


class CertificateError(Exception):
    """The files are not there, or are not a certificate and its key."""


class Certificate:
    """Settings of a TLS server, `context`, from two PEM files. Raises CertificateError."""

    def __init__(self, cert: Path, key: Path) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._cert, self._key = cert, key
        self._load()

    def renewed(self) -> str:
        """Read changed files again, for the connections to come; return, once, what is wrong with them."""
        try:
            if self._written() != self._read:
                self._load()
        except CertificateError as error:
            return str(error)
        return ""

    def _written(self) -> list[int]:
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in (self._cert, self._key)]

    def _load(self) -> None:
        self._read = self._written()
        try:
            for path in (self._cert, self._key):
                path.read_bytes()  # an error of this one has the file's name
            # else it would ask at the terminal
            self.context.load_cert_chain(self._cert, self._key, password="")
        except ssl.SSLError as error:
            why = error.reason or str(error)
            raise CertificateError(f"not a certificate (PEM) and its private key ({why})") from None
        except OSError as error:
            raise CertificateError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from None
