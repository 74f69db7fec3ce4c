"""tqchat against llama.cpp on a CPU: the same GGUF file, threads and prompts, turn and turn about.

llama.cpp comes as PyPI's prebuilt `xllamacpp`, in an environment of its own:

    python -m venv /tmp/peer && /tmp/peer/bin/pip install xllamacpp
    python benchmarks/llama_cpp.py MODEL.gguf /tmp/peer/bin/python --json RESULT.json

Each contender is a process that stays and sleeps while the other runs. A round prefills every
context length from an empty cache and decodes DECODED tokens greedily; the figures are medians
over the rounds. Other work on the machine falsifies them: llama.cpp's threads wait for each other
by spinning, so it suffers most. The load average is in the result.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

DECODED = 32
CONTENDERS = ("tqchat int4", "llama.cpp f16", "llama.cpp q4_0")
Rates = dict[str, float]


def prompt(length: int, vocab_size: int) -> list[int]:
    return [7919 * i % vocab_size for i in range(length)]


def serve_tqchat(path: str, threads: int, longest: int) -> Callable[[int], Rates]:
    import mlx.core as mx

    from tqchat.engine.events import EngineOptions
    from tqchat.engine.generation import Session
    from tqchat.engine.loading import load_path
    from tqchat.engine.sampler import Rules, sample, token_id

    loaded = load_path(Path(path), path, EngineOptions(kv="int4", threads=threads))
    session = Session(loaded)

    def greedy(logits: mx.array) -> int:
        return token_id(sample(logits[-1], Rules(temperature=0), []))

    def run(context: int) -> Rates:
        session.clear()
        ids, chunk = prompt(context, loaded.model.vocab_size), loaded.backend.prefill_chunk
        start = time.perf_counter()
        for first in range(0, context, chunk):
            logits = session.feed(ids[first : first + chunk])
        token = greedy(logits)
        prefilled = time.perf_counter()
        for _ in range(DECODED):
            token = greedy(session.feed([token]))
        decoded = time.perf_counter()
        return {
            "prefill_tps": context / (prefilled - start),
            "decode_tps": DECODED / (decoded - prefilled),
        }

    return run


def serve_llama(path: str, threads: int, longest: int, kv: str) -> Callable[[int], Rates]:
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = path
    p.n_ctx, p.n_parallel, p.n_gpu_layers, p.verbosity = longest + 2 * DECODED, 1, 0, 0
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
    kinds = {"f16": xllamacpp.ggml_type.GGML_TYPE_F16, "q4_0": xllamacpp.ggml_type.GGML_TYPE_Q4_0}
    p.cache_type_k = p.cache_type_v = kinds[kv]
    server = xllamacpp.Server(p)

    def run(context: int) -> Rates:
        answer = server.handle_completions(
            {
                "prompt": prompt(context, 49152),
                "n_predict": DECODED + 1,  # its rate leaves the first token out, as ours does
                "temperature": 0,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        timings = answer["timings"]
        return {
            "prefill_tps": timings["prompt_per_second"],
            "decode_tps": timings["predicted_per_second"],
        }

    return run


def serve(contender: str, path: str, threads: int, longest: int) -> None:
    """Answer context lengths on standard input with rates, a line each."""
    name, kv = contender.split()
    if name == "tqchat":
        run = serve_tqchat(path, threads, longest)
    else:
        run = serve_llama(path, threads, longest, kv)
    run(64)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


class Contender:
    def __init__(self, name: str, python: str, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [python, __file__, "--serve", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def run(self, context: int) -> Rates:
        assert self._process.stdin is not None
        print(context, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Rates:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit("a contender ended; run it by hand with --serve to see why")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(contenders: dict[str, Contender], contexts: list[int], rounds: int) -> dict[str, Any]:
    runs: dict[str, dict[int, list[Rates]]] = {n: {c: [] for c in contexts} for n in contenders}
    for _ in range(rounds):
        for context in contexts:
            for name, contender in contenders.items():
                runs[name][context].append(contender.run(context))
    return {
        name: {
            str(context): {
                rate: round(statistics.median(run[rate] for run in of_context), 1)
                for rate in ("prefill_tps", "decode_tps")
            }
            for context, of_context in by_context.items()
        }
        for name, by_context in runs.items()
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file that both can read")
    parser.add_argument("peer", help="a Python that has xllamacpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", default="128,1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    contexts = [int(n) for n in options.contexts.split(",")]
    arguments = [options.model, str(options.threads), str(max(contexts))]
    pythons = {n: sys.executable if n.startswith("tqchat") else options.peer for n in CONTENDERS}
    load_average = os.getloadavg()[0]
    contenders = {n: Contender(n, python, arguments) for n, python in pythons.items()}
    rates = compare(contenders, contexts, options.rounds)
    for contender in contenders.values():
        contender.close()
    peer_version = "import importlib.metadata as m; print(m.version('xllamacpp'))"
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "threads": options.threads,
        "load_average_before": round(load_average, 2),
        "model": Path(options.model).name,
        "versions": {
            "tqchat": version("tqchat"),
            "mlx": version("mlx"),
            "xllamacpp": subprocess.check_output(
                [options.peer, "-c", peer_version], text=True
            ).strip(),
        },
        "rounds": options.rounds,
        "decoded": DECODED,
        "tokens_per_second": rates,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
