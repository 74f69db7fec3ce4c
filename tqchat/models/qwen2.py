"""Qwen2 and 2.5: Llama with biases on Q, K and V (arXiv:2412.15115)."""

from tqchat.models.decoder import Decoder, DecoderConfig
from tqchat.models.layers import Attention
from tqchat.models.weights import Weights


class Qwen2(Decoder[DecoderConfig]):
    def attention(self, weights: Weights, i: int, prefix: str) -> Attention:
        return self.make_attention(weights, prefix, biases=True)
