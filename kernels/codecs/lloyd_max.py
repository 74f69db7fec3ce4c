"""Scalar codebooks of least mean squared error (Lloyd 1982, doi:10.1109/TIT.1982.1056489)."""

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

POINTS = 1 << 16
"""Of the grid on which a density is integrated."""


def codebook(density: Callable[[Floats], Floats], low: float, high: float, n: int) -> Floats:
    """n values in rising order for a density on (low, high), which need not be normalised.

    Lloyd's iteration: every value becomes the mean of what is nearest to it. It finds the best
    codebook where the density is log-concave, as all here are.
    """
    edges = np.linspace(low, high, POINTS + 1)
    x = (edges[1:] + edges[:-1]) / 2
    weight = density(x)
    mass = np.concatenate([[0.0], np.cumsum(weight)])
    moment = np.concatenate([[0.0], np.cumsum(weight * x)])
    quantiles = (np.arange(n) + 0.5) / n * mass[-1]
    values = np.interp(quantiles, mass, edges)
    while True:
        bounds = np.concatenate([[low], (values[1:] + values[:-1]) / 2, [high]])
        moments, masses = (np.diff(np.interp(bounds, edges, x)) for x in (moment, mass))
        means: Floats = moments / masses
        if np.abs(means - values).max() < 1e-9 * (high - low):
            return means
        values = means


@functools.cache
def sphere(dim: int, bits: int) -> Floats:
    """For a coordinate of a random unit vector: times sqrt(dim), it is nearly a normal number.

    Its density is Beta's, proportional to (1 - x^2) ** ((dim - 3) / 2).
    """
    # Past 8 standard deviations there is nothing that 64-bit numbers could count.
    reach = min(1.0, 8 / math.sqrt(dim))
    return codebook(lambda x: (1 - x * x) ** ((dim - 3) / 2), -reach, reach, 1 << bits)


@functools.cache
def polar(level: int, bits: int) -> Floats:
    """For PolarQuant's angle of a level from 2 on, between 0 and pi / 2.

    It lies between two radii of 2 ** (level - 1) normal coordinates each, so its density is
    proportional to sin(2 psi) ** (2 ** (level - 1) - 1).
    """
    power = 2 ** (level - 1) - 1
    return codebook(lambda psi: np.sin(2 * psi) ** power, 0, math.pi / 2, 1 << bits)
