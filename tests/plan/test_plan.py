"""Plans of loaded models and of configs, the command that prints them, and what a process really holds under one."""

import json
import subprocess
import sys

import pytest
import torch

from kvprobe import Prompt, observe, plan
from kvprobe.cli import main
from kvprobe.costs import Job, peak
from kvprobe.errors import ModelError, PlanError
from kvprobe.sizes import Limits

REAL = """
import sys, torch, kvprobe as kp
from kvprobe.sizes import Limits

def rss(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) << 10

def peak():
    return rss("VmHWM")

model = kp.load("smollm2-135m")
n = int(sys.argv[1])
prompt = kp.Prompt.from_ids(torch.randint(10, 49000, (n,), generator=torch.Generator().manual_seed(0)))
kp.observe(model, kp.Prompt.from_ids(prompt.ids[:64]))  # what a first pass loads once
open("/proc/self/clear_refs", "w").write("5")
before = rss("VmRSS")
plan = kp.plan.make(model, length=n, arms=16, suffix=40, chunk=int(sys.argv[2]) or None)
trace = kp.observe(model, prompt, plan=plan)
kp.span_stats(trace, [(s, s + 20) for s in range(100, 900, 100)])
masks = [kp.KVMask(keys=(s, s + 20)) for s in range(100, 900, 50)]
outs = kp.intervene(model, prompt, masks, suffix=40, prefix=trace.prefix(n - 40), plan=plan)
assert all(out.receipt.masked_weight == 0 for out in outs) and len(outs) == 16
print(before, plan.base_bytes, plan.peak_bytes, peak(), plan.chosen.chunk, plan.chosen.batch)
"""


def made(model, **options):
    return plan.make(model, **{"length": 300, "arms": 4, "suffix": 20} | options)


def test_a_plan_of_a_model(tiny):
    found = made(tiny("llama"), memory="4GiB", queries=3)
    assert (found.model, found.dtype, found.device) == ("llama", "float32", "cpu")
    assert found.fits and found.memory_bytes == 4 << 30 and found.limits == found.chosen == Limits(300, 4, 8 << 20)
    assert found.peak_bytes == peak(found.base_bytes, list(found.steps)) > found.base_bytes > found.weights_bytes
    names = ["KV cache", "allocator", "prefill", "observed rows", "one layer of them", "arms", "results of arms"]
    assert [step.name for step in found.steps] == names
    told = json.loads(json.dumps(found.to_dict()))
    assert told["length"] == 300 and told["chunk"] == 300 and told["batch"] == 4 and told["fits"]
    assert told["flops"] == sum(step["flops"] for step in told["steps"]) > 0
    cache = next(step for step in told["steps"] if step["name"] == "KV cache")
    assert cache["n_bytes"] == 300 * 3 * 2 * 2 * 8 * 4


def test_a_folder_is_planned_without_its_weights(tiny_folder, tmp_path):
    import shutil

    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    found = made(folder, memory="4GiB")
    assert found.model == "bare" and found.base_bytes == found.weights_bytes + plan.PROCESS_BYTES
    half = made(folder, memory="4GiB", dtype="bfloat16", device="cuda:1")
    assert half.weights_bytes < 0.52 * found.weights_bytes and half.base_bytes == half.weights_bytes
    assert half.device == "cuda:1" and half.chosen.logits_bytes == 256 << 20


def test_a_plan_that_does_not_fit_runs_nothing(tiny):
    model = tiny("llama")
    found = made(model, memory=1000)
    assert not found.fits and found.peak_bytes > 1000
    with pytest.raises(
        PlanError, match=r"llama: 300 tokens and 4 arms need .* at least, the plan has 0.977 KiB; allowed: "
    ):
        observe(model, Prompt.from_ids(range(3, 303)), plan=found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 0}, "length=0 is not allowed: give a whole number of 1 or more"),
        ({"length": 2.5}, "length=2.5 is not allowed"),
        ({"length": 513}, "length=513 is beyond the 512 positions that llama has"),
        ({"queries": -1}, "queries=-1 is not allowed: give a whole number of 0 or more"),
        ({"queries": 301}, "queries=301, suffix=20; allowed: at most the length, 300"),
        ({"suffix": 400}, "queries=1, suffix=400; allowed: at most the length, 300"),
        ({"arms": True}, "arms=True is not allowed"),
        ({"chunk": 0}, "chunk=0 is not allowed"),
        ({"batch": "3"}, "batch='3' is not allowed"),
        ({"memory": "much"}, "memory='much' is not an amount; allowed: 6GiB, 512MiB, or a number of bytes"),
        ({"memory": 0}, "memory=0 is not an amount"),
        ({"memory": "-3GiB"}, "memory='-3GiB' is not an amount"),
    ],
)
def test_what_makes_no_plan(options, says, tiny):
    with pytest.raises(PlanError, match=says):
        made(tiny("llama"), **options)


