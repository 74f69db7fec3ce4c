"""Rotary position embedding (arXiv:2104.09864) as config.json describes it."""

import math
from dataclasses import dataclass

from tqchat.models.config import LARGEST, SMALLEST, Config
from tqchat.models.errors import ModelError

KINDS = ("linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class Rotation:
    """periods: positions per radian of each pair of channels (i, i + len(periods)).

    Channels past the pairs, and pairs of an infinite period, are left alone. What turns is also
    multiplied by `factor`. `context`: the length that the scaling is made for, 0 if it says none.
    """

    periods: tuple[float, ...]
    factor: float = 1.0
    context: int = 0


def read_rotation(config: Config, head_dim: int) -> Rotation:
    """From `rope_parameters`, or `rope_scaling` and `rope_theta`. Raises ModelError."""
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling") or parameters
    base = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    return rotation(config, scaling, base, head_dim)


def rotation(config: Config, scaling: Config, base: float, head_dim: int) -> Rotation:
    """The rotation of one `rope_parameters` section; `config` has what stands outside of it.

    Scaling is none, or
    - linear: all periods longer by a factor
    - llama3: long wavelengths longer by a factor, short ones as they are, blended between (Llama
      3.1's model card)
    - yarn: the same, blended by channel (arXiv:2309.00071)
    - longrope: a factor per channel (arXiv:2402.13753)
    - proportional: the periods of a whole head, of which a part is used (Gemma 4)
    Raises ModelError.
    """
    share = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rotated = int(head_dim * share)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ModelError(
            f"{config.name}: a partial_rotary_factor of {share} is not supported for a head_dim "
            f"of {head_dim}."
        )
    width = head_dim if kind == "proportional" else rotated
    periods = [base ** (2 * i / width) for i in range(rotated // 2)]
    factor, context = 1.0, 0
    if kind == "linear":
        stretch = scaling.number("factor")
        periods = [period * stretch for period in periods]
    elif kind == "llama3":
        periods = _llama3(config, scaling, periods)
    elif kind == "yarn":
        periods, factor = _yarn(config, scaling, base, periods)
        context = int(scaling.number("factor") * _trained(config, scaling))
    elif kind in ("longrope", "su"):
        periods, factor = _longrope(config, scaling, periods)
    elif kind == "proportional":
        stretch = scaling.number("factor", 1.0)
        periods = [period * stretch for period in periods]
    # Multimodal models turn by three coordinates, which are one and the same in text.
    elif kind not in ("default", "mrope"):
        known = ", ".join(KINDS)
        raise ModelError(
            f"{config.name}: RoPE scaling {kind!r} is not supported ({known} are). Choose another "
            "model."
        )
    if not all(SMALLEST < x < LARGEST for x in (*periods, factor)) or context >= 2**31:
        raise ModelError(
            f"{config.name}: rope_theta and RoPE's scaling in config.json lead to numbers past "
            "float32's range. Fetch the model again, or choose another."
        )
    periods += [math.inf] * ((width - rotated) // 2)
    return Rotation(tuple(periods), factor, context)


def _trained(config: Config, scaling: Config) -> float:
    """The context before it was extended."""
    key = "original_max_position_embeddings"
    return (scaling if key in scaling else config).number(
        key, config.number("max_position_embeddings", 2048)
    )


def _llama3(config: Config, scaling: Config, periods: list[float]) -> list[float]:
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    trained = scaling.number("original_max_position_embeddings")
    if low >= high:
        raise ModelError(
            f"{config.name}: low_freq_factor in config.json is not below high_freq_factor. "
            "Fetch the model again, or choose another."
        )

    def stretched(period: float) -> float:
        turns = trained / (2 * math.pi * period)
        if turns > high:
            return period
        if turns < low:
            return period * factor
        return _blend(period, factor, (turns - low) / (high - low))

    return [stretched(period) for period in periods]


def _yarn(
    config: Config, scaling: Config, base: float, periods: list[float]
) -> tuple[list[float], float]:
    factor, trained = scaling.number("factor"), _trained(config, scaling)
    if base <= 1:
        raise ModelError(f"{config.name}: YaRN in config.json needs a rope_theta above 1.")

    def channel(turns: float) -> float:
        """Where a wavelength fits `turns` times into the trained context."""
        return len(periods) * math.log(trained / (turns * 2 * math.pi)) / math.log(base)

    low = channel(scaling.number("beta_fast", 32.0))
    high = channel(scaling.number("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(periods) - 1)
    width = high - low or 0.001
    kept = [1 - min(max((i - low) / width, 0.0), 1.0) for i in range(len(periods))]
    periods = [_blend(period, factor, share) for period, share in zip(periods, kept, strict=True)]
    if scaling.get("attention_factor") is not None:
        return periods, scaling.number("attention_factor")

    def mscale(key: str, default: float) -> float:
        weight = scaling.number(key) if scaling.get(key) else default
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    return periods, mscale("mscale", 1.0) / mscale("mscale_all_dim", 0.0)


def _longrope(config: Config, scaling: Config, periods: list[float]) -> tuple[list[float], float]:
    """A context that is longer than the trained one has its long factors from the first token on.

    Factors that changed with the length would leave a cache of keys turned in two ways.
    """
    trained = _trained(config, scaling)
    stretch = config.number("max_position_embeddings") / trained
    key = "long_factor" if stretch > 1 else "short_factor"
    factors = scaling.get(key)
    if not isinstance(factors, list) or len(factors) != len(periods):
        raise ModelError(
            f"{config.name}: {key!r} in config.json is not a list of {len(periods)} numbers."
        )
    entries = Config(config.name, {f"{key}[{i}]": value for i, value in enumerate(factors)})
    periods = [period * entries.number(name) for period, name in zip(periods, entries, strict=True)]
    if scaling.get("attention_factor") is not None:
        return periods, scaling.number("attention_factor")
    if stretch <= 1 or trained <= 1:
        return periods, 1.0
    return periods, math.sqrt(1 + math.log(stretch) / math.log(trained))


def _blend(period: float, factor: float, kept: float) -> float:
    """Between `period` (kept 1) and `factor` times it (kept 0), linear in the frequency."""
    return 1 / ((1 - kept) / (factor * period) + kept / period)
