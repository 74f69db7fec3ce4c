"""The plain backend, which others are tested against, against itself in other ways."""

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from tqchat.kernels import Backend


@pytest.mark.parametrize(
    "options", [{}, {"window": 30}, {"softcap": 3.0}, {"sinks": True}, {"window": 7, "sinks": True}]
)
def test_queries_a_few_at_a_time_see_the_same(options: dict[str, Any]) -> None:
    backend = Backend(mx.float32)
    mx.random.seed(0)
    q = mx.random.normal((4, 50, 32))
    k, v = (mx.random.normal((2, 90, 32)) for _ in "kv")
    if "sinks" in options:
        options = options | {"sinks": mx.random.normal((4,))}
    expected = np.array(backend.attend_dense(q, k, v, 0.2, **options))
    # 7 queries of 4 heads at a time: the last piece is a single one.
    with patch("tqchat.kernels.backend.SCORES_BYTES", 7 * 4 * 4 * 90):
        ours = np.array(backend.attend_dense(q, k, v, 0.2, **options))
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)