def test_a_run_that_is_larger_than_its_plan_is_refused(tiny):
    from kvprobe import KVMask, intervene

    model, prompt = tiny("llama"), Prompt.from_ids(range(3, 303))
    small = plan.make(model, length=50, arms=0, memory="4GiB")
    with pytest.raises(PlanError, match="the plan is for 50 tokens, this run has 300; allowed: at most what"):
        observe(model, prompt, plan=small)
    found = made(model, memory="4GiB")
    with pytest.raises(PlanError, match="the plan is for 1 observed rows, this run has 2"):
        observe(model, prompt, [5, 9], plan=found)
    with pytest.raises(PlanError, match="the plan is for 4 arms, this run has 5"):
        intervene(model, prompt, [KVMask((3, 6))] * 5, suffix=20, plan=found)
    with pytest.raises(PlanError, match="the plan is for 20 rows of an arm, this run has 21"):
        intervene(model, prompt, [KVMask((3, 6))], suffix=21, plan=found)
    assert len(intervene(model, prompt, [KVMask((3, 6))] * 4, suffix=20, plan=found)) == 4


def test_a_plan_that_does_not_fit_says_how_little_it_takes(tiny):
    job = {"length": 500, "arms": 16, "suffix": 30}
    hopeless = plan.make(tiny("llama"), **job, memory=1000)
    assert hopeless.chosen == Limits(128, 1, 1 << 20)
    assert hopeless.peak_bytes <= plan.make(tiny("llama"), **job, memory="4GiB").peak_bytes


@pytest.mark.parametrize("field", ["chunk", "batch", "logits_bytes"])
@pytest.mark.parametrize("value", [0, -3, "a", 1.5, True])
def test_what_limits_nothing(field, value):
    with pytest.raises(PlanError, match=f"{field}=.* is not allowed: give None, or a whole number of 1 or more"):
        Limits(**{field: value})


def test_the_memory_of_a_device_that_is_not_here(tiny_folder, monkeypatch):
    def absent(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "mem_get_info", absent)
    with pytest.raises(PlanError, match=r"the memory of cuda cannot be read here .*; allowed: say how much"):
        made(tiny_folder("llama"), device="cuda")


def test_names_dtypes_and_devices_that_do_not_exist(tiny_folder):
    with pytest.raises(ModelError, match="is not a model folder"):
        made("./nowhere")
    with pytest.raises(PlanError, match="dtype='int8' is not a floating-point dtype"):
        made(tiny_folder("llama"), dtype="int8")
    with pytest.raises(PlanError, match="device='gpu' is not a device; allowed: cpu, cuda"):
        made(tiny_folder("llama"), device="gpu")


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss"])
def test_the_command(family, tiny_folder, capsys):
    words = ["plan", str(tiny_folder(family)), "--length", "400", "--arms", "3", "--suffix", "9", "--json"]
    assert main([*words, "--memory", "4GiB"]) == 0
    out = capsys.readouterr().out
    told = json.loads(out.splitlines()[-1])
    assert told["fits"] and told["chunk"] == 400 and told["batch"] == 3
    assert "KV cache" in out and "fits into 4 GiB" in out and "a prefill pass takes 400 tokens, a pass of arms 3" in out
    assert main([*words, "--memory", "1KiB"]) == 1
    out = capsys.readouterr().out
    assert "does NOT fit into 1 KiB" in out and not json.loads(out.splitlines()[-1])["fits"]


def test_no_observed_rows_and_no_arms(tiny):
    found = made(tiny("gpt2"), queries=0, arms=0)
    assert [step.name for step in found.steps] == ["KV cache", "allocator", "prefill"]
    assert found.job == Job(300, 0, 0, 20, batch=found.job.batch)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a process' peak can be reset on Linux only")
@pytest.mark.parametrize("chunk", [0, 256])
def test_a_process_holds_what_its_plan_says(chunk, smol_path):
    """The embedded model: the true peak of the process within 20 % of the plan, and so is what the run itself adds."""
    words = [sys.executable, "-c", REAL, "2048", str(chunk)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=True)
    before, base, said, held, used, batch = (int(word) for word in done.stdout.split()[-6:])
    assert smol_path and abs(base - before) < 0.02 * before and (used, batch) == (chunk or 2048, 16)
    assert 0.8 < said / held < 1.2
    assert 0.75 < (said - base) / (held - before) < 1.5


def test_memory_in_words():
    from kvprobe.sizes import as_bytes, at_hand, held, written

    sizes = {
        "6GiB": 6 << 30,
        "512 MB": 512 << 20,
        "1.5g": 3 << 29,
        "100": 100,
        7: 7,
        "2 kib": 2048,
        "1T": 1 << 40,
        "1e9": 10**9,
    }
    assert all(as_bytes(text) == size for text, size in sizes.items())
    sizes = {5: "5 B", 1000: "0.977 KiB", 2048: "2 KiB", 360 << 20: "360 MiB", 3 << 30: "3 GiB", 5 << 40: "5 TiB"}
    assert {n: written(n) for n in sizes} == sizes
    assert at_hand(torch.device("cpu")) > held() > 50 << 20


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("falcon", {}, "FalconForCausalLM keeps its own attention, and kvprobe.load refuses it"),
        ("llama4_text", {}, r"attention of kind \['chunked_attention'\]"),
        ("jamba", {}, r"attention of kind \['(linear_attention|mamba)'\]"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "has quantised weights"),
    ],
)
def test_configs_that_have_no_plan(family, changes, says, tmp_path):
    import tiny as families

    config = families.config(family)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises((PlanError, ModelError), match=says) as caught:
        made(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "cohere2", "phi3", "gpt_neox", "olmo3"])
def test_other_families_have_plans(family, tmp_path):
    import tiny as families

    families.config(family).save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16", "float16"):
        found = made(tmp_path, dtype=dtype, memory="4GiB")
        assert found.fits and found.dtype == dtype and found.to_dict()["flops"] > 0
