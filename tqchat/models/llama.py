"""Llama 2 and 3, SmolLM2, TinyLlama (arXiv:2302.13971), Mistral (arXiv:2310.06825)."""

from tqchat.models.decoder import Decoder, DecoderConfig


class Llama(Decoder[DecoderConfig]):
    """The decoder as it is; its layers may have sliding windows."""
