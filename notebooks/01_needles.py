# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One needle, step by step
#
# A needle is a sentence that we hide in a long text and then ask about. Because we planted it, we know exactly which
# tokens hold the evidence. This notebook asks, on a real trained model:
#
# 1. which heads look at the evidence while the model answers,
# 2. how much the answer depends on it: we cut the evidence out of the cache and look at the answer again,
# 3. why the attention of a masked run must be corrected before anything is concluded from it.
#
# Everything runs on the embedded model (SmolLM2-135M-Instruct) on a laptop.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch
from IPython.display import display

import kvprobe as kp

model = kp.load("smollm2-135m")
print(model.report.architecture, "- every layer can be masked:", all(layer.maskable for layer in model.report.layers))
print(f"largest difference between the fast path and TransformerLens hooks: {model.report.mask_max_diff:.1e} (logits)")

# %% [markdown]
# ## An item
#
# `niah_multikey_1` is RULER's task: four needles of one form in an essay, one of them asked about. The other three are
# the fair comparison, since they look just as unusual in the text as the evidence does. We plant four unrelated facts
# (decoys) as well.

# %%
item = kp.tasks.make("niah_multikey_1", model, length=1000, seed=1, decoys=4, distractors=8)
question = item.prompt["question"]
print(f"{len(item.prompt)} tokens; the answer is {item.references[0]}")
print("...", model.decode(item.prompt.ids[question[0] :]))
for label in ("evidence", "hard", "decoy"):
    start, stop = item.spans[label][0]
    print(f"{label:9s} {start:4d}-{stop:<4d} {model.decode(item.prompt.ids[start:stop])!r}")

# %% [markdown]
# ## What the heads look at
#
# We append the right answer and keep the attention rows of the last prompt token and of every answer token, from one
# pass. `span_stats` gives, for each layer, head, query and span: attention mass, value mass, the bound of CriticalKV's
# Theorem 3.3, the tighter centred bound, and the exact perturbation of the head's output if the span were gone.

# %%
n = len(item.prompt)
rows = list(range(n - 1, n + len(item.answer_ids)))
trace = kp.observe(model, item.prompt.extended(item.answer_ids), rows)
labels = [(label, span) for label in ("evidence", "hard", "decoy", "distractor") for span in item.spans[label]]
table = kp.span_stats(trace, [span for _, span in labels])
names = {span: label for label, span in labels}
table["label"] = [names[span] for span in zip(table["start"], table["stop"], strict=True)]
answer = table[table["query"] >= n]
columns = ["mass", "value_mass", "perturbation", "centred_bound", "bound"]
display(answer.groupby("label")[columns].mean().round(4))

# %% [markdown]
# The three right-hand columns are always in this order, in every cell: the exact perturbation is at most the centred
# bound, which is at most Theorem 3.3's bound.

# %%
in_order = (table["perturbation"] <= table["centred_bound"] * (1 + 1e-6)) & (
    table["centred_bound"] <= table["bound"] * (1 + 1e-6)
)
print(f"{in_order.sum()} of {len(table)} cells in order")

# %% [markdown]
# ### Head map
#
# For every head: does it give the evidence more attention than the other needles and decoys, at the answer tokens? The
# share of comparisons won is the AUROC: 1 always, 0.5 as by chance.

# %%
mass = answer.groupby(["layer", "head", "label", "start"])["mass"].mean().reset_index()
evidence = mass[mass["label"] == "evidence"].set_index(["layer", "head"])["mass"]
others = mass[mass["label"].isin(["hard", "decoy"])].set_index(["layer", "head"])["mass"]
won = (evidence.reindex(others.index) > others).groupby(["layer", "head"]).mean().rename("auroc").reset_index()
figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
image = kp.plots.head_map(ax, won, title="Evidence against other needles and decoys, answer tokens, one item")
figure.colorbar(image, label="AUROC")
plt.show()

# %% [markdown]
# The head whose output the evidence moves most, by exact perturbation, and what it reads at the token that predicts the
# first digit of the answer:

# %%
strongest = answer[answer["label"] == "evidence"].groupby(["layer", "head"])["perturbation"].mean().idxmax()
layer, head = (int(index) for index in strongest)
spans = {label: item.spans[label] for label in ("evidence", "hard", "decoy")}
figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
kp.plots.head_spans(trace, layer, head, query=n, spans=spans, ax=ax)
plt.show()

