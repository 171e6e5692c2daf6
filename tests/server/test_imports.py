from __future__ import annotations

import subprocess
import sys


def test_the_frontend_never_loads_torch() -> None:
    """Every module of `canter.server` and `canter.client`, as a server process would load them."""
    script = (
        "import importlib, pkgutil, sys\n"
        "for name in ('canter.server', 'canter.client'):\n"
        "    package = importlib.import_module(name)\n"
        "    for module in pkgutil.walk_packages(package.__path__, name + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "assert 'canter.server.serve' in sys.modules and 'canter.client.remote' in sys.modules\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'a heavy library was loaded'\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
