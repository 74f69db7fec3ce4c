"""What a model's layers keep of a token in their KV caches."""

from dataclasses import dataclass

from tqchat.kernels import GROUP


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's cache; a layer that reads another's has none of its own.

    window: a token sees itself and the window - 1 before it; None: all before it.
    k_is_v: K is made of V and the position (`kernels.KeysOfValues`)
    Raises ValueError for a window and k_is_v: what is left out at the front moves positions.
    """

    n_kv_heads: int
    head_dim: int
    window: int | None = None
    k_is_v: bool = False

    def __post_init__(self) -> None:
        if self.k_is_v and self.window is not None:
            raise ValueError("K cannot be made of V in a layer with a window")

    @classmethod
    def of(cls, n_kv_heads: int, head_dim: int, window: int | None = None) -> "KVLayer":
        """For heads of any size: the cache's are filled up to a multiple of GROUP."""
        return cls(n_kv_heads, -(-head_dim // GROUP) * GROUP, window)
