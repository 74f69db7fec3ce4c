"""tqchat against mlx-lm on a CPU: the same weights, decoded greedily, in one run.

    python benchmarks/mlx_lm_cpu.py MODEL.gguf [--json RESULT.json]

mlx-lm runs the model as its converter writes it: in fp16, but for the quantised codes.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from tqchat.engine.events import EngineOptions
from tqchat.engine.generation import Session
from tqchat.engine.loading import load_path
from tqchat.engine.sampler import Rules, sample, token_id
from tqchat.models.checkpoint import read_checkpoint

PROMPT = list(range(100, 108))


def peer_seconds(path: Path, tokens: int) -> float:
    """Median seconds of mlx-lm for a token."""
    checkpoint = read_checkpoint(path)
    weights = checkpoint.weights
    model = llama.Model(llama.ModelArgs.from_dict(checkpoint.config))

    def stored(name: str, module: nn.Module) -> bool | dict[str, int]:
        if f"{name}.scales" not in weights:
            return False
        columns = module.weight.shape[1]
        return {
            "bits": 32 * weights[f"{name}.weight"].shape[1] // columns,
            "group_size": columns // weights[f"{name}.scales"].shape[1],
        }

    nn.quantize(model, class_predicate=stored)
    model.load_weights(list(weights.items()))
    model.set_dtype(mx.float16)
    cache = make_prompt_cache(model)
    token = mx.argmax(model(mx.array(PROMPT)[None], cache=cache)[0, -1])
    times = []
    for _ in range(tokens):
        start = time.perf_counter()
        token = mx.argmax(model(token[None, None], cache=cache)[0, -1])
        mx.eval(token)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def own_seconds(path: Path, tokens: int) -> float:
    session = Session(load_path(path, path.name, EngineOptions()))
    logits = session.feed(PROMPT)
    times = []
    for _ in range(tokens):
        start = time.perf_counter()
        token = token_id(sample(logits[-1], Rules(temperature=0), []))
        logits = session.feed([token])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    own, peer = own_seconds(options.model, 64), peer_seconds(options.model, 3)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "tqchat")},
        "tqchat_decode_tps": 1 / own,
        "mlx_lm_decode_tps": 1 / peer,
        "times": peer / own,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
