"""gpt-oss 20B and 120B (arXiv:2508.10925): experts in MXFP4, attention sinks, and a window in
every second layer."""

from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from tqchat.kernels import Backend
from tqchat.models.config import Config
from tqchat.models.decoder import Decoder, DecoderConfig, Progress
from tqchat.models.errors import ModelError
from tqchat.models.gemma3 import read_sliding
from tqchat.models.layers import Attention, MoE
from tqchat.models.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    n_experts: int
    top_k: int

    @property
    def n_expert_parameters(self) -> int:
        return 3 * self.n_layers * self.n_experts * self.hidden_size * self.intermediate_size

    @property
    def _mlp_parameters(self) -> int:
        return self.n_expert_parameters + self.n_layers * self.n_experts * self.hidden_size

    @classmethod
    def parse(cls, config: Config) -> Self:
        config = Config(config.name, dict(config))
        read_sliding(config, 2)
        n_experts = config.integer("num_local_experts")
        top_k = config.integer("num_experts_per_tok")
        if top_k > n_experts:
            raise ModelError(f"{config.name}: {top_k} of {n_experts} experts make no sense.")
        return cls.read(config, n_experts=n_experts, top_k=top_k)


class GptOss(Decoder[GptOssConfig]):
    def __init__(
        self,
        config: GptOssConfig,
        weights: Weights,
        backend: Backend,
        progress: Progress = lambda done, total: None,
    ) -> None:
        weights.rename(_as_mlx)
        super().__init__(config, weights, backend, progress)

    def attention(self, weights: Weights, i: int, prefix: str) -> Attention:
        sinks = weights.vector(f"{prefix}.sinks", (self.shape.n_heads,))
        sinks = self.backend.load_vector(sinks)
        return self.make_attention(weights, prefix, biases=True, sinks=sinks)

    def mlp(self, weights: Weights, i: int, prefix: str) -> MoE:
        c, n = self.shape, self.shape.n_experts
        hidden, inner = c.hidden_size, c.intermediate_size

        def biases(part: str, rows: int) -> mx.array:
            return weights.vector(f"{prefix}.experts.{part}.bias", (n, rows))

        both = mx.concatenate([biases("gate_proj", inner), biases("up_proj", inner)], axis=1)
        down = biases("down_proj", hidden)
        return MoE(
            self.backend,
            weights.linear({f"{prefix}.router": n}, hidden),
            weights.experts(prefix, {"gate_proj": inner, "up_proj": inner}, hidden, n),
            weights.experts(prefix, {"down_proj": hidden}, inner, n),
            top_k=c.top_k,
            renormalise=True,
            activation=self.backend.clamped_swiglu,
            biases=(self.backend.load_vector(both), self.backend.load_vector(down)),
        )


def _as_mlx(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """OpenAI's checkpoint has the rows of gate and up in turns, and codes as bytes."""
    renamed = {}
    for name, x in tensors.items():
        module, _, part = name.rpartition(".experts.")
        base, _, kind = part.rpartition("_proj_")
        if not module or kind not in ("blocks", "scales", "bias"):
            renamed[name] = x
            continue
        if kind == "blocks":
            x, kind = x.view(mx.uint32).flatten(-2), "weight"
        prefix = f"{module}.experts"
        if base == "gate_up":
            for i, gate in enumerate(("gate", "up")):
                renamed[f"{prefix}.{gate}_proj.{kind}"] = mx.contiguous(x[:, i::2])
        else:
            renamed[f"{prefix}.{base}_proj.{kind}"] = x
    return renamed
