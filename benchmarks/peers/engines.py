"""The engines that are compared, each with the settings that make it fastest, behind one interface."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from peers.driver import DECODING, WORKS, figure
from peers.processes import EngineFailed, EngineProcess, run_tool
from peers.servers import HttpServer

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Measured:
    """One turn of an engine: tokens a second by variant of its settings, and the tokens where the engine tells them."""

    tok_s: dict[str, float]
    tokens: list[list[int]] = field(default_factory=list)


class Contestant(Protocol):
    """An engine with a model, ready to be measured in turn with others."""

    def measure(self, work: str, seed: int) -> Measured: ...

    def peak_bytes(self) -> int:
        """The most memory that its processes held, 0 where that says nothing (tools that hold no server's state)."""
        ...

    def close(self) -> None: ...


class Driven:
    """An engine whose driver takes orders. It is paused between its turns."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.process = EngineProcess(command, env, orders=True)
        try:
            self.process.ask(None)
        except BaseException:
            self.process.close()
            raise
        self.process.pause()

    def order(self, **order: Any) -> dict[str, Any]:
        self.process.resume()
        result = self.process.ask(order)
        self.process.pause()
        return result

    def measure(self, work: str, seed: int) -> Measured:
        result = self.order(do="measure", work=work, seed=seed)
        return Measured({"": result["tok_s"]}, result["tokens"])

    def peak_bytes(self) -> int:
        return self.process.peak_bytes()

    def close(self) -> None:
        self.process.close()


class BestOf:
    """The same engine in several settings, each measured every turn; the report takes the better one."""

    def __init__(self, variants: dict[str, Contestant]) -> None:
        self._variants = variants

    def measure(self, work: str, seed: int) -> Measured:
        return Measured({name: one.measure(work, seed).tok_s[""] for name, one in self._variants.items()})

    def peak_bytes(self) -> int:
        return min(one.peak_bytes() for one in self._variants.values())

    def close(self) -> None:
        for one in self._variants.values():
            one.close()


class LlamaTools:
    """llama-bench for one request, llama-batched-bench for several; each turn is a run of the tool, its load not counted."""

    def __init__(self, folder: Path, model: str, threads: int, variants: dict[str, list[str]] | None = None) -> None:
        self._folder, self._model, self._threads = folder, model, threads
        self._variants = variants or {"": []}
        self._env = library_path(folder)
        self._depth = "--n-depth" in run_tool([str(folder / "llama-bench"), "--help"], self._env)

    def measure(self, work: str, seed: int) -> Measured:
        run = self._one if WORKS[work].requests == 1 else self._many
        return Measured({name: run(work, words) for name, words in self._variants.items()})

    def _one(self, work: str, words: list[str]) -> float:
        prompt, out = WORKS[work].own, WORKS[work].out
        if work in DECODING:  # generation after a prompt of this length
            test = ["-p", "0", "-n", str(out), "-d", str(prompt)] if self._depth else ["-p", "0", "-n", "0", "-gp", f"{prompt},{out}"]
        else:
            test = ["-p", str(prompt), "-n", "0"]
        sizes = ["-t", str(self._threads), "-fa", "1", "-b", "2048", "-ub", "512", "-r", "1", "-o", "json"]
        command = [str(self._folder / "llama-bench"), "-m", self._model, *sizes, *test, *words]
        return float(json.loads(run_tool(command, self._env))[-1]["avg_ts"])

    def _many(self, name: str, words: list[str]) -> float:
        """The tool knows prompts that are wholly alike or wholly different: shared prompts are taken as alike to the end."""
        work = WORKS[name]
        prompt = work.shared + work.own
        context = prompt + work.requests * (work.own + work.out) if work.shared else work.requests * (prompt + work.out)
        sizes = ["-t", str(self._threads), "-fa", "on", "-b", "2048", "-ub", "512", "-c", str(context + 256)]
        test = ["-npp", str(prompt), "-ntg", str(work.out), "-npl", str(work.requests), *(["-pps"] if work.shared else [])]
        output = run_tool([str(self._folder / "llama-batched-bench"), "-m", self._model, *sizes, *test, *words], self._env)
        return figure(name, batched_seconds(output))

    def peak_bytes(self) -> int:
        return 0

    def close(self) -> None:
        return None


def batched_seconds(output: str) -> float:
    """The whole time of the one test in llama-batched-bench's table: | PP | TG | B | N_KV | T_PP | S_PP | T_TG | S_TG | T | S |."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in output.splitlines() if line.startswith("|")]
    numbers = [row for row in rows if len(row) >= 10 and row[0].isdigit()]
    if len(numbers) != 1:
        raise EngineFailed(f"llama-batched-bench printed no table of one test:\n{output[-1000:]}")
    return float(numbers[0][8])


class LlamaServer:
    """llama-server over HTTP, its requests all sent at once."""

    def __init__(self, folder: Path, model: str, threads: int) -> None:
        context = max(work.requests * (work.shared + work.own + work.out) for work in WORKS.values()) + 4096
        words = ["-t", str(threads), "-fa", "on", "-np", "32", "-c", str(context)]
        self._server = HttpServer(llama_server_command(folder, model, words), library_path(folder))
        self._server.wait_until_ready()
        self._server.process.pause()

    def measure(self, work: str, seed: int) -> Measured:
        self._server.process.resume()
        tok_s = self._server.measure(work, seed)
        self._server.process.pause()
        return Measured({"": tok_s})

    def peak_bytes(self) -> int:
        return self._server.process.peak_bytes()

    def close(self) -> None:
        self._server.process.close()


def library_path(folder: Path) -> dict[str, str]:
    """Where llama.cpp's tools find the libraries beside them."""
    return {"LD_LIBRARY_PATH": f"{folder}:{folder.parent / 'lib'}"}


def llama_server_command(folder: Path, model: str, words: Sequence[str]) -> list[str]:
    return [str(folder / "llama-server"), "-m", model, *words, "--host", "127.0.0.1", "--port", "{port}", "--no-webui"]


def canter_env() -> dict[str, str]:
    """So that this checkout is the Canter that runs."""
    root = str(HERE.parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def vllm_env(python: Path, threads: int) -> dict[str, str]:
    """Without these libraries loaded first, vllm decodes at less than half the speed on the CPU."""
    found = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")),
        *sorted((python.parent.parent / "lib").glob("**/libiomp5.so")),
    ]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "LD_PRELOAD": ":".join(map(str, found)),
    }


def open_canter(arguments: dict[str, Any]) -> Driven:
    return Driven([sys.executable, str(HERE / "canter_driver.py"), json.dumps(arguments)], canter_env())


def open_vllm(python: Path, model: str, threads: int, max_len: int, dtype: str) -> Driven:
    return Driven([str(python), str(HERE / "vllm_driver.py"), model, str(max_len), dtype], vllm_env(python, threads))


def open_openvino(python: Path, model: str, threads: int) -> Driven:
    return Driven([str(python), str(HERE / "openvino_driver.py"), model, str(threads)])


def open_ik_bindings(python: Path, model: str, threads: int) -> BestOf:
    context = str(max(work.requests * (work.shared + work.own + work.out) for work in WORKS.values()) + 256)

    def one(repack: str) -> Driven:
        return Driven([str(python), str(HERE / "ik_llama_driver.py"), model, str(threads), context, "32", repack])

    return BestOf({"plain": one("0"), "repacked": one("1")})
