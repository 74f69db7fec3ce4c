"""From a model's name to everything a turn needs, in memory."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from tqchat.chat.template import ChatTemplate
from tqchat.chat.tokenizer import Tokenizer
from tqchat.engine.events import CODE_BITS, EngineOptions, Loading, ModelInfo, Sampling
from tqchat.engine.sampler import Rules
from tqchat.kernels import Backend, select
from tqchat.models import builtin
from tqchat.models.checkpoint import Checkpoint, read_checkpoint
from tqchat.models.config import Config
from tqchat.models.download import Progress
from tqchat.models.errors import Stopped
from tqchat.models.find import BUILTIN, fetch, last_used, resolve
from tqchat.models.fingerprint import fingerprint
from tqchat.models.multimodal import has_other_parts
from tqchat.models.quantize import quantized
from tqchat.models.registry import Model, build
from tqchat.models.weights import Weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`fingerprint` tells the model's files from others, `sampling` is what it suggests."""

    model: Model
    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate
    info: ModelInfo
    fingerprint: str
    sampling: Mapping[str, float] = field(default_factory=dict)


def load(
    name: str | None,
    options: EngineOptions,
    tell: Callable[[Loading], None],
    stopped: Callable[[], bool],
) -> LoadedModel:
    """Find, fetch if needed, and read a model; None: the last one used, else the built-in one.

    Raises ModelError or ChatError with what to do next, Stopped if `stopped` said so.
    """

    def fetched(progress: Progress) -> None:
        tell(Loading(progress.label, progress.done_bytes, progress.total_bytes))

    ref = resolve(name or last_used() or BUILTIN)
    path = fetch(ref, fetched, stopped)
    notes = []
    if options.quantize is not None:
        stored, path = path, quantized(path, ref.name, options.quantize, fetched, stopped)
        if path == stored:
            why = "is quantised already" if path.is_dir() else "comes as GGUF"
            notes.append(f"Not made into {options.quantize} bits: the model {why}.")
    loaded = load_path(path, ref.name, options, tell, stopped)
    loaded = replace(loaded, info=replace(loaded.info, notes=(*notes, *loaded.info.notes)))
    return replace(loaded, sampling=builtin.SAMPLING) if ref.kind == "builtin" else loaded


def load_path(
    path: Path,
    name: str,
    options: EngineOptions,
    tell: Callable[[Loading], None] = lambda event: None,
    stopped: Callable[[], bool] = lambda: False,
    backend: Backend | None = None,
) -> LoadedModel:
    """Read the model in the folder or .gguf file `path`; `name` is for messages."""

    def read(done: int, total: int) -> None:
        tell(Loading(f"Reading {name}", done, total))
        if stopped():
            raise Stopped

    checkpoint = read_checkpoint(path, read)
    total_bytes = checkpoint.weights_bytes
    if checkpoint.gguf_metadata is not None:
        tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata)
        template = ChatTemplate.from_gguf(checkpoint.gguf_metadata)
    else:
        tokenizer = Tokenizer.from_folder(path)
        template = ChatTemplate.from_folder(path)
    bits = CODE_BITS.get(options.kv, 4)
    backend = backend or select(_stored_dtype(checkpoint), options.threads, bits)
    weights = Weights(name, checkpoint.weights, backend)
    # Weights are read lazily; whoever else refers to them would keep them twice.
    checkpoint.weights.clear()
    in_memory = checkpoint.gguf_metadata is not None

    def built(done: int, total: int) -> None:
        read(total_bytes if in_memory else total_bytes * done // total, total_bytes)

    model = build(Config(name, checkpoint.config), weights, backend, built)
    context = model.context if options.context is None else options.context
    notes = [note for note in (backend.note,) if note]
    if has_other_parts(checkpoint.config):
        notes.append("This model's parts for pictures or sound are left out: it reads text alone.")
    if template.is_default:
        notes.append("This model brings no chat template; a plain one is used.")
    if context > model.context:
        notes.append(f"Trained for {model.context:,} tokens; past that, answers may fall apart.")
    sampling = suggested(checkpoint.generation_config)
    info = ModelInfo(
        name=name,
        architecture=str(checkpoint.config.get("model_type")),
        context=context,
        weights_bytes=weights.nbytes,
        device=_device_name(),
        backend=backend.name,
        kv=options.kv,
        notes=tuple(notes),
        sampling=asdict(Rules.of(Sampling(), sampling)),
        suggested=frozenset(sampling),
    )
    return LoadedModel(model, backend, tokenizer, template, info, fingerprint(path), sampling)


# What generation_config.json may suggest, and between which bounds it makes sense.
_SUGGESTIONS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.05, 1.0),
    "top_k": (0, 1 << 20),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.5, 2.0),
}


def suggested(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """How a model wants to be sampled; what is no sensible number is left out."""
    found: dict[str, float] = {}
    for name, (low, high) in _SUGGESTIONS.items():
        value = generation_config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = int(value) if name == "top_k" else value
    return found


def _stored_dtype(checkpoint: Checkpoint) -> mx.Dtype:
    """The 16-bit type that a checkpoint's activations are meant to have."""
    names = ("model.embed_tokens.scales", "model.embed_tokens.weight", "model.norm.weight")
    dtypes = [checkpoint.weights[name].dtype for name in names if name in checkpoint.weights]
    # MXFP4 and its like have scales of bytes.
    return next((x for x in dtypes if x in (mx.float16, mx.bfloat16, mx.float32)), mx.float16)


def _device_name() -> str:
    info = mx.device_info()
    return str(info.get("device_name", "CPU"))
