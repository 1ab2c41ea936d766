"""load(): one copy of the weights, a twin that is used only if it can be trusted, and one line for every refusal."""

import json
import random
from types import SimpleNamespace

import pytest
import tiny as families
import torch
from torch import nn
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, intervene, models, observe
from kvprobe.errors import InterventionError, ModelError

every_family = pytest.mark.parametrize("family", families.FAMILIES)
WINDOWS = {
    "gpt2": (None,) * 3,
    "llama": (None,) * 3,
    "mistral": (5,) * 3,
    "gemma2": (5, None, 5),
    "gpt_oss": (6, None, 6),
}


@every_family
def test_geometry(family, tiny):
    geometry = tiny(family).geometry
    kv_heads = 6 if family == "gpt2" else 2
    assert (geometry.n_layers, geometry.n_heads, geometry.n_kv_heads, geometry.group) == (3, 6, kv_heads, 6 // kv_heads)
    assert (geometry.head_dim, geometry.d_model, geometry.vocab) == (8, 48, 320)
    assert geometry.windows == WINDOWS[family]
    assert geometry.softcaps == ((2.0 if family == "gemma2" else None),) * 3
    assert geometry.has_sink == (family == "gpt_oss")


@every_family
def test_facts_about_a_model(family, tiny):
    model = tiny(family)
    assert model.name == family and model.max_length == 512
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert model.meta == {
        "model": family,
        "dtype": "float32",
        "processing": "raw",
        "versions": dict(model.report.versions),
    }
    assert json.loads(json.dumps(model.meta)) == model.meta
    assert model.decode([1, 75, 76]) == "<s>" + model.tokenizer.decode([75, 76])


def storages(*modules):
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@every_family
def test_the_weights_exist_once(family, tiny, plain):
    """The twin's tensors are the bridge's, and all together take the bytes of one transformers model.

    (TransformerLens adds one vector of zeros: the unembedding bias that these models do not have.)
    """
    model, once = tiny(family), storages(plain(family).hf)
    original = model.bridge.original_model
    assert {t.data_ptr() for t in model.twin.parameters()} <= {t.data_ptr() for t in original.parameters()}
    assert {t.data_ptr() for t in model.twin.buffers()} <= {t.data_ptr() for t in original.buffers()}
    assert sorted(storages(model.twin).values()) == sorted(once.values())
    assert sum(storages(model.twin, model.bridge, original).values()) == sum(once.values()) + 320 * 4


@every_family
def test_the_twin_is_the_same_class_with_another_attention(family, tiny):
    model = tiny(family)
    assert type(model.twin) is type(model.bridge.original_model)
    assert model.twin.config is not model.bridge.original_model.config
    assert model.bridge.original_model.config._attn_implementation == "eager"
    assert not model.twin.training and model.twin is not model.bridge.original_model


def test_a_change_of_a_weight_shows_in_twin_and_bridge(tiny_folder):
    model = models.load(tiny_folder("llama"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model.twin(input_ids=ids).logits
        model.twin.lm_head.weight.mul_(2)
        assert_close(model.twin(input_ids=ids).logits, before * 2)
        assert_close(model.bridge(ids, prepend_bos=False), before * 2, atol=1e-4, rtol=1e-4)


@every_family
def test_bridge_and_twin_compute_what_transformers_computes(family, tiny, plain):
    model, ids = tiny(family), torch.randint(3, 320, (1, 20), generator=torch.Generator().manual_seed(2))
    reference = plain(family)(ids[0]).logits
    with torch.no_grad():
        assert_close(model.bridge(ids, prepend_bos=False)[0], reference, atol=5e-5, rtol=1e-5)
        assert_close(model.twin(input_ids=ids).logits[0], reference, atol=5e-5, rtol=1e-5)


def test_loading_changes_nothing_outside(tiny_folder):
    from transformers.utils import logging

    torch.manual_seed(11)
    random.seed(11)
    expected = torch.rand(3), random.random()
    torch.manual_seed(11)
    random.seed(11)
    bars, dtype, grad = logging.is_progress_bar_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()
    models.load(tiny_folder("llama"))
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
    assert (logging.is_progress_bar_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()) == (
        bars,
        dtype,
        grad,
    )


def test_two_loads_are_two_models_that_agree(tiny_folder):
    first, second = models.load(tiny_folder("gpt2")), models.load(str(tiny_folder("gpt2")))
    prompt = Prompt.from_ids([5, 6, 7, 8])
    assert first.twin is not second.twin
    assert not {t.data_ptr() for t in first.twin.parameters()} & {t.data_ptr() for t in second.twin.parameters()}
    outs = [intervene(model, prompt, KVMask((0, 2)), suffix=1).logits for model in (first, second)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gpt2"])
def test_half_precision(family, dtype, tiny_folder):
    """Against the same rounded weights in fp32: at most twice as far off as transformers' own half precision is."""
    from oracles import Cutout, Plain, bias_table

    model = models.load(tiny_folder(family), dtype=dtype)
    half = model.dtype
    assert half == (getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    reference, naive = Plain(tiny_folder(family)), Plain(tiny_folder(family), half)
    for mine, rounded in zip(reference.hf.parameters(), naive.hf.parameters(), strict=True):
        mine.data.copy_(rounded.data)
    ids = torch.randint(3, 320, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    cutout = Cutout(((9, 12),), (0, 1, 2), dict.fromkeys(range(3), tuple(range(6))), "after")
    table = bias_table([cutout], 20, n=20, suffix=8, n_layers=3, n_heads=6)
    out = intervene(model, Prompt.from_ids(ids), [(), KVMask((9, 12), queries="after")], suffix=8)
    for outcome, bias in zip(out, (torch.zeros_like(table), table), strict=True):
        assert outcome.logits.dtype == half and not outcome.logits.isnan().any()
        truth = reference(ids, bias).logits[-8:]
        budget = (naive(ids, bias).logits[-8:].float() - truth).abs()
        error = (outcome.logits.float() - truth).abs()
        assert float(error.max()) < 2 * float(budget.max()) and float(error.mean()) < 2 * float(budget.mean())
        assert outcome.receipt.masked_weight == 0 and outcome.receipt.retained.dtype == torch.float32
    rows = observe(model, Prompt.from_ids(ids), [12]).layer(0).attention
    assert rows.dtype == torch.float32
    assert_close(rows, reference(ids).attention[0][:, [12]], atol=2e-2, rtol=0)


def test_set_attn_implementation_without_effect_is_refused(tiny_folder, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "set_attn_implementation", lambda self, name: None)
    one_line(
        tiny_folder("llama"), r"LlamaForCausalLM keeps its own attention \(set_attn_implementation had no effect\)"
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

    one_line(save(BloomConfig(vocab_size=320, hidden_size=48, n_layer=2, n_head=6), tmp_path), "BloomForCausalLM keeps")


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
        ({"layer_types": ["linear_attention"]}, r"\['linear_attention'\] is not supported; allowed: full and sliding"),
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


@pytest.mark.parametrize("name", ["./nothing-here", "/no/such/folder", "../x", "a/b/c", "~/nothing-here"])
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
    for name in models.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(models.socket, "getaddrinfo", unreachable)
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
    one_line(tiny_folder("llama"), r"TransformerLens has no working bridge for llama \(LlamaForCausalLM\)")


@pytest.mark.parametrize("suffix", [0, 5, -1, 2.0, "2"])
def test_a_scene_has_a_suffix_that_fits(suffix, tiny):
    prompt = Prompt.from_ids([0, 0, 5, 6, 7, 8], {"a": (3, 5)}, attention_mask=[0, 0, 1, 1, 1, 1])
    scene = tiny("mistral").scene(prompt, 3)
    assert (scene.n, scene.suffix, scene.offset, scene.windows) == (4, 3, 2, (5, 5, 5))
    assert scene.spans == (("a", (3, 5)),) and tiny("mistral").scene(prompt).suffix == 0
    with pytest.raises(InterventionError, match=r"suffix=.* is not allowed: give a whole number, 1 … 4"):
        tiny("mistral").scene(prompt, suffix)


def test_the_embedded_model_goes_by_its_names(smol, monkeypatch, tiny_folder):
    from kvprobe import embedded

    assert smol.name == "smollm2-135m" and smol.geometry.group == 3 and smol.geometry.n_layers == 30
    monkeypatch.setattr(embedded, "ensure", lambda: tiny_folder("llama"))
    for name in ("smollm2-135m", "SmolLM2-135M-Instruct"):
        assert models._resolve(name) == (str(tiny_folder("llama")), "smollm2-135m")
