"""TLS: the server's context, made from files, and made again when they change."""

from __future__ import annotations

import os
import ssl
from typing import NoReturn

from canter.core.errors import ConfigError
from canter.server.args import ServerArgs

FileVersions = tuple[tuple[int, int, int], ...]


def make_context(args: ServerArgs) -> ssl.SSLContext | None:
    """The context that the flags describe, or None without HTTPS. Raises `ConfigError` that names the flag at fault."""
    if args.ssl_certfile is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        _check_readable(name, getattr(args, name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, args.ssl_certfile, args.ssl_keyfile)
    if args.ssl_ca_certs is not None:
        _load_authorities(context, args.ssl_ca_certs)
    context.verify_mode = ssl.VerifyMode(args.ssl_cert_reqs)
    if args.ssl_ciphers is not None:
        try:
            context.set_ciphers(args.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(f"ssl_ciphers: OpenSSL knows no cipher of {args.ssl_ciphers!r}.") from None
    return context


def file_versions(args: ServerArgs) -> FileVersions:
    """Changes when one of the files does. Raises `OSError` while one is missing."""
    stats = [os.stat(path) for path in (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs) if path is not None]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def _check_readable(name: str, path: str | None) -> None:
    if path is None:
        return
    try:
        if os.path.isdir(path) and name == "ssl_ca_certs":
            os.listdir(path)
        else:
            with open(path, "rb"):
                pass
    except OSError as error:
        raise ConfigError(f"{name}: can't read {path}: {error.strerror}.") from None


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    def refuse() -> NoReturn:  # else OpenSSL would ask the terminal, and wait
        raise ConfigError(
            f"{'ssl_certfile' if key is None else 'ssl_keyfile'}: the private key is encrypted; give one without a passphrase."
        )

    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"ssl_keyfile: the key is not that of the certificate in {certificate}.") from None
        files = certificate if key is None else f"{certificate} and {key}"
        raise ConfigError(f"ssl_certfile: no certificate with its private key in PEM form in {files} ({error.reason or error}).") from None


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(**{"capath" if os.path.isdir(path) else "cafile": path})
    except ssl.SSLError as error:
        raise ConfigError(f"ssl_ca_certs: no certificates in PEM form in {path} ({error.reason or error}).") from None
