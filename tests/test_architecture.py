"""The import rules of ARCHITECTURE.md, held by reading every module of the package with `ast`."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from canter.models.registry import list_models

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "canter"

LAYERS = (
    ("cli",),
    ("server", "llm"),
    ("beam_search",),
    ("client", "engine"),
    ("scheduler", "runner", "text", "structured"),
    ("logits_processors",),
    ("models",),
    ("layers",),
    ("kernels", "device"),
    ("checkpoint",),
    ("core",),
)
"""Top to bottom; a part may import what stands below it, never a sibling."""

RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
TORCH_FREE = ("core", "checkpoint", "scheduler", "text", "structured", "client", "server")

CONFINED = {
    "tokenizers": ("canter.text",),
    "starlette": ("canter.server",),
    "uvicorn": ("canter.server",),
    "opentelemetry": ("canter.server.tracing",),
    "llguidance": ("canter.structured",),
    "xgrammar": ("canter.structured.xgrammar_worker",),
    "canter._native": ("canter.kernels.native",),
}
"""Library -> the only modules (with what is below them) that may import it."""

CUDA_PLACES = ("canter.device",)

LAZY_FACTORIES = {
    "canter": {"__getattr__"},
    "canter.cli.bench.limits": {"_loader", "_native_limits"},
    "canter.cli.main": {"load_command"},
    "canter.cli.collect_env": {"_torch_report"},
    "canter.cli.serve": {"run"},
    "canter.engine.__main__": {"main"},
    "canter.engine.grammars": {"load_vocabulary"},
    "canter.logits_processors.loading": {"load_class"},
    "canter.models.registry": {"get_model_class"},
    "canter.server.tracing": {"load_sdk"},
    "canter.structured.compiler": {"load_backend"},
    "canter.structured.xgrammar_worker": {"load_library"},
}
"""Module -> functions that may import: they load what only some processes need."""


@dataclass(frozen=True)
class Import:
    """One import statement: what it names, whether it only serves type checking, and the function around it."""

    target: str
    line: int
    typing_only: bool
    function: str | None


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    path = sources()[name]
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def resolved(name: str, node: ast.ImportFrom) -> str:
    """The absolute module of a possibly relative `from` import."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    is_package = sources()[name].name == "__init__.py"
    base = parts[: len(parts) - node.level + is_package]
    return ".".join(base + ([node.module] if node.module else []))


