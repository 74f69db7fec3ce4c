"""Long prompts in a process of their own: what they take is what was planned, within a tenth.

The CPU's arrays are numpy's, which MLX's allocator does not know, so resident memory is measured as
the system counts it. The model is random and tiny: the KV cache is nearly all that is planned. What
the process takes before it reads, Python and MLX themselves, is left out of both sides.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.folders import write_tiny
from tqchat.kernels.layout import BLOCK, SINK, TAIL_MAX, TAIL_MIN, tile_bytes

CONTEXT = 131_072
MEASURED = mx.default_device().type == mx.cpu and os.access("/proc/self/clear_refs", os.W_OK)

READER = """
import json, sys
from tests.engine.test_engine import GREEDY, Watched, said, until
from tqchat.engine import memory
from tqchat.engine.engine import Engine
from tqchat.engine.events import EngineOptions, Failed, Finished, Loaded, Planned

folder, kv, tokens, question, measured = json.loads(sys.argv[1])

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

plans = []

def react(event):
    if isinstance(event, Planned):
        used = memory.measure(0, 0).other
        if measured:
            # The peak is counted anew from here on.
            open("/proc/self/clear_refs", "w").write("5")
        plans.append({"tokens": event.tokens, "used": used, "more": event.peak - used})

engine = Engine(EngineOptions(kv=kv, context=131_072))
engine.events = Watched(react)
engine.start()
engine.load(folder)
assert isinstance(until(engine, Loaded, Failed)[-1], Loaded)
document = "".join(f"Line {n}: the tide comes in. " for n in range(tokens // 20))[:tokens]
texts = [document]
turns = []
for _ in range(2):
    turn = engine.generate(said(*texts), GREEDY, 8)
    *_, finished = until(engine, Finished, Failed)
    assert isinstance(finished, Finished), finished
    turns.append(
        {
            "prompt": finished.usage.prompt_tokens,
            "cached": finished.usage.cached_tokens,
            "completion": finished.usage.completion_tokens,
            "kv_bytes": finished.cache.kv_bytes,
            "held": finished.cache.tokens,
            "peak": peak() if measured else None,
        }
    )
    texts += [finished.text, question]
engine.close()
print(json.dumps({"plans": plans, "turns": turns}))
"""
QUESTION = "And when does it go out?"


def read(folder: Path, kv: str, tokens: int) -> dict[str, Any]:
    """What happened in a process that read a document of `tokens` and was then asked QUESTION."""
    done = subprocess.run(
        [sys.executable, "-c", READER, json.dumps([str(folder), kv, tokens, QUESTION, MEASURED])],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def assert_as_planned(result: dict[str, Any]) -> None:
    plan, turn = result["plans"][0], result["turns"][0]
    assert plan["tokens"] == turn["prompt"]
    assert turn["peak"] - plan["used"] == pytest.approx(plan["more"], rel=0.1)


@pytest.mark.skipif(not MEASURED, reason="Linux alone tells a process's peak since a moment")
@pytest.mark.parametrize("kv", ["int4", "fp16"])
def test_a_deep_model_takes_what_was_planned(tmp_path: Path, kv: str) -> None:
    folder = write_tiny(
        tmp_path / "deep",
        num_hidden_layers=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    assert_as_planned(read(folder, kv, 12_000))


def test_128k_tokens_from_the_text_to_the_second_answer(tmp_path: Path) -> None:
    layers, heads = 2, 2
    folder = write_tiny(
        tmp_path / "long",
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT,
    )
    tokens = CONTEXT - 150
    result = read(folder, "int4", tokens)
    first, second = result["turns"]
    assert tokens < first["prompt"] < CONTEXT
    assert (first["cached"], first["completion"]) == (0, 8)
    # The second question costs its own tokens and the template's around it, and its plan says so.
    asked = second["prompt"] - second["cached"]
    assert len(QUESTION) < asked < len(QUESTION) + 50
    assert result["plans"][-1]["tokens"] == asked
    assert second["completion"] == 8
    # All but the first and the newest tokens are in sealed blocks.
    least, most = ((first["held"] - SINK - tail) // BLOCK for tail in (TAIL_MAX, TAIL_MIN))
    assert first["kv_bytes"] in {
        layers * heads * (n * tile_bytes(32) + (first["held"] - n * BLOCK) * 4 * 32)
        for n in range(least, most + 1)
    }
    if MEASURED:
        assert_as_planned(result)
