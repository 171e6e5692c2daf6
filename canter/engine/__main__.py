"""`python -m canter.engine`: the engine process, as a client starts it. What makes its imports quick comes before them."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import cast

from canter.engine import lean_torch


def main() -> int:
    gc.disable()  # imports make hundreds of thousands of objects that stay: looking through them again and again frees nothing
    lean_torch.install()
    return cast(int, importlib.import_module("canter.engine.process").main())


if __name__ == "__main__":
    sys.exit(main())
