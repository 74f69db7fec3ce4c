"""The command line: answers without a screen, and one clear line for whatever is wrong."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.folders import CHATML, byte_tokenizer, write_tiny
from tests.terminal import Terminal

ROOT = Path(__file__).parent.parent
TQCHAT = [sys.executable, "-m", "tqchat"]
FIELDS = [
    "text",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "ttft_s",
    "prefill_tps",
    "decode_tps",
    "kv_bytes",
    "kv_bytes_allocated",
    "kv_bytes_fp16",
    "headroom_bytes",
    "finish_reason",
]
GREEDY = ["--temperature", "0"]
# All tokens are about equally likely at this temperature: control characters come up.
RANDOM = ["--temperature", "100", "--top-p", "1", "--seed", "1"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    """A user with nothing, and the network out of reach."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    xdg = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
    return {
        **kept,
        **xdg,
        "XDG_STATE_HOME": str(home / "state"),
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def tqchat(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the program away from any terminal."""

    def run(
        *arguments: str | Path, stdin: str | bytes = b"", **more: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*TQCHAT, *map(str, arguments)],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            env=environment | more,
            capture_output=True,
            timeout=120,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "tqchat.log"
    }


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr that has `words`, nothing on stdout, exit code 2."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("tqchat: ")
    for word in words:
        assert word in done.stderr


# Answers


def test_an_answer(tqchat, tiny) -> None:
    done = tqchat(tiny, "-p", "Hello", *GREEDY, "--max-tokens", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 1


def test_a_long_prompt_is_announced_on_a_terminal(tqchat, tiny, environment, home) -> None:
    arguments = [tiny, "-p", "x" * 2000, *GREEDY, "--max-tokens", "3"]
    assert tqchat(*arguments).stderr == ""
    # The machine gets a million times slower.
    rates = home / "state" / "tqchat" / "prefill-rates.json"
    ((key, rate),) = json.loads(rates.read_text()).items()
    rates.write_text(json.dumps({key: rate / 1e6}))
    with Terminal([*TQCHAT, *map(str, arguments)], environment) as terminal:
        terminal.wait_for(
            r"Reading 2,0\d\d tokens takes about (\d+ h )?\d+ min.* of memory at most"
        )
        assert terminal.wait_for_exit() == 0
    rates.write_text(json.dumps({key: rate / 1e6}))
    assert tqchat(*arguments).stderr == ""


def test_what_is_only_thought_is_no_answer(tqchat, tmp_path) -> None:
    """The prompt opens a thought, and this model ends none."""
    opening = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    folder = write_tiny(tmp_path / "thinker", opening)
    arguments = [folder, "-p", "Hello", *GREEDY, "--max-tokens", "8"]
    done = tqchat(*arguments)
    assert (done.returncode, done.stdout) == (0, "\n")
    assert done.stderr.count("\n") == 1
    assert "did not answer" in done.stderr
    answer = json.loads(tqchat(*arguments, "--json").stdout)
    assert (answer["text"], answer["finish_reason"]) == ("", "length")
    assert list(answer) == ["text", "thinking", *FIELDS[1:]]
    assert answer["thinking"]


def test_paris(tqchat, smollm2_gguf) -> None:
    """From the .gguf itself."""
    done = tqchat(smollm2_gguf, "-p", "What is the capital of France?", *GREEDY, "--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"


def test_the_fields_of_json(tqchat, tiny) -> None:
    question = "Hello" * 40
    done = tqchat(tiny, "-p", question, *GREEDY, "--max-tokens", "9", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert list(answer) == FIELDS
    assert done.stdout.count("\n") == 1
    prompt = len(f"?user\n{question}?\n?assistant\n")
    assert (answer["prompt_tokens"], answer["cached_tokens"]) == (prompt, 0)
    assert (answer["completion_tokens"], answer["finish_reason"]) == (9, "length")
    # 3 layers, 2 KV heads of 32 channels, K and V, 2 bytes. The last token may not be held.
    held = answer["kv_bytes_fp16"] / (3 * 2 * 32 * 2 * 2)
    assert held in (prompt + 8, prompt + 9)
    assert 0 < answer["kv_bytes"] < answer["kv_bytes_fp16"]
    assert answer["kv_bytes"] <= answer["kv_bytes_allocated"]
    assert answer["headroom_bytes"] > 0
    for name in ("ttft_s", "prefill_tps", "decode_tps"):
        assert answer[name] > 0
    plain = tqchat(tiny, "-p", question, *GREEDY, "--max-tokens", "9")
    assert plain.stdout == answer["text"] + "\n"
    dense = tqchat(tiny, "-p", question, "--max-tokens", "9", "--json", "--kv", "fp16")
    answer = json.loads(dense.stdout)
    assert answer["kv_bytes"] == answer["kv_bytes_fp16"]


def test_stats_go_to_stderr(tqchat, tiny) -> None:
    options = ["-p", "Hello", *GREEDY, "--max-tokens", "8"]
    plain, stats = tqchat(tiny, *options), tqchat(tiny, *options, "--stats")
    assert stats.returncode == 0
    assert stats.stdout == plain.stdout
    for word in ("prompt tokens", "tok/s", "KV", "free"):
        assert word in stats.stderr
    both = tqchat(tiny, *options, "--stats", "--json")
    assert list(json.loads(both.stdout)) == FIELDS
    assert "tok/s" in both.stderr


def test_what_is_piped_in_is_the_question(tqchat, tiny) -> None:
    options = [*GREEDY, "--max-tokens", "8", "--json"]
    asked = json.loads(tqchat(tiny, "-p", "Hello", *options).stdout)
    piped = json.loads(tqchat(tiny, *options, stdin="Hello\n").stdout)
    assert piped["text"] == asked["text"]
    assert piped["prompt_tokens"] == asked["prompt_tokens"]


def test_documents_go_before_the_question(tqchat, tiny, tmp_path) -> None:
    (tmp_path / "one.txt").write_text("ONE " * 20)
    (tmp_path / "two.md").write_text("\ufeffTWO " * 30)
    options = [*GREEDY, "--max-tokens", "2", "--json"]

    def prompt_tokens(*arguments: str | Path, stdin: str = "") -> int:
        done = tqchat(tiny, *arguments, *options, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["prompt_tokens"])

    question = prompt_tokens("-p", "What?")
    with_one = prompt_tokens("-p", "What?", "-f", tmp_path / "one.txt")
    with_both = prompt_tokens("-p", "What?", "-f", tmp_path / "one.txt", "-f", tmp_path / "two.md")
    piped_too = prompt_tokens("-p", "What?", "-f", tmp_path / "one.txt", stdin="three")
    assert question + 79 < with_one < question + 79 + 200
    assert with_both > with_one + 119
    assert piped_too > with_one + len("three")
    assert prompt_tokens("-f", tmp_path / "one.txt") == with_one - len("\n\nWhat?")


def test_a_system_prompt(tqchat, tiny) -> None:
    options = ["-p", "Hello", *GREEDY, "--max-tokens", "2", "--json"]
    without = json.loads(tqchat(tiny, *options).stdout)
    with_it = json.loads(tqchat(tiny, *options, "--system", "Be kind.").stdout)
    more = with_it["prompt_tokens"] - without["prompt_tokens"]
    assert more == len("?system\nBe kind.?\n")


def test_a_seed_repeats_the_answer(tqchat, tiny) -> None:
    options = ["-p", "Hello", "--temperature", "2", "--max-tokens", "30", "--seed"]
    first, same, other = (tqchat(tiny, *options, seed) for seed in ("7", "7", "8"))
    assert first.stdout == same.stdout != other.stdout


def test_a_model_without_a_chat_template(tqchat, tmp_path) -> None:
    folder = write_tiny(tmp_path / "bare", template=None)
    done = tqchat(folder, "-p", "Hello", *GREEDY, "--max-tokens", "4")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "no chat template" in done.stderr


def test_the_settings_file_and_what_comes_before_it(tqchat, tiny, home) -> None:
    file = Path(tqchat("config", "path").stdout.strip())
    assert home in file.parents
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'model = "{tiny}"\ntemperature = 0\nmax_tokens = 3\n')
    answer = json.loads(tqchat("-p", "Hello", "--json").stdout)
    assert answer["completion_tokens"] == 3
    answer = json.loads(tqchat("-p", "Hello", "--json", "--max-tokens", "2").stdout)
    assert answer["completion_tokens"] == 2
    assert "max_tokens         = 3  # file" in tqchat("config", "show").stdout
    file.write_text("\n\nmax_tokens = 0\n")
    assert_refused(tqchat(tiny, "-p", "Hello"), str(file), "line 3", "max_tokens", "config edit")


def test_the_last_model_is_used_again(tqchat, tiny) -> None:
    options = [*GREEDY, "--max-tokens", "4"]
    first = tqchat(tiny, "-p", "Hello", *options)
    again = tqchat("-p", "Hello", *options)
    assert (again.returncode, again.stdout) == (0, first.stdout)


def test_the_log_is_for_its_owner_alone(tqchat, home) -> None:
    assert tqchat("--version").returncode == 0
    assert (home / "state" / "tqchat" / "tqchat.log").stat().st_mode & 0o777 == 0o600


def test_a_home_that_cannot_be_written_to(tqchat, tiny) -> None:
    """Nothing is remembered then, but the answer comes."""
    nowhere = {f"XDG_{kind}_HOME": "/dev/null/x" for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
    done = tqchat(tiny, "-p", "Hello", *GREEDY, "--max-tokens", "4", HOME="/dev/null/x", **nowhere)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1


def test_an_output_that_is_no_terminal_never_gets_the_screen(environment, tiny) -> None:
    """stdin is a terminal here, as when one types `tqchat | less`."""
    command = f"{sys.executable} -m tqchat {tiny} | cat; echo status=${{PIPESTATUS[0]}}"
    with Terminal(["bash", "-c", command], environment) as terminal:
        assert terminal.wait_for_exit() == 0
        terminal.assert_sane()
        assert b"\x1b[?1049h" not in terminal.output
        assert b"not a terminal" in terminal.output
        assert b"status=2" in terminal.output


def test_a_reader_that_leaves_early(environment, tiny) -> None:
    process = subprocess.Popen(
        [*TQCHAT, str(tiny), "-p", "Hello", *RANDOM, "--max-tokens", "3000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == b""


def test_the_terminal_obeys_no_sequence_from_the_model(environment, tiny) -> None:
    arguments = [*TQCHAT, str(tiny), "-p", "Hello", *RANDOM, "--max-tokens", "900"]
    done = subprocess.run(
        arguments, stdin=subprocess.DEVNULL, env=environment, capture_output=True, timeout=120
    )
    assert b"\x1b" in done.stdout, "the answer has none, so this shows nothing"
    with Terminal(arguments, environment) as terminal:
        assert terminal.wait_for_exit() == 0
        answer = terminal.output.rpartition(b"\r\x1b[K")[2].decode()
        assert len(answer) > 100
        assert [c for c in answer if unicodedata.category(c) == "Cc" and c not in "\r\n\t"] == []


def test_an_output_that_lacks_characters(tqchat, tiny) -> None:
    options = ["-p", "Hello", *RANDOM, "--max-tokens", "100"]
    done = tqchat(tiny, *options, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("?") > 10


# What is refused


def test_no_such_folder(tqchat, tmp_path, home) -> None:
    assert_refused(tqchat(tmp_path / "nowhere", "-p", "Hello"), "nowhere")
    assert_refused(tqchat("./nowhere", "-p", "Hello"), "nowhere")
    assert_refused(tqchat("nowhere", "-p", "Hello"), "nowhere", "smollm2")
    assert files(home) == {}


def test_a_folder_without_config(tqchat, tiny, tmp_path, home) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(tiny, folder)
    (folder / "config.json").unlink()
    assert_refused(tqchat(folder, "-p", "Hello"), "config.json")
    assert files(home) == {}


@pytest.mark.parametrize("kept", [4, 300, -5])
def test_truncated_safetensors(tqchat, tiny, tmp_path, home, kept) -> None:
    """Within the length of the header, within the header, within the last tensor."""
    folder = tmp_path / "folder"
    shutil.copytree(tiny, folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    before = files(folder)
    assert_refused(tqchat(folder, "-p", "Hello"), "model.safetensors")
    assert (files(folder), files(home)) == (before, {})


def test_a_missing_shard(tqchat, tiny, tmp_path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(tiny, folder)
    shard = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    weight_map = {"a": shard, "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_refused(tqchat(folder, "-p", "Hello"), "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 128}, ["mlp", "shape"]),
        ({"num_hidden_layers": 4}, ["model.layers.3"]),
        ({"num_hidden_layers": 2}, ["model.layers.2"]),
        ({"model_type": "bert"}, ["'bert'"]),
    ],
)
def test_a_config_of_another_model(tqchat, tmp_path, tiny, home, change, words) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert_refused(tqchat(folder, "-p", "Hello"), *words)
    assert files(home) == {}


def test_bert_as_it_is_published(tqchat, tmp_path, tiny) -> None:
    """Its tokenizer is of another kind too, but that is not what to say."""
    folder = tmp_path / "bert"
    shutil.copytree(tiny, folder)
    tokenizer = json.loads(byte_tokenizer().to_str())
    tokenizer["model"] = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"[UNK]": 0, "a": 1},
    }
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 64}))
    assert_refused(tqchat(folder, "-p", "Hello"), "'bert'")


@pytest.mark.parametrize("kept", [0, 20, 100_000, 20_000_000])
def test_a_gguf_cut_in_the_middle(tqchat, smollm2_gguf, tmp_path, home, kept) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read(kept))
    assert_refused(tqchat(path, "-p", "Hello"), "cut.gguf")
    assert files(home) == {}


@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, 2**60), (16, 2**60), (24, 2**63 - 1), (8, 3), (0, 0x4655474758585858)],
    ids=["tensor count", "key count", "string length", "too few tensors", "magic"],
)
def test_a_gguf_whose_header_lies(tqchat, smollm2_gguf, tmp_path, home, offset, value) -> None:
    path = tmp_path / "lies.gguf"
    shutil.copyfile(smollm2_gguf, path)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<Q", value))
    assert_refused(tqchat(path, "-p", "Hello"), "lies.gguf")
    assert files(home) == {}


@pytest.mark.parametrize("question", ["", "  \n\t "])
def test_an_empty_question(tqchat, tiny, home, question) -> None:
    assert_refused(tqchat(tiny, "-p", question), "-p")
    assert_refused(tqchat(tiny, stdin=question), "-p")
    assert files(home) == {}


def test_a_question_longer_than_the_context(tqchat, tiny) -> None:
    around = len("?user\n?\n?assistant\n")
    done = tqchat(tiny, "-p", "x" * 3000, "--context", "1000")
    # Nothing is suggested that the screen alone has.
    assert "/clear" not in done.stderr
    assert_refused(done, f"{3000 + around + 1 - 1000:,} more", "a shorter text", "a larger context")
    # One token of it must be left for the answer.
    fits = tqchat(tiny, "-p", "x" * (999 - around), "--context", "1000", *GREEDY, "--json")
    assert json.loads(fits.stdout)["finish_reason"] == "context"
    assert_refused(tqchat(tiny, "-p", "x" * (1000 - around), "--context", "1000"), " 1 more")


def test_documents_that_cannot_be_read(tqchat, tiny, tmp_path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    assert_refused(tqchat(tiny, "-p", "?", "-f", tmp_path / "none.txt"), "none.txt", "No such file")
    assert_refused(
        tqchat(tiny, "-p", "?", "-f", "~nobody-of-this-name/a"), "nobody", "No such file"
    )
    assert_refused(tqchat(tiny, "-p", "?", "-f", tmp_path), "folder")
    assert_refused(tqchat(tiny, "-p", "?", "-f", tmp_path / "picture.png"), "binary")
    assert_refused(tqchat(tiny, stdin=b"\xff\xfe\xfd"), "UTF-16")
    assert_refused(tqchat(tiny, stdin=b"a\0b"), "binary")


def test_a_files_name_is_safe_to_print(tqchat, tiny, tmp_path) -> None:
    (tmp_path / "\x1b[31m.txt").write_bytes(b"caf\xe9")
    done = tqchat(tiny, "-p", "?", "-f", tmp_path / "\x1b[31m.txt", "--max-tokens", "1")
    assert done.returncode == 0
    assert "Windows-1252" in done.stderr
    assert done.stderr.removesuffix("\n").isprintable()


@pytest.mark.parametrize(
    "option",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--top-p", "1.5"],
        ["--top-k", "-3"],
        ["--max-tokens", "0"],
        ["--context", "many"],
        ["--kv", "int2"],
        ["--continue", "--resume", "20260101-000000-abcd"],
    ],
)
def test_options_out_of_range(tqchat, tiny, option) -> None:
    done = tqchat(tiny, "-p", "Hello", *option)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert option[0] in done.stderr


# Ctrl-C

SLOW = {"num_hidden_layers": 24, "max_position_embeddings": 32768}
# An answer that lasts: left alone, this model soon repeats itself and is stopped.
LASTING = [*GREEDY, "--repetition-penalty", "1.3"]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deep enough that a prompt and an answer take a while."""
    return write_tiny(tmp_path_factory.mktemp("models") / "slow", **SLOW)


def interrupted(environment: dict[str, str], sign: bytes, *arguments: str | Path) -> bytes:
    """What was written by a run that Ctrl-C ended once it had written `sign`."""
    with Terminal([*TQCHAT, *map(str, arguments)], environment) as terminal:
        terminal.wait_for_output(sign)
        terminal.type("\x03")
        assert terminal.wait_for_exit() == 130
        terminal.assert_sane()
        assert b"Traceback" not in terminal.output
        return terminal.output


def test_ctrl_c_during_load(environment, smollm2_gguf) -> None:
    output = interrupted(environment, rb"Reading SmolLM2|Reading /", smollm2_gguf, "-p", "Hello")
    assert b"Reading the prompt" not in output


def test_ctrl_c_during_prefill(environment, slow, tmp_path) -> None:
    (tmp_path / "long.txt").write_text("A line of text.\n" * 1500)
    output = interrupted(
        environment, rb"Reading the prompt: \d%", slow, "-f", tmp_path / "long.txt"
    )
    assert b"100%" not in output.rpartition(b"Reading the prompt")[2]


def test_ctrl_c_during_decode(environment, slow) -> None:
    output = interrupted(environment, rb"100%\r\x1b\[K[^\r\x1b]", slow, "-p", "Hello", *LASTING)
    assert output.count(b"Reading the prompt: 100%") == 1


def test_ctrl_c_again_and_again(environment, slow) -> None:
    """The later ones fall into the clean-up after the first."""
    with Terminal([*TQCHAT, str(slow), "-p", "Hello", *LASTING], environment) as terminal:
        terminal.wait_for_output(rb"100%\r\x1b\[K[^\r\x1b]")
        for _ in range(6):
            terminal.type("\x03")
            time.sleep(0.02)
        assert terminal.wait_for_exit() == 130
        terminal.assert_sane()
        assert b"Traceback" not in terminal.output


def test_sigint_at_any_moment(environment, home, slow) -> None:
    """Also between those: while modules are imported, at the first token, in the last lines."""
    begun = home / "state" / "tqchat" / "tqchat.log"
    for tenth in (0, 0.2, 0.5, 1, 2, 4, 8):
        begun.unlink(missing_ok=True)
        process = subprocess.Popen(
            [*TQCHAT, str(slow), "-p", "Hello" * 200, *LASTING],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(tenth / 10)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (130, b""), f"after {tenth / 10} s"


def test_a_name_that_is_no_model_ends_before_the_screen(tqchat) -> None:
    assert_refused(tqchat("modles"), "no model 'modles'", "tqchat models")
    assert "Or did you mean" not in tqchat("nope-model").stderr


def test_a_theme_that_is_none_is_refused_wherever_it_is_named(tqchat, tiny, home) -> None:
    assert_refused(tqchat(tiny, "-p", "Hi", "--theme", "tq-drak"), "'tq-drak'", "tq-dark?")
    own = home / "config" / "tqchat" / "themes"
    own.mkdir(parents=True)
    (own / "mine.toml").write_text("primary = 7\n")
    assert_refused(tqchat(tiny, "-p", "Hi", "--theme", "mine"), "theme mine.toml")


def test_a_full_disk_under_stdout_is_one_line(tqchat, tiny) -> None:
    command = [sys.executable, "-m", "tqchat", str(tiny), "-p", "Hi", "--max-tokens", "3"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("stream", ["<&-", "2>&-"])
def test_missing_streams_do_not_matter(tiny, stream) -> None:
    command = f"{sys.executable} -m tqchat {tiny} -p Hi --max-tokens 3 {stream}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done
    assert done.stdout.strip()