# %% [markdown]
# ## Cutting the evidence out of the cache
#
# `KVMask` adds −∞ to the attention logits of the chosen keys, for the question and answer tokens only: the context is
# read as before, then the evidence is evicted. All arms share one prefill and run as one batch. The empty mask is the
# clean arm.

# %%
arms = {
    "clean": kp.KVMask(keys=[]),
    "evidence": kp.KVMask(keys=item.spans["evidence"]),
    "another needle": kp.KVMask(keys=item.spans["hard"][:1]),
    "a decoy": kp.KVMask(keys=item.spans["decoy"][:1]),
    "haystack": kp.KVMask(keys=item.spans["distractor"][:1]),
}
outcomes = kp.intervene(
    model,
    item.prompt,
    list(arms.values()),
    suffix=n - item.context_stop,
    continuation=item.answer_ids,
    generate=len(item.answer_ids) + 4,
)
rows_out = []
for name, outcome in zip(arms, outcomes, strict=True):
    predicts = outcome.logits[-len(item.answer_ids) - 1 : -1]
    logprob = kp.outcomes.answer_logprobs(predicts, item.answer_ids).sum().item()
    written = model.tokenizer.decode(outcome.generated)
    rows_out.append({"cut": name, "log-prob of the answer": logprob, "writes": written, **outcome.receipt.to_dict()})
display(pd.DataFrame(rows_out).set_index("cut").round(3))

# %% [markdown]
# Each arm carries a receipt: the weight left on masked keys is exactly 0, the bias met exactly as many visible cells as
# positions say it must, on every layer. A receipt that does not hold raises an error.
#
# ## Raw attention of a masked run misleads
#
# After the cut, the surviving keys share the whole attention: each weight grows by 1/R, where R is the mass that was
# kept. That is arithmetic, not behaviour. `corrected_attention` takes it out, and `attention_change` splits the change
# exactly. Here is the mean change of attention on the first four positions and on the rest of the context:

# %%
clean, masked = outcomes[0], outcomes[1]
keep_rows = len(item.answer_ids) + 1
start, stop = item.spans["evidence"][0]
content = [key for key in range(4, item.context_stop) if not start <= key < stop]
buckets = {"first4": list(range(4)), "content": content}
change = {name: dict.fromkeys(("raw", "corrected", "conditional"), 0.0) for name in buckets}
for index in range(trace.n_layers):
    before = clean.attention(index)
    shares = masked.attention_change(index, clean)[1].shares
    readings = {
        "raw": masked.attention(index) - before,
        "corrected": masked.corrected_attention(index) - before,
        "conditional": shares,
    }
    for bucket, keys in buckets.items():
        for reading, value in readings.items():
            change[bucket][reading] += value[:, -keep_rows:][..., keys].sum(-1).mean().item() / trace.n_layers
figure, ax = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
kp.plots.attention_change(ax, change)
plt.show()
display(pd.DataFrame(change).T.round(4))

# %% [markdown]
# Read raw, cutting the evidence seems to move attention towards both other places. With the inflation taken out the
# sign is the other one: in this item the heads turn away from the first positions and from the rest of the context
# (towards the question and the answer's own tokens). Both the size and the sign of the raw reading were arithmetic. How
# large the inflation is depends on how much mass was cut, so it is largest in the heads one is most interested in:

# %%
retained = masked.receipt.retained[:, :, -keep_rows:]
per_head = retained.mean(-1)
worst = torch.nonzero(per_head == per_head.min())[0].tolist()
print(
    f"head {worst[1]} of layer {worst[0]} kept {per_head.min():.3f} of its mass: survivors inflated "
    f"{1 / per_head.min():.1f} times"
)
print(f"half of all heads kept more than {per_head.median():.3f}")

# %% [markdown]
# The two parts of the conditional split, and their sum, agree with the measured change to rounding:

# %%
index = worst[0]
own, conditional = masked.attention_change(index, clean)
measured = masked.attention(index) - clean.attention(index)
print(f"own split:         {float((own.total - measured).abs().max()):.1e}")
print(f"conditional split: {float((conditional.total - measured).abs().max()):.1e}")
