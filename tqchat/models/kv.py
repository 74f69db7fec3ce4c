"""What a model's layers keep of a token in their KV caches."""

from dataclasses import dataclass

from tqchat.kernels import GROUP


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's cache; a layer that reads another's has none of its own.

    window: a token sees itself and the window - 1 before it; None: all before it.
    k_is_v: K is made of V and the position (`kernels.KeysOfValues`). Not with a window, which
        leaves out tokens at the front.
    """

    n_kv_heads: int
    head_dim: int
    window: int | None = None
    k_is_v: bool = False

    @classmethod
    def of(cls, n_kv_heads: int, head_dim: int, window: int | None = None) -> "KVLayer":
        """For heads of any size: the cache's are filled up to a multiple of GROUP."""
        return cls(n_kv_heads, -(-head_dim // GROUP) * GROUP, window)
