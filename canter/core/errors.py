"""One tree of errors. `server/errors.py` holds the only table from these to HTTP statuses."""

from __future__ import annotations


class CanterError(Exception):
    """Base of every error that Canter raises on purpose. The message is fit to be shown to a user."""


class InvalidRequestError(CanterError, ValueError):
    """A request that can't be served as it was given: says what was given, what is allowed and what to do.

    `param` names the field at fault, as the user wrote it, or is None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(CanterError):
    """The request names a model that this server does not serve."""


class NotFoundError(CanterError):
    """Something other than a model that the request names and that isn't there; `param` names the field that names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PermissionDeniedError(CanterError):
    """A route that the server was not started to offer."""


class AuthenticationError(CanterError):
    """No API key, or a wrong one."""


class ConflictError(CanterError):
    """The request asks for a change that what is there does not allow, such as an end of what has not begun."""


class PayloadTooLargeError(CanterError):
    """The request body is longer than the server accepts."""


class QueueFullError(CanterError):
    """The engine's waiting queue is at its bound; the client should retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeoutError(CanterError):
    """The request took longer than the server allows."""


class EngineError(CanterError):
    """The engine failed while it worked on a request."""


class EngineNotReadyError(EngineError):
    """The engine is still loading."""


class EngineRestartingError(EngineNotReadyError):
    """The engine has died and is being started again."""


class EngineDeadError(EngineError):
    """The engine process is gone or was never able to start."""


class ConfigError(CanterError, ValueError):
    """An engine argument that is unknown, malformed or contradicts another. Raised at start-up."""


class CheckpointError(CanterError):
    """A model file that is missing, truncated, mismatched or unsupported: names the tensor or key, what was expected and what was found."""


class UnsupportedModelError(CheckpointError):
    """A model architecture, weight format or option that Canter can't serve."""
