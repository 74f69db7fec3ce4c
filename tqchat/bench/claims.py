"""The claims of Open-TQ-Metal, its paper's and its README's, each with what decides it here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean
from typing import Literal

import mlx.core as mx

from tqchat.bench.activations import GEMMA_4, LLAMA_70B
from tqchat.bench.evidence import SCALES, SYNTHETIC, Evidence
from tqchat.bench.predictions import FP16
from tqchat.bench.schemes import INT4
from tqchat.bench.synthetic import CONFIGS
from tqchat.engine import plan
from tqchat.kernels.codecs import CODECS
from tqchat.models.config import Config
from tqchat.models.registry import architecture

Verdict = Literal["holds", "does not hold here", "cannot be judged here"]

CONTEXT = 131072
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    claim: str
    verdict: Verdict
    why: str


def _scale_of_attention(e: Evidence) -> Finding:
    loud, soft = (e.effect(LLAMA_70B, "polarquant-5", scale) for scale in reversed(SCALES))
    times = (1 - loud.cosine) / (1 - soft.cosine)
    return Finding(
        "A scale of 0.0884 damps PolarQuant's error 25 to 100 times, against 1.0",
        "holds" if 25 <= times <= 100 else "does not hold here",
        f"On the same activations (Llama 70B's shape) scores err {loud.score_error:.2f} at 1.0 and "
        f"{soft.score_error:.3f} at 0.0884, {loud.score_error / soft.score_error:.1f} times as the "
        f"scales are; the output's cosine is off by {1 - loud.cosine:.4f} and "
        f"{1 - soft.cosine:.5f}, {times:.1f} times.",
    )


def _int4_at_any_scale(e: Evidence) -> Finding:
    pairs = {
        shape.name: [1 - e.effect(shape, codec, 1.0).cosine for codec in SYNTHETIC[:2]]
        for shape in (LLAMA_70B, GEMMA_4)
    }
    holds = all(2 * int4 < polar for int4, polar in pairs.values())
    off = "; ".join(f"{name}: {int4:.4f} and {p:.4f}" for name, (int4, p) in pairs.items())
    return Finding(
        "At a scale of 1.0 int4 still works where PolarQuant fails, because its errors cancel",
        "holds" if holds else "does not hold here",
        f"Output's cosine off by, int4 ({e.bits['open-tq-metal']:.1f} bits) and PolarQuant "
        f"({e.bits['polarquant-5']:.1f}), made-up activations: {off}. "
        f"Real ones of a Gemma are not at hand.",
    )


def _polar_cosine(e: Evidence) -> Finding:
    rows = e.layers["polarquant-5"]
    mean = e.mean("polarquant-5", "cosine")
    worst = min(row.cosine for row in rows)
    return Finding(
        "PolarQuant at 5 bits reaches a cosine of 0.989 with standard attention scale",
        "holds" if mean >= 0.989 else "does not hold here",
        f"Attention's output on {e.model}: {mean:.4f} in the mean of all layers, {worst:.4f} in "
        "the worst.",
    )


def _polar_size(e: Evidence) -> Finding:
    times = 16 / e.bits["polarquant-5"]
    return Finding(
        "PolarQuant at 5 bits compresses less than int4 (1.95 times to 3.2)",
        "holds" if times < 16 / e.bits["open-tq-metal"] else "does not hold here",
        f"Packed, it takes {e.bits['polarquant-5']:.2f} bits per element: {times:.2f} times less "
        "than fp16.",
    )


def _qjl_correlation(e: Evidence) -> Finding:
    mean = e.mean("qjl", "score_correlation")
    return Finding(
        "QJL's scores correlate with the exact ones by about 0.85 in a layer",
        "holds" if abs(mean - 0.85) <= 0.03 else "does not hold here",
        f"{mean:.3f} in the mean of {e.model}'s layers, with 3 bits per channel of K.",
    )


def _qjl_by_depth(e: Evidence) -> Finding:
    rows = [row.score_correlation for row in e.layers["qjl"]]
    early, deep = fmean(rows[: len(rows) // 8 + 1]), fmean(rows[len(rows) // 2 :])
    return Finding(
        "QJL's correlation falls with depth, from 0.93 in the first layers to 0.80",
        "holds" if early - deep >= 0.05 else "does not hold here",
        f"{early:.3f} in the first eighth of {e.model}'s layers, {deep:.3f} in the second half.",
    )


def _compounding(e: Evidence) -> Finding:
    rows = {e.n_layers: e.layers["qjl"], **e.stacks}
    products = {n: prod(row.score_correlation for row in each) for n, each in rows.items()}
    seen = {n: each[-1].compounded_cosine for n, each in rows.items()}
    text = "; ".join(f"{n}: {products[n]:.0e}, {seen[n]:.2f}" for n in rows)
    return Finding(
        "QJL's correlations multiply over the layers (0.85 to the 80th), so the signal is gone",
        "holds" if all(seen[n] < 10 * products[n] for n in rows) else "does not hold here",
        f"Layers: product of correlations, and cosine of the last layer's output with fp16's: "
        f"{text} ({e.model}, then random layers). Layers add to what came before them, so errors "
        "do not multiply.",
    )


def _qjl_fails(e: Evidence) -> Finding:
    qjl, seed = e.predictions["qjl"], e.predictions["open-tq-metal"]
    return Finding(
        "QJL keys ruin what the model says",
        "holds" if qjl.same_top1 < 0.7 else "does not hold here",
        f"{e.model}: KL {qjl.kl:.3f} and the same likeliest token {qjl.same_top1:.0%} of the time; "
        f"int4 {seed.kl:.4f} and {seed.same_top1:.0%}.",
    )


def _hybrid_saves_little(e: Evidence) -> Finding:
    saved = 10 / 80 * (1 - e.bits["qjl"] / e.bits["open-tq-metal"])
    return Finding(
        "QJL in the first 10 of 80 layers saves only 1.7% of the cache",
        "holds" if saved < 0.03 else "does not hold here",
        f"{saved:.1%}, by the bits that are stored.",
    )


def _qjl_size(e: Evidence) -> Finding:
    state = CODECS["qjl"].keys.encode(mx.zeros((1, 32, LLAMA_70B.head_dim), mx.float16))
    times = 32 * LLAMA_70B.head_dim * 2 / sum(array.nbytes for array in state)
    return Finding(
        "QJL compresses keys more than 5 times",
        "holds" if times > 5 else "does not hold here",
        f"{times:.2f} times with 3 bits per channel, at head_dim {LLAMA_70B.head_dim}.",
    )


def _values_matter_more(e: Evidence) -> Finding:
    k, v = e.mean("open-tq-metal", "k_cosine"), e.mean("open-tq-metal", "v_cosine")
    return Finding(
        "int4 V costs more than int4 K (cosines of 0.994 and 0.998)",
        "holds" if v < k else "does not hold here",
        f"{e.model}, the output's cosine: V alone {v:.4f}, K alone {k:.4f}.",
    )


def _identical(e: Evidence) -> Finding:
    row, ours = e.predictions["open-tq-metal"], e.predictions[INT4.name]
    return Finding(
        "int4 leaves the most likely token what it is",
        "holds" if row.same_top1 == 1.0 else "does not hold here",
        f"{row.same_top1:.1%} of {e.model}'s predictions; tqchat's int4: {ours.same_top1:.1%}.",
    )


def _sweet_spot(e: Evidence) -> Finding:
    seed = e.predictions["open-tq-metal"]
    others = [e.predictions[n] for n in ("polarquant-5", "turboquant-4", "qjl", "mlx-lm")]
    best = min(others, key=lambda row: row.kl)
    return Finding(
        "Of all at about 5 bits, int4 per token in groups of 32 has the best quality",
        "holds" if seed.kl < best.kl else "does not hold here",
        f"{e.model}: KL {seed.kl:.4f} at {e.model_bits['open-tq-metal']:.1f} bits; {best.kind} "
        f"{best.kl:.4f} at {e.model_bits[best.kind]:.2f}; K per channel instead "
        f"{e.predictions['product'].kl:.4f} at {e.model_bits['product']:.1f}.",
    )


def _turboquant_neutral(e: Evidence) -> Finding:
    exact = e.predictions[FP16].perplexity
    three, four = (e.predictions[f"turboquant-{n}"].perplexity / exact - 1 for n in (3, 4))
    between: Verdict = "cannot be judged here" if four < 0.01 else "does not hold here"
    return Finding(
        "TurboQuant is as good as fp16 at 3.5 bits",
        "holds" if three < 0.01 else between,
        f"{e.model}'s perplexity {three:+.1%} at {e.model_bits['turboquant-3']:.2f} bits, "
        f"{four:+.1%} at {e.model_bits['turboquant-4']:.2f}; there is no form of 3.5 bits here.",
    )


def _turboquant_low(e: Evidence) -> Finding:
    more = e.predictions["turboquant-2"].perplexity / e.predictions[FP16].perplexity - 1
    return Finding(
        "TurboQuant loses little at 2.5 bits",
        "holds" if more < 0.05 else "does not hold here",
        f"Perplexity of {e.model} {more:+.1%} at {e.model_bits['turboquant-2']:.2f} bits.",
    )


def _polar_slower(e: Evidence) -> Finding:
    polar, seed = e.seconds["polarquant-5"], e.seconds["open-tq-metal"]
    if not e.on_metal:
        return Finding(
            "PolarQuant's kernel is slower than int4's",
            "cannot be judged here",
            f"Its kernel is Metal's; in plain operations on {e.backend}: {1e3 * polar:.1f} ms, "
            f"int4 {1e3 * seed:.1f} ms.",
        )
    ours = "one kernel for scores, the rest in plain operations"
    return Finding(
        "PolarQuant's kernel is slower than int4's",
        "holds" if polar > seed else "does not hold here",
        f"{1e3 * polar:.2f} ms ({ours}), int4 in plain operations {1e3 * seed:.2f} ms.",
    )


def _compression(e: Evidence) -> Finding:
    times = 16 / e.bits["open-tq-metal"]
    return Finding(
        "int4 in groups of 32 takes 3.2 times less than fp16",
        "holds" if round(times, 1) == 3.2 else "does not hold here",
        f"{times:.2f} times, counted from what is stored.",
    )


def _cache_size(e: Evidence) -> Finding:
    fp16, int4, _ = _llama_70b()
    return Finding(
        "Llama 70B's cache at 128K takes 40 GB in fp16 and 12.5 GB in int4",
        "holds" if round(fp16) == 40 and round(2 * int4) == 25 else "does not hold here",
        f"{fp16:.1f} and {int4:.1f} GiB, with tqchat's tail and sink.",
    )


def _fits(e: Evidence) -> Finding:
    total = _llama_70b()[2]
    default = 0.75 * 64
    return Finding(
        "Llama 70B with 128K fits on a Mac of 64 GB with 10.4 GB to spare",
        "holds" if total <= default else "does not hold here",
        f"It takes {total:.1f} GiB; as macOS is set up, a GPU may have about {default:.0f} of 64. "
        "With the limit raised it fits: `tqchat plan` has the command.",
    )


def _llama_70b() -> tuple[float, float, float]:
    """GiB of Llama 70B at 128K: the cache in fp16, in int4, and all with int4."""
    config = Config("llama-70b", CONFIGS["llama-70b"])
    shape = architecture(config).parse(config)
    weights = round(shape.n_parameters * 4.5 / 8)
    need = plan.need(shape, weights, CONTEXT, "int4", plan.Prefill(512))
    return need.kv_fp16 / GIB, need.kv / GIB, need.total / GIB


def _preallocated(e: Evidence) -> Finding:
    ours, seed = e.predictions[INT4.name], e.predictions["open-tq-metal"]
    return Finding(
        "A cache written in place costs quality",
        "holds" if ours.kl > seed.kl else "does not hold here",
        f"tqchat's is written in place: KL {ours.kl:.4f}, Open-TQ-Metal's codes {seed.kl:.4f}.",
    )


def _speed(e: Evidence) -> Finding:
    return Finding(
        "48 times faster than dequantising at 128K, 6 tokens/s with 70B, 12 times by wiring",
        "cannot be judged here",
        "It takes a Mac of 64 GB with the 70B's weights. `tqchat bench attention` has the first, "
        "`tqchat bench decode` the second, with and without --no-wire the third.",
    )


FINDINGS: Sequence[Callable[[Evidence], Finding]] = (
    _scale_of_attention, _int4_at_any_scale, _polar_cosine, _polar_size, _polar_slower,
    _qjl_correlation, _qjl_by_depth, _compounding, _qjl_fails, _hybrid_saves_little, _qjl_size,
    _values_matter_more, _identical, _sweet_spot, _turboquant_neutral, _turboquant_low,
    _compression, _cache_size, _fits, _preallocated, _speed,
)  # fmt: skip
