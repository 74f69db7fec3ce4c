"""Qwen3 MoE: Qwen3 with experts in place of one MLP (arXiv:2505.09388)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from tqchat.kernels import Array
from tqchat.models.config import Config
from tqchat.models.decoder import DecoderConfig
from tqchat.models.errors import ModelError
from tqchat.models.layers import MoE
from tqchat.models.qwen3 import Qwen3
from tqchat.models.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoEConfig(DecoderConfig):
    """`sparse`: whether each layer has experts, of size `moe_intermediate_size`."""

    n_experts: int
    top_k: int
    moe_intermediate_size: int
    renormalise: bool
    sparse: tuple[bool, ...]

    @property
    def n_expert_parameters(self) -> int:
        size = 3 * self.hidden_size * self.moe_intermediate_size
        return sum(self.sparse) * self.n_experts * size

    @property
    def _mlp_parameters(self) -> int:
        n_sparse = sum(self.sparse)
        dense = 3 * (self.n_layers - n_sparse) * self.intermediate_size
        routers = n_sparse * self.n_experts
        return self.n_expert_parameters + self.hidden_size * (dense + routers)

    @classmethod
    def parse(cls, config: Config) -> Self:
        n_layers = config.integer("num_hidden_layers")
        n_experts, top_k = config.integer("num_experts"), config.integer("num_experts_per_tok")
        step = config.integer("decoder_sparse_step", 1)
        dense = config.get("mlp_only_layers") or []
        if top_k > n_experts or not isinstance(dense, list):
            raise ModelError(
                f"{config.name}: {top_k} of {n_experts} experts, and {dense!r} as "
                "'mlp_only_layers', make no sense. Fetch the model again."
            )
        return cls.read(
            config,
            n_experts=n_experts,
            top_k=top_k,
            moe_intermediate_size=config.integer("moe_intermediate_size"),
            renormalise=bool(config.get("norm_topk_prob", False)),
            sparse=tuple((i + 1) % step == 0 and i not in dense for i in range(n_layers)),
        )


class Qwen3MoE(Qwen3[Qwen3MoEConfig]):
    def mlp(self, weights: Weights, i: int, prefix: str) -> Callable[[Array], Array]:
        c = self.shape
        if not c.sparse[i]:
            return self.make_mlp(weights, prefix)
        hidden, inner = c.hidden_size, c.moe_intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        return MoE(
            self.backend,
            weights.linear({f"{prefix}.gate": c.n_experts}, hidden),
            weights.experts(prefix, parts, hidden, c.n_experts),
            weights.experts(prefix, {"down_proj": hidden}, inner, c.n_experts),
            top_k=c.top_k,
            renormalise=c.renormalise,
            activation=self.backend.swiglu,
        )
