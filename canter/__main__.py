"""`python -m canter` is the `canter` command."""

from __future__ import annotations

import sys

from canter.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
