"""Ways to store K and V in few bits, all behind `Codec`, by name in `CODECS`."""

from tqchat.kernels.codecs.base import Codec, KVState, Quantizer, State, nbytes
from tqchat.kernels.codecs.mlx_lm import Affine
from tqchat.kernels.codecs.open_tq_metal import ZeroPoint
from tqchat.kernels.codecs.polarquant import PolarQuant
from tqchat.kernels.codecs.product import PerChannel, PerToken
from tqchat.kernels.codecs.qjl import QJL, FirstLayers
from tqchat.kernels.codecs.turboquant import TurboQuant, TurboQuantProduct

__all__ = ["CODECS", "Codec", "KVState", "Quantizer", "State", "nbytes"]

_OPEN_TQ_METAL = Codec("open-tq-metal", ZeroPoint(), ZeroPoint())
# QJL is for keys. Their values are the product's, so that the difference is QJL's alone.
_QJL = Codec("qjl", QJL(3), PerToken(4))

CODECS = {
    codec.name: codec
    for codec in (
        Codec("product", PerChannel(4), PerToken(4)),
        Codec("product-3bit", PerChannel(3), PerToken(3)),
        Codec("product-8bit", PerChannel(8), PerToken(8)),
        _OPEN_TQ_METAL,
        Codec("mlx-lm", Affine(4), Affine(4)),
        *(Codec(f"polarquant-{n}", PolarQuant(n), PolarQuant(n)) for n in (2, 3, 4, 5)),
        _QJL,
        FirstLayers("qjl+int4", _QJL.keys, _QJL.values, n_first=10, rest=_OPEN_TQ_METAL),
        *(Codec(f"turboquant-{n}", TurboQuant(n), TurboQuant(n)) for n in (1, 2, 3, 4)),
        *(Codec(f"turboquant-product-{n}", TurboQuantProduct(n), TurboQuant(n)) for n in (2, 3, 4)),
    )
}
