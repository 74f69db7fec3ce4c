"""Qwen3: Llama with a norm on each head's queries and keys (arXiv:2505.09388)."""

from typing import TypeVar

from tqchat.models.decoder import Decoder, DecoderConfig
from tqchat.models.layers import Attention
from tqchat.models.weights import Weights

C = TypeVar("C", bound=DecoderConfig)


class Qwen3(Decoder[C]):
    def attention(self, weights: Weights, i: int, prefix: str) -> Attention:
        c = self.shape
        return self.make_attention(
            weights,
            prefix,
            q_norm=weights.norm(f"{prefix}.q_norm", c.head_dim, c.norm_eps),
            k_norm=weights.norm(f"{prefix}.k_norm", c.head_dim, c.norm_eps),
        )
