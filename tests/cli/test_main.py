"""Dispatch: help without imports, unknown commands, exit statuses."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from canter.cli import main as cli
from canter.core.errors import ConfigError
from canter.version import __version__

HEAVY = ("torch", "numpy", "httpx", "starlette", "uvicorn", "tokenizers", "msgspec", "tqdm")


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"canter {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_parser_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*name.split(), "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: canter {name}")


def test_commands_may_be_spelt_with_an_underscore() -> None:
    assert cli.split_command(["collect_env"]) == ("collect-env", [])
    assert cli.split_command(["bench", "serve", "--seed", "1"]) == ("bench serve", ["--seed", "1"])


def test_unknown_commands_get_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sevre"]) == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert "Commands: serve, chat" in capsys.readouterr().err
    assert cli.main(["bench", "latncy"]) == 2
    assert "unknown benchmark 'latncy'. Did you mean 'bench latency'?" in capsys.readouterr().err


def test_bench_alone_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    shown = capsys.readouterr()
    assert "canter bench latency" in shown.out and not shown.err
    assert cli.main(["bench"]) == 2
    shown = capsys.readouterr()
    assert "canter bench latency" in shown.err and not shown.out


def test_interrupted_while_loading_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_command", load)
    assert cli.main(["serve"]) == 130


def test_models_that_match_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--search", "qwen"]) == 0
    assert "Qwen2ForCausalLM" in capsys.readouterr().out
    assert cli.main(["models", "--search", "zzz"]) == 1
    assert "No architecture contains 'zzz'." in capsys.readouterr().out


class _Command:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def build_parser(self) -> _Command:
        return self

    def parse(self, argv: object) -> object:
        return argv

    def run(self, namespace: object) -> int:
        if self.error is not None:
            raise self.error
        return 7


@pytest.mark.parametrize(("error", "status"), [(None, 7), (ConfigError("no such model"), 1), (KeyboardInterrupt(), 130)])
def test_exit_statuses(
    error: BaseException | None, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "load_command", lambda module: _Command(error))
    assert cli.main(["models"]) == status
    assert capsys.readouterr().err == ("canter models: no such model\n" if status == 1 else "")


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load_command", lambda module: _Command(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["models"])


def test_help_imports_nothing_heavy() -> None:
    script = f"import sys; from canter.cli.main import main; main(['--help']); print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("[]")


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if not name.startswith("bench") and name not in ("serve", "kernels")])
def test_light_commands_load_without_torch(name: str) -> None:
    script = f"import sys, importlib; importlib.import_module({cli.COMMANDS[name][0]!r}).build_parser(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_modules_of_all_commands_exist() -> None:
    for module, _ in cli.COMMANDS.values():
        loaded = importlib.import_module(module)
        assert callable(loaded.build_parser) and callable(loaded.run)
