"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not here")


@dataclass(frozen=True)
class Identity:
    """A certificate and its key."""

    certificate: Path
    key: Path

    def in_one_file(self) -> Path:
        path = self.certificate.with_suffix(".both.pem")
        path.write_bytes(self.certificate.read_bytes() + self.key.read_bytes())
        return path


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.identity = Identity(folder / f"{name}.pem", folder / f"{name}.key")
        self._openssl("req", "-x509", *self._key_options(self.identity), "-subj", f"/CN={name}", "-days", "2",
                      "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip

    @property
    def certificate(self) -> Path:
        return self.identity.certificate

    def issue(self, name: str) -> Identity:
        made = Identity(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        self._openssl("req", "-x509", *self._key_options(made), "-subj", f"/CN={name}", "-days", "2",
                      "-CA", str(self.certificate), "-CAkey", str(self.identity.key), "-addext", "subjectAltName=IP:127.0.0.1",
                      "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip
        return made

    def client_context(self, identity: Identity | None = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        if identity is not None:
            context.load_cert_chain(identity.certificate, identity.key)
        return context

    @staticmethod
    def _key_options(identity: Identity) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(identity.key),
                "-out", str(identity.certificate)]  # fmt: skip

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
