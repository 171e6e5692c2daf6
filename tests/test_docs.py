"""The documentation says what is: generated pages, links, commands and flags."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from canter.cli.main import COMMANDS, load_command, split_command
from canter.core.config import EngineArgs
from canter.models.registry import list_models
from canter.server.app import ROUTES
from canter.server.args import ServerArgs
from tests.test_architecture import LAYERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")
CODE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_in(page: Path) -> list[str]:
    """Lines of code blocks that call `canter`, without comments."""
    text = "\n".join(CODE.findall(page.read_text(encoding="utf-8")))
    return [line.split("  #")[0].strip() for line in text.splitlines() if line.strip().startswith("canter ")]


def test_generated_pages_are_up_to_date() -> None:
    assert generator().main(["--check"]) == 0, "run `make docs`"


def test_the_reference_names_every_argument() -> None:
    page = (ROOT / "docs" / "reference" / "engine-arguments.md").read_text(encoding="utf-8")
    for arguments in (EngineArgs, ServerArgs):
        for field in dataclasses.fields(arguments):
            assert f"`--{field.name.replace('_', '-')}`" in page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link and not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_code_blocks_parse(page: Path) -> None:
    for line in commands_in(page):
        name, rest = split_command(shlex.split(line)[1:])
        if name is None:
            assert rest == ["--help"], line
            continue
        load_command(COMMANDS[name][0]).build_parser().parse(rest)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_in_the_text_exist(page: Path) -> None:
    parsers = [load_command(module).build_parser() for module, _ in COMMANDS.values()]
    known = {flag for parser in parsers for flag in parser._option_string_actions}  # type: ignore[attr-defined]
    mentioned = {code.split()[0] for code in INLINE.findall(page.read_text(encoding="utf-8")) if code.startswith("--") and len(code) > 2}
    unknown = {flag.split("=")[0].split(".")[0].replace("_", "-") for flag in mentioned} - known - {"--no-", "--check"}
    assert not unknown


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "reference"], ids=name_of)
def test_paths_in_the_text_exist(page: Path) -> None:
    """`a/b.py` and `a/` in backticks are files and folders of the repository or of the package; `./a` and `owner/name` are a user's."""
    pattern = re.compile(r"[\w.]+(?:/[\w.]+)+/?")
    paths = {
        code
        for code in INLINE.findall(page.read_text(encoding="utf-8"))
        if pattern.fullmatch(code) and not code.startswith(("./", "owner/"))
    }
    missing = [path for path in paths if not ((ROOT / path).exists() or (ROOT / "canter" / path).exists())]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_functions_in_the_text_exist(page: Path) -> None:
    """`a/b.py: name` in backticks is a function or class of that file of the package."""
    named = re.findall(r"`([\w/]+\.py): (\w+)`", page.read_text(encoding="utf-8"))
    missing = [
        f"{path}: {name}"
        for path, name in named
        if not re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", (ROOT / "canter" / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not missing


def test_the_architecture_names_every_dependency() -> None:
    """Each has its row of the table: why, licence, size."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## Dependencies")[2].partition("\n## ")[0]
    names = {re.split(r"[<>=;~ ]", dependency)[0] for dependency in needed}
    assert {name for name in names if not re.search(rf"\b{name}\b", section)} == set()


def test_the_architecture_draws_the_layers_that_are_tested() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert " → ".join(" | ".join(parts) for parts in LAYERS) in page


def test_the_readme_or_the_guide_names_every_route_and_the_readme_every_family() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    guide = (ROOT / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
    for route in ROUTES:
        if route.path not in ("/v1/models/{model:path}", "/ping", "/version"):
            path = route.path.replace("{response_id}", "{id}")
            assert path in text or path in guide, path
    for row in list_models():
        assert row.family.split(",")[0].split()[0].rstrip("-0123456789") in text, row.family


def test_the_makefile_has_what_the_readme_promises() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name_of(page)}: make {target}"


def test_torch_is_pinned_to_a_cpu_build() -> None:
    pins = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==[\d.]+\+cpu$", pins, re.MULTILINE)
    assert not re.search(r"^(nvidia|cuda)", pins, re.MULTILINE | re.IGNORECASE)
