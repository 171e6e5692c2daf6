"""Ollama's bodies (`/api/...`). None in a request means: not given. `keep_alive` is read and has no effect, as the model stays;
`truncate` and `shift` are ignored, as nothing is ever cut: what does not fit is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

if TYPE_CHECKING:
    from canter.server.errors import ErrorInfo

# --- requests ---------------------------------------------------------------------------------------------------------

NOT_YET: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
}
"""Fields of either route that this server can't honour, with the values that ask for nothing."""


class Options(Struct, kw_only=True):
    """`options`: what shapes the answer. Those that shape how a model is loaded (`num_gpu`, `num_thread`, `num_batch`, `use_mmap`
    and others) and `num_keep`, which says what stays when a prompt is cut, are ignored: here the server's start settles the
    first, and nothing is ever cut."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "typical_p": (1, 1.0),
        "tfs_z": (1, 1.0),
        "mirostat": (0,),
        "penalize_newline": (True,),
    }

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaRequest(Struct, kw_only=True):
    """What the two routes share."""

    model: str | None = None
    stream: bool = True
    options: msgspec.Raw = msgspec.Raw(b"{}")
    keep_alive: str | float | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None


class GenerateRequest(OllamaRequest, kw_only=True):
    """`POST /api/generate`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET | {"template": ("",), "suffix": ("",), "images": ([],)}

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    context: list[int] | None = None


class Function(Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] | None = None


class ToolCall(Struct, kw_only=True):
    function: Function
    id: str | None = None


class ChatMessage(Struct, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(OllamaRequest, kw_only=True):
    """`POST /api/chat`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET

    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class ShowRequest(Struct, kw_only=True):
    """`POST /api/show`. `name` is an old spelling of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


# --- answers ----------------------------------------------------------------------------------------------------------


class AnswerFunction(Struct):
    """Arguments come as an object; so a call is told when it is complete, and one that was cut off is not."""

    index: int
    name: str
    arguments: dict[str, Any]


class AnswerCall(Struct):
    id: str
    function: AnswerFunction


class AnswerMessage(Struct):
    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class Answer(Struct):
    """A line of a stream, or the whole answer. `/api/generate` fills `response` and `thinking`, `/api/chat` `message`. Durations are
    nanoseconds."""

    model: str
    created_at: str
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    message: AnswerMessage | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class Details(Struct):
    """What is known of a model; the server does not know the rest."""

    family: str
    families: list[str]
    parent_model: str = ""
    format: str = ""
    parameter_size: str = ""
    quantization_level: str = ""


class Model(Struct):
    """A model in lists. `digest` names what is served: it is one of the model's name, not of its weights."""

    name: str
    model: str
    modified_at: str
    digest: str
    details: Details
    context_length: int | UnsetType | None = UNSET
    expires_at: str | UnsetType = UNSET


class ModelList(Struct):
    models: list[Model]


class ShowAnswer(Struct):
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    modified_at: str
    capabilities: list[str]


class VersionAnswer(Struct):
    version: str


class ErrorAnswer(Struct):
    error: str


def envelope(info: ErrorInfo, request_id: str) -> ErrorAnswer:
    """The body of an error."""
    return ErrorAnswer(info.message)
