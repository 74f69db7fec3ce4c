"""Ministral 3: Mistral with YaRN and queries that grow with their position.

The factor is 1 + llama_4_scaling_beta * ln(1 + floor(position / original context)).
"""

from dataclasses import dataclass
from functools import partial
from typing import Self

from tqchat.models.config import Config
from tqchat.models.decoder import Decoder, DecoderConfig
from tqchat.models.layers import Attention
from tqchat.models.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    scaling_beta: float
    original_context: int

    @classmethod
    def parse(cls, config: Config) -> Self:
        rope = config.section("rope_parameters")
        return cls.read(
            config,
            scaling_beta=rope.number("llama_4_scaling_beta"),
            original_context=rope.integer("original_max_position_embeddings"),
        )


class Ministral3(Decoder[Ministral3Config]):
    def attention(self, weights: Weights, i: int, prefix: str) -> Attention:
        c = self.shape
        temper = partial(self.backend.temper, beta=c.scaling_beta, length=c.original_context)
        return self.make_attention(weights, prefix, temper=temper)
