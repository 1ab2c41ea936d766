"""What load() refuses, always in one line: models that cannot be probed, names and folders that lead nowhere."""

import json
from types import SimpleNamespace

import pytest
import tiny as families
import torch
from torch import nn

from kvprobe import models, sources
from kvprobe.errors import ModelError


def test_set_attn_implementation_without_effect_is_refused(tiny_folder, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "set_attn_implementation", lambda self, name: None)
    one_line(
        tiny_folder("llama"),
        r"LlamaForCausalLM: all 3 layers keep the class' own attention \(set_attn_implementation had no effect\)",
    )


def save(config, folder, kind="AutoModelForCausalLM"):
    import transformers

    torch.manual_seed(0)
    getattr(transformers, kind).from_config(config).save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


def one_line(source, says, **options):
    with pytest.raises(ModelError, match=says) as caught:
        models.load(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_class_with_an_attention_of_its_own_is_refused(tmp_path):
    from transformers import BloomConfig

    one_line(
        save(BloomConfig(vocab_size=320, hidden_size=48, n_layer=2, n_head=6), tmp_path),
        "BloomForCausalLM: all 2 layers keep",
    )


@pytest.mark.parametrize("name", ["T5Config", "BartConfig"])
def test_an_encoder_decoder_is_refused(name, tmp_path):
    import transformers

    sizes = {"vocab_size": 320, "d_model": 48}
    small = {"num_layers": 2, "num_heads": 6, "d_ff": 64, "d_kv": 8} if name == "T5Config" else {
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    folder = save(getattr(transformers, name)(**sizes, **small), tmp_path / "pair", "AutoModelForSeq2SeqLM")
    one_line(folder, "^pair is an encoder-decoder; allowed: decoder-only language models$")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": ["chunked_attention", "full_attention"]}, r"attention of kind \['chunked_attention'\]"),
        (
            {"layer_types": ["linear_attention"]},
            r"\['linear_attention'\] \(layers \[0\]\) is not supported; allowed: full and sliding",
        ),
        ({"attention_chunk_size": 8192}, r"\['chunked'\]"),
    ],
)
def test_attention_that_a_window_does_not_describe_is_refused(changes, says):
    text = SimpleNamespace(**{"layer_types": None, "attention_chunk_size": None} | changes)
    hf = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), parameters=lambda: iter(()))
    with pytest.raises(ModelError, match=says):
        models._refuse_unsupported(hf, "strange")


def test_offloaded_weights_are_refused(tiny_folder):
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    hf = SimpleNamespace(config=config, parameters=lambda: nn.Linear(2, 2, device="meta").parameters())
    with pytest.raises(ModelError, match="partly offloaded to disk: the twin cannot share its weights"):
        models._refuse_unsupported(hf, "big")


@pytest.mark.parametrize("name", [None, 5, 1.5, ["smollm2-135m"]])
def test_what_is_not_a_name_is_refused(name):
    one_line(name, r"is not a model: give 'smollm2-135m', a folder with config.json, or a hub name")


@pytest.mark.parametrize("name", ["./nothing-here", "/no/such/folder", "../nothing-here", "a/b/c", "~/nothing-here"])
def test_a_folder_that_is_not_there(name):
    one_line(name, f"'{name}' is not a model folder: give 'smollm2-135m'")


def test_a_file_instead_of_a_folder(tiny_folder):
    path = tiny_folder("llama") / "config.json"
    one_line(path, "config.json' is not a model folder")


def test_an_unknown_name():
    message = one_line("nobody/no-such-model", "cannot load 'nobody/no-such-model'")
    assert "allowed: 'smollm2-135m', a folder saved by transformers, or a hub name" in message


def test_an_unreachable_hub_fails_at_once(monkeypatch):
    from huggingface_hub import constants

    def unreachable(*a, **k):
        raise OSError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in sources.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sources.socket, "getaddrinfo", unreachable)
    one_line("nobody/no-such-model", r"not in the local hub cache, and .* cannot be reached")


def copied(tiny_folder, tmp_path, family="llama"):
    import shutil

    return shutil.copytree(tiny_folder(family), tmp_path / "copy")


def test_an_empty_folder(tmp_path):
    one_line(tmp_path, "cannot load ")


@pytest.mark.parametrize("text", ["{not json", "[]", "{}", '{"model_type": "no_such_type"}'])
def test_a_bad_config(text, tiny_folder, tmp_path):
    folder = copied(tiny_folder, tmp_path)
    (folder / "config.json").write_text(text)
    one_line(folder, "cannot load 'copy'")


@pytest.mark.parametrize("keep", [0, 100, 20_000])
def test_truncated_weights(keep, tiny_folder, tmp_path):
    folder = copied(tiny_folder, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    one_line(folder, "cannot load 'copy'")


def test_weights_of_another_size(tiny_folder, tmp_path):
    folder = copied(tiny_folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    one_line(folder, "cannot load 'copy'")


def test_weights_that_are_missing_are_not_made_up(tiny_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(tiny_folder, tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    one_line(folder, r"copy: 1 weights of LlamaForCausalLM are not in its files \(\['model.layers.1.self_attn.o_proj")


def test_no_tokenizer(tiny_folder, tmp_path):
    folder = copied(tiny_folder, tmp_path)
    for path in folder.glob("token*"):
        path.unlink()
    one_line(folder, "cannot load 'copy'")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float7"}, "cannot load 'llama': .*float7"),
        ({"device": "nowhere"}, "device='nowhere' is not available"),
        ({"no_such_option": 1}, "cannot load 'llama': .*no_such_option"),
    ],
)
def test_options_that_do_not_exist(options, says, tiny_folder):
    one_line(tiny_folder("llama"), says, **options)


def test_code_from_a_folder_is_not_run_unasked(tiny_folder, tmp_path):
    folder, trace = copied(tiny_folder, tmp_path), tmp_path / "it ran"
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass EvilConfig: pass\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": own}))
    one_line(folder, "cannot load 'copy'.*contains custom code")
    assert not trace.exists()


def test_a_bridge_that_cannot_be_built_is_one_line(tiny_folder, monkeypatch):
    from transformer_lens.model_bridge import TransformerBridge

    def broken(*a, **k):
        raise KeyError("a\nb")

    monkeypatch.setattr(TransformerBridge, "boot_transformers", broken)
    one_line(
        tiny_folder("llama"),
        r"llama \(LlamaForCausalLM\): TransformerLens has no working bridge .*KeyError.*; way out: an architecture",
    )
