"""One conversation's KV cache and the turns that run on it. Knows no threads."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from tqchat.engine import memory, plan
from tqchat.engine.cache import DenseCache, KVCache, SealedCache, make_caches, stored
from tqchat.engine.chunks import SMALLEST, ChunkSize, Stoppable
from tqchat.engine.events import (
    CacheUse,
    Event,
    Failed,
    Finished,
    FinishReason,
    Memory,
    Note,
    Planned,
    Prefilling,
    Sampling,
    Stats,
    Token,
    Usage,
)
from tqchat.engine.loading import LoadedModel
from tqchat.engine.pace import Pace, Reading
from tqchat.engine.repetition import EVERY, goes_in_circles
from tqchat.engine.sampler import Rules, sample, token_id
from tqchat.engine.saved import Identity, SavedCache
from tqchat.engine.step import CompiledStep
from tqchat.models.errors import ModelError, Stopped
from tqchat.units import bytes_text

STATS_INTERVAL_S = 0.25


@dataclass(slots=True)
class Clock:
    """The figures of a turn while it runs. Times in seconds."""

    prompt_tokens: int
    cached_tokens: int
    started: float = field(default_factory=time.perf_counter)
    prefilled: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    last_stats: float = 0.0

    def token(self) -> None:
        self.completion_tokens += 1
        self.last_token = time.perf_counter()
        if self.first_token is None:
            self.first_token = self.last_token

    def stats_due(self) -> bool:
        now = time.perf_counter()
        due = now - self.last_stats >= STATS_INTERVAL_S
        if due:
            self.last_stats = now
        return due

    def usage(self) -> Usage:
        prefill_end = self.first_token or time.perf_counter()
        prefill_s = prefill_end - self.started
        decode_s = 0.0
        if self.first_token is not None and self.last_token is not None:
            decode_s = self.last_token - self.first_token
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            ttft_s=prefill_s if self.first_token is not None else 0.0,
            prefill_tps=self.prefilled / prefill_s if prefill_s else 0.0,
            decode_tps=(self.completion_tokens - 1) / decode_s if decode_s else 0.0,
        )


class Session:
    """The cache of one conversation, and `turn`, which continues it.

    The cache always holds exactly the tokens `_held`: whatever a new prompt has in common with
    them at its start is not computed again.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._held: list[int] = []
        self._caches: list[KVCache] = []
        self._saved: SavedCache | None = None
        self._compiled: CompiledStep | None = None
        info = loaded.info
        on = f"{loaded.fingerprint} {info.device} {loaded.backend.name} {info.kv}"
        self._pace = Pace(loaded.model.shape, on)
        self._chunk = ChunkSize(loaded.model.shape, loaded.backend.prefill_chunk)
        self.clear()

    def clear(self) -> None:
        """Forget everything and free the cache's memory. What is saved on disk stays."""
        model, backend = self._loaded.model, self._loaded.backend
        kind = DenseCache if self._loaded.info.kv == "fp16" else SealedCache
        self._held = []
        self._caches = make_caches(kind, backend, model.shape.kv_layers)
        caches = self._sealed_caches()
        self._compiled = None
        if backend.compiles_steps and caches is not None:
            self._compiled = CompiledStep(model, backend, caches)
        mx.clear_cache()
        if self._saved is not None:
            self._saved.trim(0)

    def warm_up(self) -> None:
        """Compile every kernel that a turn needs now, not while somebody waits for a token.

        Raises ModelError if the model computes no numbers.
        """
        on_device = self._loaded.backend.asynchronous
        logits = self.feed([0] * (200 if on_device else 1))
        if not mx.isfinite(logits).all().item():
            raise ModelError(
                f"{self._loaded.info.name}: its weights are damaged (it computes infinities or "
                "NaN). Fetch the model again, or choose another."
            )
        steps = self._decode(logits, Rules(temperature=0))
        for _ in range(3):
            next(steps)
        self.clear()

    def take_up(
        self, folder: Path | None, budget: int, progress: Callable[[int, int], None]
    ) -> str:
        """Go on with the cache saved in `folder`, and save it there; None: save no more.

        Returns why not all that is there was taken up, or "". `budget` and `progress` are
        SavedCache's.
        """
        self._saved = None
        self.clear()
        if folder is None or not budget:
            return ""
        caches = self._sealed_caches()
        if caches is None:
            return "A KV cache in fp16 is not saved on disk."
        loaded = self._loaded
        layers = tuple(stored(layer, loaded.backend) for layer in loaded.model.shape.kv_layers)
        bits = loaded.backend.kv_bits
        identity = Identity(loaded.fingerprint, loaded.tokenizer.fingerprint, layers, bits)
        self._saved = SavedCache(folder, identity, budget)
        try:
            self._held, why = self._saved.restore(caches, self._fits, progress)
        except BaseException:
            self.clear()
            raise
        return why

    def save(self, give_way: Callable[[], bool]) -> str:
        """Save what is new of the cache, if it was taken up; returns why not, or ""."""
        caches = self._sealed_caches()
        if self._saved is None or caches is None:
            return ""
        return self._saved.save(self._held, caches, give_way)

    def _sealed_caches(self) -> list[SealedCache] | None:
        caches = [cache for cache in self._caches if isinstance(cache, SealedCache)]
        return caches if len(caches) == len(self._caches) else None

    def cache_use(self) -> CacheUse:
        return CacheUse(
            tokens=len(self._held),
            context=self._loaded.info.context,
            kv_bytes=sum(cache.nbytes for cache in self._caches),
            kv_bytes_allocated=self._allocated,
            kv_bytes_fp16=sum(cache.nbytes_fp16 for cache in self._caches),
        )

    def memory(self) -> Memory:
        return memory.measure(self._loaded.info.weights_bytes, self._allocated)

    def feed(self, ids: Sequence[int], n_logits: int = 1) -> mx.array:
        """Take `ids` into the cache; returns logits (n_logits, vocab_size) of the last of them."""
        logits = self._loaded.model(ids, self._caches, n_logits)
        mx.eval(logits)
        self._held.extend(ids)
        return logits

    def _read(self, ids: Sequence[int], stopped: Callable[[], bool]) -> mx.array | None:
        """`feed`, but None and as if nothing had been if a stop comes between two layers."""
        backend = self._loaded.backend
        go_back = [cache.checkpoint() for cache in self._caches]
        try:
            caches = [Stoppable(cache, backend, stopped) for cache in self._caches]
            logits = self._loaded.model(ids, caches)
            mx.eval(logits)
        except Stopped:
            for put_back in go_back:
                put_back()
            return None
        self._held.extend(ids)
        return logits

    def turn(
        self,
        number: int,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None,
        stopped: Callable[[], bool],
        opened: str = "",
    ) -> Iterator[Event]:
        """Prefill `prompt` and decode the answer. `stopped` is asked between layers and tokens.

        `opened`: what of the answer stands at the end of the prompt, told with the first token.
        """
        if not prompt:
            raise ModelError(
                f"{self._loaded.info.name}: its chat template makes nothing of this conversation. "
                "Choose another model."
            )
        context = self._loaded.info.context
        excess = len(prompt) + 1 - context
        if excess > 0:
            message = (
                f"The conversation takes {len(prompt):,} tokens. With one for an answer that is "
                f"{excess:,} more than the context of {context:,} holds."
            )
            yield Failed(number, message, excess)
            return
        if refusal := self._does_not_fit(len(prompt)):
            yield Failed(number, refusal)
            return
        if max(prompt) >= self._loaded.model.vocab_size:
            raise ModelError(
                f"{self._loaded.info.name}: its tokenizer has tokens that the model does not know. "
                "Fetch the model again, or choose another."
            )
        try:
            yield from self._turn(number, prompt, sampling, max_tokens, stopped, opened)
        except BaseException:
            # A step that broke off may have fed some layers and not others.
            self.clear()
            raise

    def _fits(self, tokens: int) -> bool:
        return self._does_not_fit(tokens) is None

    def _does_not_fit(self, tokens: int) -> str | None:
        """Why a prompt of so many tokens cannot be read in the memory that is free, if so.

        An allocation that fails inside MLX ends the process, so it must not come to that.
        """
        need, now = self._more_bytes(tokens, SMALLEST), self.memory()
        if need <= now.free:
            return None
        shape, kv = self._loaded.model.shape, self._loaded.info.kv
        prefill = plan.Prefill.on(self._loaded.backend, SMALLEST)
        longest = plan.largest_context(shape, 0, kv, prefill, now.free + self._allocated)
        refusal = (
            f"Reading {tokens:,} tokens takes {bytes_text(need)} more, {bytes_text(now.free)} is "
            f"free. Shorten it to about {longest:,} tokens, choose a smaller model or close other "
            "programs."
        )
        raised = memory.raised_limit(now.limit)
        if need <= now.free + raised - now.limit:
            command = memory.raising(raised)
            refusal += f" Or raise macOS's limit until restart, and start again: {command}"
        return refusal

    def _planned(self, number: int, reading: Reading) -> Planned:
        now = self.memory()
        more = self._more_bytes(reading.stop, self._chunk_size(reading.stop))
        peak = now.weights + now.kv + now.other + more
        tokens = reading.stop - reading.start
        return Planned(number, tokens, reading.seconds, peak, now.free - more)

    def _chunk_size(self, tokens: int) -> int:
        """How many to read at a time of those that lead up to `tokens`."""
        free = self.memory().free
        return self._chunk.next(len(self._held), lambda n: self._more_bytes(tokens, n) <= free)

    def _more_bytes(self, tokens: int, chunk: int) -> int:
        """What it takes at most to hold `tokens`, besides what is allocated now."""
        shape, kv = self._loaded.model.shape, self._loaded.info.kv
        prefill = plan.Prefill.on(self._loaded.backend, chunk)
        return max(0, plan.need(shape, 0, tokens, kv, prefill).total - self._allocated)

    @property
    def _allocated(self) -> int:
        return sum(cache.nbytes_allocated for cache in self._caches)

    def _turn(
        self,
        number: int,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None,
        stopped: Callable[[], bool],
        opened: str,
    ) -> Iterator[Event]:
        tokenizer, context = self._loaded.tokenizer, self._loaded.info.context
        shared = self._shared(prompt)
        clock = Clock(len(prompt), self._trim(shared))
        text: list[str] = []

        def finished(reason: FinishReason) -> Finished:
            return Finished(
                number, reason, "".join(text), clock.usage(), self.cache_use(), self.memory()
            )

        rules = Rules.of(sampling, self._loaded.sampling)
        if sampling.seed is not None:
            mx.random.seed(sampling.seed)
        if clock.cached_tokens < shared:
            yield Note(
                f"{shared:,} tokens are read again: the model's sliding-window layers have "
                "forgotten what comes before the change."
            )
        logits = yield from self._prefill(number, prompt, clock, stopped)
        if logits is None:
            yield finished("stopped")
            return
        detokenizer = tokenizer.stream()
        reason: FinishReason = "stop"
        written: list[int] = []
        for token in self._decode(logits, rules):
            if token in tokenizer.stop_ids:
                break
            clock.token()
            written.append(token)
            piece = opened + detokenizer.add(token)
            opened = ""
            text.append(piece)
            yield Token(number, piece)
            if clock.stats_due():
                yield Stats(clock.usage(), self.cache_use(), self.memory())
            if stopped():
                reason = "stopped"
                break
            if clock.completion_tokens == max_tokens:
                reason = "length"
                break
            if len(self._held) + 1 >= context:
                reason = "context"
                break
            if len(written) % EVERY == 0 and goes_in_circles(written):
                reason = "repetition"
                break
        rest = detokenizer.finish()
        if rest:
            text.append(rest)
            yield Token(number, rest)
        yield finished(reason)

    def _prefill(
        self, number: int, prompt: Sequence[int], clock: Clock, stopped: Callable[[], bool]
    ) -> Generator[Event, None, mx.array | None]:
        """Read what the cache lacks of `prompt`; logits of its last token, None if stopped."""
        reading = Reading(self._pace, clock.cached_tokens, len(prompt))

        def prefilling() -> Prefilling:
            done, left = len(self._held), reading.seconds_left
            return Prefilling(number, done, len(prompt), clock.cached_tokens, left)

        yield self._planned(number, reading)
        for cache in self._caches:
            cache.reserve(len(prompt))
        yield prefilling()
        while True:
            known, held = reading.seconds is not None, len(self._held)
            began = time.perf_counter()
            size = self._chunk_size(len(prompt))
            logits = self._read(prompt[held : held + size], stopped)
            if logits is None:
                return None
            now = time.perf_counter()
            if held + size <= len(prompt):
                self._chunk.took(held, size, now - began)
            clock.prefilled = len(self._held) - clock.cached_tokens
            reading.came_to(len(self._held), now - clock.started)
            if not known and reading.seconds is not None and len(self._held) < len(prompt):
                yield self._planned(number, reading)
            yield prefilling()
            if clock.stats_due():
                yield Stats(clock.usage(), self.cache_use(), self.memory())
            if stopped():
                return None
            if len(self._held) == len(prompt):
                self._pace.remember(clock.prefilled)
                return logits

    def _decode(self, logits: mx.array, rules: Rules) -> Iterator[int]:
        """Tokens without end. One is fed to the cache when the next is asked for, or before.

        Before: while the device computes a token, the next step is already built on it and queued,
        so that the device never waits for Python.
        """
        token = sample(logits[-1], rules, self._held)
        while True:
            following = None
            if self._may_run_ahead(rules):
                mx.async_eval(token)  # type: ignore[no-untyped-call]
                following = sample(self._queued(token)[-1], rules, self._held)
                mx.async_eval(following)  # type: ignore[no-untyped-call]
            value = token_id(token)
            if following is not None:
                self._held.append(value)
            yield value
            if following is None:
                following = sample(self.feed([value])[-1], rules, self._held)
            token = following

    def _queued(self, token: mx.array) -> mx.array:
        """Logits (1, vocab_size) after a token that may still be under way, lazy as well."""
        if self._compiled is not None and self._compiled.ready:
            return self._compiled(token[None])
        return self._loaded.model(token[None], self._caches)

    def _may_run_ahead(self, rules: Rules) -> bool:
        """A penalty needs to know the token; a cache must not be copied because it is in use."""
        return (
            self._loaded.backend.asynchronous
            and rules.repetition_penalty == 1.0
            and all(cache.may_run_ahead for cache in self._caches)
        )

    def _shared(self, prompt: Sequence[int]) -> int:
        """How many tokens the cache has in common with `prompt`, short of its last."""
        pairs = zip(self._held, prompt[:-1], strict=False)
        return next(
            (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs),
            min(len(self._held), len(prompt) - 1),
        )

    def _trim(self, length: int) -> int:
        """Cut the cache to `length` tokens, or to none if a window has passed what it needs.

        Returns what is left.
        """
        if length == len(self._held):
            return length
        if any(length < cache.trimmable_to for cache in self._caches):
            self.clear()
            return 0
        for cache in self._caches:
            cache.trim(length)
        if self._saved is not None:
            self._saved.trim(length)
        del self._held[length:]
        return length
