"""Stand-ins for tests of frontends: a byte-level tokenizer, and a client around an engine core that echoes."""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import sys
from collections.abc import AsyncGenerator, Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from canter.checkpoint.resolve import resolve
from canter.client.hub import RequestHub
from canter.client.outputs import RequestOutput
from canter.client.protocol import RequestObserver
from canter.core.messages import AbortRequests, AddRequest, EngineInfo, EngineStats, FrontendMessage, Outputs, RequestDelta
from canter.core.sampling_params import SamplingParams
from canter.server.model_text import ModelText
from canter.text.chat_template import ChatTemplate, load_chat_template
from canter.text.parsing.parser import OutputFormat
from canter.text.tokenizer import Tokenizer, load_tokenizer
from tests.fake_core import CONTEXT, INFO, VOCAB_SIZE, FakeCore

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if documents %}{{ documents | length }} documents\n{% endif %}{{ mood or '' }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: printable ones for themselves, others shifted up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose ids are the bytes of the text, with EOS 256 and three more special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<user>", "<a>", "<b>"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def model_folder() -> Path:
    """A checkpoint directory with everything but weights that a model computes with."""
    folder = write_tokenizer(Path(mkdtemp(prefix="canter-test-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder


@cache
def fake_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(str(model_folder())))


@cache
def _fake_template() -> ChatTemplate:
    return load_chat_template(fake_tokenizer())


def fake_text(defaults: dict[str, Any] | None = None, output_format: OutputFormat | None = None) -> ModelText:
    return ModelText(fake_tokenizer(), _fake_template(), {}, defaults or {}, output_format=output_format)


class FakeEngineClient:
    """An `EngineClient` over a `FakeCore` in the event loop: a step whenever there is work, unless `paused`."""

    def __init__(self, core: FakeCore | None = None, observer: RequestObserver | None = None) -> None:
        self.core = core or FakeCore()
        self.info: EngineInfo | None = INFO
        self.phases = {"weights": 1.5}
        self.paused = False
        self.is_restarting = False
        self.health: Exception | None = None
        self.hub = RequestHub(self._send, fake_tokenizer(), observer)
        self._scheduled = False

    @property
    def stats(self) -> EngineStats:
        return self.hub.stats

    def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        return self.hub.generate(request_id, prompt_token_ids, params, **more)

    async def abort(self, request_ids: Iterable[str]) -> None:
        self.hub.abort(request_ids)

    async def utility(self, method: str, *args: Any) -> Any:
        result = self.core.utility(method, list(args))
        self._schedule()
        return result

    def check_health(self) -> None:
        if self.health is not None:
            raise self.health

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        self.core.shutdown()

    def resume(self) -> None:
        self.paused = False
        self._schedule()

    def _send(self, message: FrontendMessage) -> None:
        if isinstance(message, AddRequest):
            try:
                self.core.add_request(message)
            except Exception as error:
                delta = RequestDelta(message.request_id, [], "error", error=str(error), error_type=type(error).__name__)
                asyncio.get_running_loop().call_soon(self.hub.deliver, Outputs([delta]))
        elif isinstance(message, AbortRequests):
            self.core.abort(message.request_ids)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self.paused and self.core.has_work():
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._scheduled = False
        if self.paused:
            return
        self.hub.deliver(Outputs(self.core.step(), self.core.stats()))
        self._schedule()