def targets(name: str, node: ast.AST) -> list[str]:
    """What a statement or call imports: modules, and `package.name` where the name is itself a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = resolved(name, node)
        named = [f"{base}.{alias.name}" for alias in node.names]
        submodules = [target for target in named if target in sources() or target == "canter._native"]
        return submodules if len(submodules) == len(named) else [base, *submodules]
    if isinstance(node, ast.Call):
        called = node.func
        spelled = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if spelled in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            return [first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "<computed>"]
    return []


@cache
def imports(name: str) -> tuple[Import, ...]:
    found: list[Import] = []

    def visit(node: ast.AST, function: str | None, typing_only: bool) -> None:
        for target in targets(name, node):
            found.append(Import(target, getattr(node, "lineno", 0), typing_only, function))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        for field, value in ast.iter_fields(node):
            guarded = typing_only or (isinstance(node, ast.If) and field == "body" and "TYPE_CHECKING" in ast.dump(node.test))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, function, guarded)

    visit(tree(name), None, False)
    return tuple(found)


def part_of(module: str) -> str | None:
    """The part of the package a module belongs to: its first name below `canter`; None for the root and for other libraries."""
    parts = module.split(".")
    return parts[1] if parts[0] == "canter" and len(parts) > 1 else None


def is_within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


MODULES = sorted(sources())


def test_the_layers_are_the_parts_that_exist() -> None:
    assert set(RANK) == {part for name in MODULES if (part := part_of(name)) not in (None, "version", "__main__")}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_stands_below_it(name: str) -> None:
    own = part_of(name)
    if own in (None, "version", "__main__"):
        return
    assert own in RANK, f"{name}: the part {own!r} has no place in the layers of ARCHITECTURE.md"
    wrong = []
    for item in imports(name):
        part = part_of(item.target)
        if item.target == "canter" and own not in ("cli",):
            wrong.append(f"line {item.line}: the package root (name the module instead)")
        if part is None or part in (own, "version", "_native"):
            continue
        if part not in RANK or RANK[part] <= RANK[own]:
            wrong.append(f"line {item.line}: {item.target}")
    assert not wrong, f"{name} may not import: " + "; ".join(wrong)


@pytest.mark.parametrize("name", MODULES)
def test_confined_libraries_stay_where_they_belong(name: str) -> None:
    wrong = [
        f"line {item.line}: {item.target} belongs to {', '.join(places)}"
        for item in imports(name)
        for library, places in CONFINED.items()
        if is_within(item.target, library) and not any(is_within(name, place) for place in places)
    ]
    assert not wrong, f"{name}: " + "; ".join(wrong)


LINE_LENGTH = 140
"""Of C++ as of Python, where ruff sees to it."""


def test_lines_of_the_native_core_are_short_enough() -> None:
    files = sorted(path for folder in ("csrc", "tests/native") for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".h"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LINE_LENGTH
    ]
    assert not wrong, f"longer than {LINE_LENGTH} columns: " + ", ".join(wrong)


@pytest.mark.parametrize("name", MODULES)
def test_torch_cuda_is_named_only_by_devices(name: str) -> None:
    if any(is_within(name, place) for place in CUDA_PLACES):
        return
    lines = [
        node.lineno
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    lines += [item.line for item in imports(name) if is_within(item.target, "torch.cuda")]
    assert not lines, f"{name} names torch.cuda on lines {lines}"


@pytest.mark.parametrize("name", MODULES)
def test_no_import_inside_a_function(name: str) -> None:
    allowed = LAZY_FACTORIES.get(name, set())
    wrong = [f"line {i.line}: {i.target} in {i.function}" for i in imports(name) if i.function is not None and i.function not in allowed]
    assert not wrong, f"{name}: move to the top of the file, or list the function among the lazy factories: " + "; ".join(wrong)


def test_the_lazy_factories_exist() -> None:
    for name, functions in LAZY_FACTORIES.items():
        assert name in sources(), f"{name} is listed as holding lazy factories and does not exist"
        real = {node.name for node in ast.walk(tree(name)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        assert functions <= real, f"{name} has no {functions - real}"


def loaded_by(name: str) -> set[str]:
    """Modules that run when `name` is imported: what its top level names, and the packages around each."""
    direct = {item.target for item in imports(name) if not item.typing_only and item.function is None}
    everything = set()
    for target in direct | {name}:
        parts = target.split(".")
        everything |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    return everything - {name}


def path_to_torch(start: str) -> list[str] | None:
    """A chain of imports from `start` to torch, or None."""
    waiting, came_from = [start], {start: ""}
    while waiting:
        name = waiting.pop(0)
        if name == "torch":
            chain = [name]
            while came_from[chain[-1]]:
                chain.append(came_from[chain[-1]])
            return chain[::-1]
        for target in sorted(loaded_by(name)) if name in sources() else ():
            if target not in came_from:
                came_from[target] = name
                waiting.append(target)
    return None


@pytest.mark.parametrize("name", [m for m in MODULES if part_of(m) in TORCH_FREE])
def test_torch_free_parts_reach_no_torch(name: str) -> None:
    chain = path_to_torch(name)
    assert chain is None, " → ".join(chain or [])


FAMILIES = sorted({row.module for row in list_models()})


@pytest.mark.parametrize("name", FAMILIES)
def test_model_families_import_no_other_family(name: str) -> None:
    wrong = [item.target for item in imports(name) for family in FAMILIES if family != name and is_within(item.target, family)]
    assert not wrong, f"{name} imports other families: {wrong}"


LIGHT_MODULES = ["canter", "canter.cli.main", *(f"canter.{part}" for part in TORCH_FREE)]


@pytest.mark.parametrize("name", LIGHT_MODULES)
def test_importing_a_light_module_loads_no_torch(name: str) -> None:
    """What the source promises, seen in a running interpreter: every module of the part is imported."""
    everything = [m for m in MODULES if is_within(m, name) and name not in ("canter", "canter.cli.main")] or [name]
    everything = [m for m in everything if not m.endswith("__main__")]
    script = f"import importlib, sys\nfor m in {everything!r}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "False", f"importing {name} loads torch"


def test_the_frontend_loads_no_numpy() -> None:
    """Ten megabytes that a server's frontend has no use for until a request brings a grammar."""
    script = "import sys, canter.server.serve\nprint('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "False", "canter.server.serve loads numpy"
