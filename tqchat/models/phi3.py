"""Phi-3 (arXiv:2404.14219), Phi-4 and Phi-4-mini: Llama with Q, K and V, and gate and up, in one.

The long versions use longrope, Phi-4-mini turns three quarters of a head's channels.
"""

from collections.abc import Callable

from tqchat.kernels import Array
from tqchat.models.decoder import Decoder, DecoderConfig
from tqchat.models.layers import Attention
from tqchat.models.weights import Weights


class Phi3(Decoder[DecoderConfig]):
    def attention(self, weights: Weights, i: int, prefix: str) -> Attention:
        return self.make_attention(weights, prefix, parts=["qkv_proj"])

    def mlp(self, weights: Weights, i: int, prefix: str) -> Callable[[Array], Array]:
        return self.make_mlp(weights, prefix, parts=["gate_up_proj"])
