"""Ways to store K and V in few bits, all behind `Codec`, by name in `CODECS`."""

from tqchat.kernels.codecs.base import Codec, KVState, Quantizer, State, nbytes
from tqchat.kernels.codecs.mlx_lm import Affine
from tqchat.kernels.codecs.open_tq_metal import ZeroPoint
from tqchat.kernels.codecs.product import PerChannel, PerToken

__all__ = ["CODECS", "Codec", "KVState", "Quantizer", "State", "nbytes"]

CODECS = {
    codec.name: codec
    for codec in (
        Codec("product", PerChannel(4), PerToken(4)),
        Codec("product-3bit", PerChannel(3), PerToken(3)),
        Codec("product-8bit", PerChannel(8), PerToken(8)),
        Codec("open-tq-metal", ZeroPoint(), ZeroPoint()),
        Codec("mlx-lm", Affine(4), Affine(4)),
    )
}
