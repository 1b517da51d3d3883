"""Faults to plant in a kernel."""

from __future__ import annotations

from typing import Any


class without_the_last_program:  # noqa: N801 - reads as what it does to a kernel
    """A kernel whose last row of programs is never launched, over outputs that hold what memory held before: NaN."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid[0] > 1, "a grid of one program: nothing would be left to compare"

        def launch(*arguments: Any, **constants: Any) -> Any:
            return self._kernel[(grid[0] - 1, *grid[1:])](*arguments, **constants)

        return launch
