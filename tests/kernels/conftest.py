"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from canter.kernels import native


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test under each instruction set that this machine has."""
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Put the number of threads back after a test that changes it."""
    before = native.num_threads()
    yield
    native.set_num_threads(before)
