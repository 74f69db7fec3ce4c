"""What the tests of kernels share."""

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """MLX's random numbers are the same in every run, whichever tests run before."""
    mx.random.seed(0)
