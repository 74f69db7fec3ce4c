"""What the engine tells whoever runs it. Events are plain data; no MLX array ever crosses."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Self, TypeAlias

from tqchat.settings import Settings

KVKind: TypeAlias = Literal["int4", "int3", "fp16"]
CODE_BITS: dict[KVKind, int] = {"int4": 4, "int3": 3}
"""Of a quantised cache."""

FinishReason: TypeAlias = Literal["stop", "length", "context", "stopped", "repetition"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `limit` is what this process may use on the device, `free` what is left of it."""

    weights: int
    kv: int
    other: int
    free: int
    limit: int


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the KV cache holds: tokens, and bytes for them (see `kv_bytes` in the README)."""

    tokens: int
    context: int
    kv_bytes: int
    kv_bytes_allocated: int
    kv_bytes_fp16: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model. `context` is the most tokens a conversation may take.

    `notes` are things the person should know (a slow path in use, no chat template found), one
    line each. `sampling`: the values that hold where nobody chose others, `suggested` the names of
    those that are the model's own.
    """

    name: str
    architecture: str
    context: int
    weights_bytes: int
    device: str
    backend: str
    kv: KVKind
    notes: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    suggested: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Usage:
    """One turn in figures. Rates are tokens per second; 0.0 where nothing was measured."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    prefill_tps: float
    decode_tps: float


@dataclass(frozen=True, slots=True)
class Loading:
    """Fetching or reading a model. done and total in bytes; total is 0 while unknown."""

    label: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Loaded:
    model: ModelInfo
    cache: CacheUse
    memory: Memory


@dataclass(frozen=True, slots=True)
class Planned:
    """What reading a turn's prompt will take, told before it begins.

    `tokens` are those to read: what the cache holds already is not among them. `seconds` is an
    estimate from an earlier long prompt; None if this model has read none on this machine, and then
    it is told once more, with an estimate, when the first chunks are read. `peak` is the most bytes
    that this process will use on the device while it reads, `free` what that leaves of the limit.
    """

    turn: int
    tokens: int
    seconds: float | None
    peak: int
    free: int


@dataclass(frozen=True, slots=True)
class Prefilling:
    """`done` of `total` prompt tokens are in the cache, `cached` of them from earlier turns.

    `seconds_left` is an estimate of what the rest takes, None while there is none.
    """

    turn: int
    done: int
    total: int
    cached: int
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """Text of one token; may be empty while a character is incomplete."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class Stats:
    """A few times a second while a turn runs, and after anything that changes the cache."""

    usage: Usage
    cache: CacheUse
    memory: Memory


@dataclass(frozen=True, slots=True)
class Finished:
    """`reason`: the model ended, max_tokens, the context is full, stop() was called, or the answer
    only repeated itself."""

    turn: int
    reason: FinishReason
    text: str
    usage: Usage
    cache: CacheUse
    memory: Memory


@dataclass(frozen=True, slots=True)
class Failed:
    """A turn (or, with turn None, loading) could not be done; `message` says what to do next.

    `excess_tokens` is how far a prompt is past the context, 0 for other faults. What to do then is
    for the front end to say: it has the ways.
    """

    turn: int | None
    message: str
    excess_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TakenUp:
    """A conversation's saved cache was looked for; `cache` holds what of it could be used."""

    cache: CacheUse
    memory: Memory


@dataclass(frozen=True, slots=True)
class Note:
    """One line that the person should know. Nothing stops because of it."""

    message: str


@dataclass(frozen=True, slots=True)
class Counted:
    """How many tokens a text takes; `number` tells which one."""

    number: int
    tokens: int


Event: TypeAlias = (
    Loading
    | Loaded
    | Planned
    | Prefilling
    | Token
    | Stats
    | Finished
    | Failed
    | TakenUp
    | Note
    | Counted
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer comes about, as far as somebody said; None: as the model suggests.

    think: whether the model thinks first, if its chat template has a switch for that. temperature
    0 takes the likeliest; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 switch a filter off.
    seed None: a new one for each turn.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    think: bool | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(**{one.name: getattr(settings, one.name) for one in fields(cls)})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What is fixed while a model is loaded. context None: what the model was trained for.

    `disk_budget`: the most bytes that saved KV caches take together; 0 saves none. `wire`: keep
    model and cache from being paged out, where the system can (macOS). `quantize`: the bits that
    a model in 16 bits is made into.
    """

    kv: KVKind = "int4"
    context: int | None = None
    threads: int | None = None
    disk_budget: int = 20 << 30
    wire: bool = True
    quantize: int | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            settings.kv,
            settings.context,
            settings.threads,
            int(settings.disk_budget * 2**30),
            settings.wire,
            int(settings.quantize) if settings.quantize else None,
        )
