"""SmolLM3: Llama where every fourth layer has no RoPE (NoPE, arXiv:2501.18795)."""

from dataclasses import dataclass
from typing import Self

from tqchat.models.config import Config
from tqchat.models.decoder import Decoder, DecoderConfig
from tqchat.models.errors import ModelError
from tqchat.models.layers import Attention
from tqchat.models.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """`rope_layers`: whether each layer has RoPE."""

    rope_layers: tuple[bool, ...]

    @classmethod
    def parse(cls, config: Config) -> Self:
        n_layers = config.integer("num_hidden_layers")
        interval = config.integer("no_rope_layer_interval", 4)
        # The name of the key is what 0 stands for in it.
        layers = config.get("no_rope_layers")
        if layers is None:
            layers = [(i + 1) % interval for i in range(n_layers)]
        if not isinstance(layers, list) or len(layers) != n_layers:
            raise ModelError(
                f"{config.name}: 'no_rope_layers' in config.json is not a list of {n_layers}."
            )
        return cls.read(
            config,
            rope_layers=tuple(bool(layer) for layer in layers),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        )


class SmolLM3(Decoder[SmolLM3Config]):
    def attention(self, weights: Weights, i: int, prefix: str) -> Attention:
        rope = self.rope if self.shape.rope_layers[i] else None
        return self.make_attention(weights, prefix, rope=rope)
