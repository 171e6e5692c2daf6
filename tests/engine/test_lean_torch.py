"""The engine's process starts with part of torch deferred, and can have it all."""

from __future__ import annotations

import subprocess
import sys

from canter.client.launch import EngineLaunch
from canter.engine.lean_torch import DEFERRED

SCRIPT = """
import sys
from canter.engine import lean_torch
lean_torch.install()
import torch
def waiting():
    return [name for name in lean_torch.DEFERRED if isinstance(sys.modules.get(name), lean_torch._StandIn)]
print(*waiting())
print(callable(torch.export.export), "torch.export" in waiting(), "torch._meta_registrations" in waiting())
lean_torch.complete()
print(waiting(), (torch.empty(2, 3, device="meta") @ torch.empty(3, 4, device="meta")).shape == (2, 4))
"""


def test_modules_are_loaded_when_asked_for_or_all_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    deferred, asked, completed = done.stdout.splitlines()
    assert "torch._meta_registrations" in deferred.split() and set(deferred.split()) <= set(DEFERRED)
    assert asked == "True False True"
    assert completed == "[] True"


def test_an_engine_that_nobody_wants_after_all_ends() -> None:
    launch = EngineLaunch()
    launch.close()
    assert launch.process.wait(120) == 0
    launch.discard()


def test_a_discarded_engine_is_gone() -> None:
    launch = EngineLaunch()
    launch.discard()
    launch.discard()
    assert not launch.is_alive
