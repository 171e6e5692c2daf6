"""Server arguments: what shapes the HTTP side, as `EngineArgs` shapes the engine. Names follow vLLM."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from canter.core.config import arg, check_choices, check_names
from canter.core.errors import ConfigError

MIB = 1 << 20
MAX_API_SERVERS = 64
_OCTAL = re.compile(r"[0-7]{3}")
METRICS_PREFIXES = ("vllm", "canter")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def _server_arg(default: Any, doc: str, choices: tuple[Any, ...] | None = None) -> Any:
    return arg(default, doc, choices, group="server")


def _tls_arg(default: Any, doc: str, choices: tuple[Any, ...] | None = None) -> Any:
    return arg(default, doc, choices, group="encryption")


@dataclass(kw_only=True)
class ServerArgs:
    """Everything that shapes the HTTP server. Unknown keywords raise with the nearest match (`ServerArgs.parse`)."""

    host: str | None = _server_arg(
        None, "Address to listen on. Default: all interfaces, as vLLM does, so set an API key or 127.0.0.1 on a shared network."
    )
    port: int = _server_arg(8000, "TCP port; 0 lets the system choose a free one.")
    uds: str | None = _server_arg(None, "Listen on this unix socket instead of a TCP port.")
    api_server_count: int = _server_arg(
        1,
        "Processes that speak HTTP on the one port, beside the one that hosts the engine. More than one pays where HTTP and text, not the "
        "engine, are what takes long; responses are then not stored.",
    )
    root_path: str = _server_arg("", "Path under which a proxy shows the server.")
    api_key: list[str] = _server_arg(
        list, "Keys of which a request must bring one (Authorization: Bearer, or x-api-key). Default: the variable CANTER_API_KEY, if set."
    )
    served_model_name: list[str] = _server_arg(
        list, "Names that requests may give for the model; the first is the one in answers and metrics. Default: the model argument."
    )
    chat_template: str | None = _server_arg(None, "File with a Jinja chat template, or the template itself, instead of the model's.")
    trust_request_chat_template: bool = _server_arg(False, "Allow the chat_template field in requests.")
    enable_auto_tool_choice: bool = _server_arg(
        False, "Refuse to start unless it is known how the model writes tool calls. (Models whose calls can be read need no switch.)"
    )
    exclude_tools_when_tool_choice_none: bool = _server_arg(False, "Don't show the model the tools of a request with tool_choice none.")
    enable_reasoning_content: bool = _server_arg(
        False, "Give thoughts under their older name too: reasoning_content beside reasoning, for clients that read only that."
    )
    response_role: str = _server_arg("assistant", "Role of the messages that the model writes.")
    allowed_origins: list[str] = _server_arg(list, "Origins that browsers may call from; empty turns CORS off.")
    allowed_methods: list[str] = _server_arg(lambda: ["*"], "Methods that browsers may use.")
    allowed_headers: list[str] = _server_arg(lambda: ["*"], "Headers that browsers may send.")
    allow_credentials: bool = _server_arg(False, "Let browsers send credentials.")
    max_body_bytes: int = _server_arg(
        8 * MIB,
        "Longest request body; longer ones are refused with 413. Reading one takes up to 10 ms for each MiB, in which others wait.",
    )
    shutdown_timeout: float = _server_arg(
        0.0, "Seconds that requests under way may go on after SIGTERM or SIGINT; then they end with an error. 0 ends them at once."
    )
    on_engine_death: str = _server_arg(
        "resume",
        "When the engine process dies: resume starts it again and requests go on where they stopped; fail ends them and the server.",
        ("resume", "fail"),
    )
    max_engine_restarts: int = _server_arg(5, "Most restarts of the engine within ten minutes; after that the server ends.")
    engine_stall_timeout: float = _server_arg(
        300.0, "Seconds without a step, while requests run, after which /health is 503. A step may take long: it computes whole chunks."
    )
    enable_request_id_headers: bool = _server_arg(False, "Send X-Request-Id in every answer: the request's own, or a new one.")
    enable_prompt_tokens_details: bool = _server_arg(False, "Report cached prompt tokens in usage.prompt_tokens_details.")
    enable_per_request_metrics: bool = _server_arg(False, "Tell in each answer, in metrics, how long its parts took.")
    enable_force_include_usage: bool = _server_arg(False, "Send usage in every stream, asked for or not.")
    metrics_prefix: str = _server_arg(
        "vllm", "What the names of metrics begin with: vllm, so that its dashboards and autoscalers work, or canter.", METRICS_PREFIXES
    )
    disable_fastapi_docs: bool = _server_arg(False, "Don't serve the description of the API at /openapi.json and /docs.")
    disable_page: bool = _server_arg(False, "Don't serve the built-in web page at /.")
    enable_responses_store: bool = _server_arg(
        True, "Keep responses of /v1/responses in memory, for previous_response_id, background and later reading."
    )
    responses_store_size: int = _server_arg(1024, "Most responses kept; the oldest make room.")
    responses_store_bytes: int = _server_arg(256 * MIB, "Most memory for kept responses, their conversations and events.")
    responses_store_seconds: float = _server_arg(3600.0, "Seconds for which a finished response is kept.")
    enable_scale_out: bool = _server_arg(
        False, "Offer the routes that take prompts apart and put answers together elsewhere: render, derender and token-in/token-out."
    )
    uvicorn_log_level: str = _server_arg("info", "Least severe lines that the HTTP library logs.", LOG_LEVELS)
    disable_uvicorn_access_log: bool = _server_arg(
        False, "Don't log a line for each HTTP request. (Health checks and metrics are never logged.)"
    )
    access_log_format: str = _server_arg("text", "Form of those lines: text, or a JSON object each.", ("text", "json"))
    disable_access_log_for_endpoints: str = _server_arg("", "Paths without such lines, separated by commas.")
    request_timeout: float | None = _server_arg(
        None, "Most seconds that a request may take; then it gets 504, or its stream ends with finish_reason abort. Default: no limit."
    )
    queue_full_status: int = _server_arg(503, "Status of answers to requests that the queue has no room for.", (429, 503))
    sse_keep_alive_interval: float = _server_arg(
        0.0, "Seconds after which a stream that has nothing to say sends a comment, so that no proxy gives it up; 0 for never."
    )
    enable_server_load_tracking: bool = _server_arg(False, "Offer /load, the number of requests under way.")
    enable_tokenizer_info_endpoint: bool = _server_arg(False, "Offer /tokenizer_info: the tokenizer's configuration and chat template.")
    enable_dev_mode: bool = _server_arg(
        False, "Offer routes that show and control the engine: /server_info, /pause, /abort_requests and others. Not for the public."
    )
    profile_dir: str | None = _server_arg(None, "Folder for traces; with it /start_profile and /stop_profile are offered.")
    otlp_traces_endpoint: str | None = _server_arg(
        None, "URL to which a span for each request is sent (OTLP over HTTP), such as http://localhost:4318/v1/traces."
    )
    ssl_certfile: str | None = _tls_arg(None, "File with the server's certificate and its chain (PEM); turns HTTPS on.")
    ssl_keyfile: str | None = _tls_arg(None, "File with the certificate's private key (PEM). Default: it stands in ssl_certfile.")
    ssl_ca_certs: str | None = _tls_arg(None, "File or directory with the authorities that sign clients' certificates.")
    ssl_cert_reqs: int = _tls_arg(0, "Certificates of clients: 0 not asked for, 1 checked if one is sent, 2 needed.", (0, 1, 2))
    ssl_ciphers: str | None = _tls_arg(None, "OpenSSL's list of ciphers for TLS 1.2. Default: those that Python thinks safe.")
    enable_ssl_refresh: bool = _tls_arg(False, "Read these files again when they change, so that a renewed certificate needs no restart.")
    uds_permissions: str = _server_arg("660", "Permissions of the unix socket, as chmod writes them.")

    @classmethod
    def parse(cls, **keywords: Any) -> ServerArgs:
        """Build from keywords; an unknown one raises `ConfigError` naming the nearest known."""
        check_names(cls, keywords, "server argument")
        args = cls(**keywords)
        args.verify()
        return args

    def verify(self) -> None:
        """Check every value; raises `ConfigError` naming the argument."""
        check_choices(self)
        if not _is_integer(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be an integer of at least 0 and at most 65535, got {self.port!r}.")
        if not _is_integer(self.api_server_count) or not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(
                f"api_server_count must be an integer of at least 1 and at most {MAX_API_SERVERS}, got {self.api_server_count!r}."
            )
        if not _is_integer(self.max_body_bytes) or self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be an integer of at least 1, got {self.max_body_bytes!r}.")
        if isinstance(self.shutdown_timeout, bool) or not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(f"shutdown_timeout must be a number of seconds of at least 0, got {self.shutdown_timeout!r}.")
        if not _is_integer(self.max_engine_restarts) or self.max_engine_restarts < 1:
            raise ConfigError(f"max_engine_restarts must be an integer of at least 1, got {self.max_engine_restarts!r}.")
        for name in ("responses_store_size", "responses_store_bytes"):
            if not _is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}.")
        if isinstance(self.responses_store_seconds, bool) or not 0 < self.responses_store_seconds < float("inf"):
            raise ConfigError(f"responses_store_seconds must be a number of seconds above 0, got {self.responses_store_seconds!r}.")
        for name, zero in (("request_timeout", False), ("engine_stall_timeout", False), ("sse_keep_alive_interval", True)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not (0 <= value < float("inf")) or (value == 0 and not zero)):
                raise ConfigError(f"{name} must be a number of seconds {'of at least' if zero else 'above'} 0, got {value!r}.")
        for path in self.silent_paths:
            if not path.startswith("/"):
                raise ConfigError(f"disable_access_log_for_endpoints must hold paths that begin with /, got {path!r}.")
        self._verify_tls()
        if not _OCTAL.fullmatch(self.uds_permissions):
            raise ConfigError(f"uds_permissions must be an octal number such as 660, got {self.uds_permissions!r}.")
        for name in ("api_key", "served_model_name"):
            if any(not isinstance(value, str) or not value for value in getattr(self, name)):
                raise ConfigError(f"{name} must hold non-empty strings.")

    def _verify_tls(self) -> None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "ssl_cert_reqs", "enable_ssl_refresh"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigError(f"{name} needs ssl_certfile, the server's own certificate.")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"ssl_cert_reqs {self.ssl_cert_reqs} needs ssl_ca_certs, to check the certificates of clients with.")

    @property
    def no_store_reason(self) -> str | None:
        """Why responses are not stored, a clause; None when they are."""
        if not self.enable_responses_store:
            return "which this server was started without"
        if self.api_server_count > 1:
            return "which a server of several processes (api_server_count) does not have"
        return None

    @property
    def silent_paths(self) -> list[str]:
        """Paths that the access log leaves out."""
        return [path for path in map(str.strip, self.disable_access_log_for_endpoints.split(",")) if path]

    @property
    def api_keys(self) -> list[str]:
        """The keys given, or the one of the environment."""
        variable = os.environ.get("CANTER_API_KEY")
        return self.api_key or ([variable] if variable else [])


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
