"""The socket that the server listens on."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from canter.core.logging import get_logger
from canter.server.args import ServerArgs

logger = get_logger(__name__)

BACKLOG = 2048


def listen(server: ServerArgs) -> socket.socket:
    """Bind the socket and listen, so that clients find the port from now on. Raises `OSError` in plain words."""
    try:
        listener = _bind_unix(server.uds, int(server.uds_permissions, 8)) if server.uds is not None else _bind_tcp(server.host, server.port)
        listener.listen(BACKLOG)
    except OSError as error:
        where = server.uds or f"{server.host or '*'}:{server.port}"
        raise OSError(f"Can't listen on {where}: {error.strerror or error}.") from error
    listener.setblocking(False)
    if server.uds is None:
        host, port = listener.getsockname()[:2]
        scheme = "http" if server.ssl_certfile is None else "https"
        logger.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
        if server.host is None and not server.api_keys:
            logger.warning("anyone who can reach this machine can use the server: set --api-key, or --host 127.0.0.1")
    else:
        logger.info("listening on unix socket %s", server.uds)
    return listener


def _bind_tcp(host: str | None, port: int) -> socket.socket:
    """A bound TCP socket; without a host one that takes IPv6 and IPv4 where the machine has both."""
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    family = socket.AF_INET6 if host is not None and ":" in host else socket.AF_INET
    return socket.create_server((host or "", port), family=family, backlog=BACKLOG)


def _bind_unix(path: str, permissions: int) -> socket.socket:
    """A bound unix socket; one that a dead server left behind is replaced, a live one or another file is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)
    try:
        listener.bind(path)
        os.chmod(path, permissions)  # nobody can connect before it listens
    except OSError:
        listener.close()
        raise
    return listener


def file_identity(path: str | None) -> tuple[int, int] | None:
    if path is None:
        return None
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None
