"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: bool = False) -> str:
    """Columns as wide as they need; all but the first are flushed right when `numeric`."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def joined(line: list[str]) -> str:
        cells = [
            cell.rjust(width) if numeric and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([joined(lines[0]), rule, *map(joined, lines[1:])])
