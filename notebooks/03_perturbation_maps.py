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
# # Which heads does an eviction policy disturb?
#
# CriticalKV's second stage is meant to lower the *output perturbation* of evicting. Its Figure 4 reports that 92 % of
# Llama-3.1-8B's heads and 86 % of Mistral-7B's are disturbed less with it than without (MultiNews, 20 % of the cache,
# the first decoded token). Here the same protocol runs on a small model and short essays, and we look for the reason
# of what comes out.
#
# For one head and one query, evicting a set S changes the output by exactly L(S) = ‖(z′ − z) W_O‖₁ = a_S · ‖o′ −
# 𝒱̄_S‖: *the attention that is cut, times how far what was cut lies from what is left*. No run is needed to know it: L
# comes out of the whole cache's own attention, for every head and every kept set at once.

# %%
from dataclasses import dataclass, replace
from typing import ClassVar

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from IPython.display import display

import kvprobe as kp

model = kp.load("smollm2-135m")
docs = kp.tasks.documents(model, n=7)  # the shipped essays, each in LongBench's MultiNews template
first = docs[0]
print(f"{len(docs)} documents of {min(len(d.prompt) for d in docs)}-{max(len(d.prompt) for d in docs)} tokens")
print(model.decode(first.prompt.ids[:24]), "…", model.decode(first.prompt.ids[first.context_stop - 12 :]))

# %% [markdown]
# The part up to `context_stop` is compressed, the question is fed afterwards, and the probe is the query of the first
# token that the whole cache decodes.
#
# ## The map
#
# SnapKV against SnapKV with the second stage, under both poolings that are called SnapKV: `paper` (max, 7) and
# `released` (average, 5). `kvprobe map` is this on the command line.

# %%
pairs = kp.maps.pairs_of("snapkv", "snapkv+two_stage")
settings = kp.maps.Settings(pairs, cache="0.2", budgets=("0.1", "0.2", "0.4"), reading=kp.maps.Reading(docs))
result = kp.maps.run(model, settings)
heads, layers, budgets = result.head_rows(), result.layer_rows(), result.budget_rows()
figures = kp.plots.map_figures(heads, layers, budgets, {"model": model.name} | result.summary)
for name, block in result.summary["presets"].items():
    found = block["heads_reduced"]
    print(
        f"{name}: {found['share']:.0%} of {found['n_heads']} heads [{found['ci_low']:.0%}, {found['ci_high']:.0%}] "
        f"are lower with the second stage; significantly lower {found['significantly_lower']}, higher "
        f"{found['significantly_higher']} (Wilcoxon, BH)"
    )
published = result.summary["published"]
print("the paper, of other models and documents:", published["share"], published["source"])
display(figures["head_perturbation"])

# %% [markdown]
# Not 92 %: here the second stage disturbs *most* heads more than plain SnapKV does. Yet the mean over heads falls at
# 20 and 40 % of the cache (over all 22 essays its intervals lie beyond 0), and it is the late layers that gain:

# %%
display(budgets.round(2))
display(figures["budget_perturbation"])
display(figures["layer_perturbation"])

# %% [markdown]
# ## From a head to what it reads
#
# The head that gains most and the head that loses most, with what each policy keeps for it in one document.

# %%
paper = heads[heads["preset"] == "paper"].sort_values("difference")
for row in (paper.iloc[0], paper.iloc[-1]):
    layer, head = int(row["layer"]), int(row["head"])
    trace, spans = kp.maps.look(model, first, "snapkv", "snapkv+two_stage", layer, head)
    print(f"layer {layer}, head {head}: mean L {row['L_base']:.1f} -> {row['L_ours']:.1f}")
    tokens = kp.Prompt.from_ids(trace.ids).tokens(model)
    display(kp.plots.head_spans(trace, layer, head, spans=spans, tokens=tokens, log=True))

# %% [markdown]
# ## Why not 92 %?
#
# **Mass against distance (law 4).** ln of L's ratio is the sum of two logarithms: how much attention is cut, and how
# far it lies from what is left. A second stage ranks by attention *times* value norm, so it gives attention away to
# gain in norm. Whether that pays is decided head by head:

# %%
ratios = np.log(paper["mass_ours"] / paper["mass_base"]), np.log(paper["L_ours"] / paper["L_base"])
mass, distance = ratios[0], ratios[1] - ratios[0]
fig, axes = plt.subplots(1, 2, figsize=(9.4, 3.6), layout="constrained")
axes[0].plot(mass, distance, "o", markersize=3, alpha=0.6, color="#0072B2")
edge = np.array([-0.6, 0.6])
axes[0].plot(edge, -edge, color="black", linewidth=0.8)
axes[0].axhline(0, color="grey", linewidth=0.5)
axes[0].axvline(0, color="grey", linewidth=0.5)
axes[0].set(xlabel="ln ratio of the evicted mass a_S", ylabel="ln ratio of the distance")
axes[0].set(xlim=(-0.6, 1.2), ylim=(-1.0, 0.6), title="each head; below the line L falls")
groups = pd.qcut(paper["mass_base"], 5, labels=False)
share = paper.groupby(groups)["reduced"].mean()
sums = paper.groupby(groups)[["L_ours", "L_base"]].sum()
labels = [f"{value:.2f}" for value in paper.groupby(groups)["mass_base"].mean()]
axes[1].bar(labels, share, color="#0072B2", label="share of heads reduced")
axes[1].plot(labels, sums["L_ours"] / sums["L_base"], "ko--", label="sum of L, second stage / SnapKV")
axes[1].axhline(1, color="grey", linewidth=0.5)
axes[1].set(xlabel="evicted mass under SnapKV (mean of each fifth of the heads)", ylim=(0, 1.35))
axes[1].legend(fontsize=7, loc="upper left")
plt.show()
display(pd.Series(result.summary["why"]).round(3).to_frame("median head").T)

# %% [markdown]
# Most heads evict little attention to begin with; there the second stage evicts more of it and L rises. It pays in the
# heads whose window predicts the question badly, which lose much attention anyway. Those are the heads with a large L:
# the sum over heads falls although most heads rise. A count of heads and a sum over heads are two findings.
#
# **Where the promise holds.** Theorem 3.5 speaks of one attention row, of a set for each query head, and of ranking by
# A·m itself. The published policy pools the scores, shares a set among the query heads of a kv head, adds ε = 1e-4,
# and is judged at another row. Each step can be taken back. As a control, the value norms are shuffled over positions:
# a second stage that knows nothing.

# %%
@dataclass(frozen=True)
class Shuffled(kp.eviction.TwoStage):
    """A second stage with every head's value norms shuffled over positions."""

    name: ClassVar[str] = "shuffled"

    def select(self, scored, budgets, protected, at_least):
        order = torch.randperm(scored.layer.n, generator=torch.Generator().manual_seed(scored.layer.index))
        group = "mean" if scored.layer.granularity == "kv_head" else "none"
        norms = {(self.p, group): scored.norms(self.p)[:, order]}
        return super().select(replace(scored, _norms=norms), budgets, protected, at_least)


policy = kp.eviction.policy
variants = {
    "published (max-pool 7)": {"preset": "paper"},
    "published (average-pool 5)": {"preset": "released"},
    "no pooling, a set a query head": {"pool": "none", "granularity": "query_head"},
}
policies = {}
for name, setting in variants.items():
    policies[name, "top-k"] = policy("snapkv", label=f"{name} top-k", **setting)
    for epsilon in (1e-4, 0.0):
        label = f"{name} {epsilon:g}"
        policies[name, f"ε = {epsilon:g}"] = policy("snapkv+two_stage", epsilon=epsilon, label=label, **setting)
    policies[name, "shuffled norms"] = policy("snapkv", selector=Shuffled(), label=f"{name} shuffled", **setting)


def rows_of(probed, view, scored):
    """Attention rows [H, n] at which a kept set can be judged: the window's own mean row, and the probe."""
    own = scored.layer.mean_attention(32)
    return {"window's mean row": own, "probe": view.attention[:, -1]}


found = []
for document in docs[:3]:
    probed = kp.cells.probe(model, document, list(policies.values()))
    choices = {key: each.choose(probed.measured.scored(each), 0.2) for key, each in policies.items()}
    seen = probed.measured.scored(policies["published (max-pool 7)", "top-k"])
    for view in probed.trace.layers():
        for where, row in rows_of(probed, view, seen[view.index]).items():
            n, n_heads = row.shape[-1], row.shape[0]
            keep = torch.ones(len(choices), n_heads, n, dtype=torch.bool)
            for place, choice in enumerate(choices.values()):
                mine = choice.keep[view.index]
                keep[place, :, : probed.context_stop] = mine.repeat_interleave(n_heads // mine.shape[0], 0)
            what = kp.theory.consequences(row, view.values[:, :n], view.w_o, keep)
            for place, (name, second) in enumerate(choices):
                at = {"doc": document.name, "layer": view.index, "head": range(n_heads), "sets": name, "second": second}
                values = {"L": what.perturbation[place], "θ_c": what.centred_bound[place], "θ": what.bound[place]}
                found.append(pd.DataFrame(at | {"row": where} | values))
means = pd.concat(found).groupby(["row", "sets", "second", "layer", "head"], sort=False)[["L", "θ_c", "θ"]].mean()


def compared(where, name, second):
    """Share of heads lower than top-k, and the ratio of the sums of L."""
    ours, base = means.loc[where, name, second], means.loc[where, name, "top-k"]
    return [*(ours < base).mean(), ours["L"].sum() / base["L"].sum()]


table = pd.DataFrame(
    {
        (where, name, second): compared(where, name, second)
        for where in ("window's mean row", "probe")
        for name in variants
        for second in ("ε = 0", "ε = 0.0001", "shuffled norms")
    },
    index=["L lower", "θ_c lower", "θ lower", "sum of L, ratio"],
).T
display(table.round(2))

# %% [markdown]
# On the policy's own row, as derived (no pooling, a set for each query head, ε = 0), the second stage does what it is
# meant to: it lowers θ_c in nearly every head, and one with shuffled norms in none. ε = 1e-4 (beside a mean weight of
# 1/722), pooling and shared sets each take a part of that away, and so does the step to another row: at the probe, a
# second stage with shuffled norms lowers L in no fewer heads than the published ones do. What the real norms buy there
# is the last column, the sum. (Three documents: the shares are good to some 5 points.)
#
# **Which heads.** Over heads, the change of L goes with the rank correlation between attention and value norm. Where a
# head attends to tokens of *small* value norm, multiplying by the norm moves its budget away from what it attends to.

# %%
correlations = []
for document in docs[:2]:
    probed = kp.cells.probe(model, document, [policies["published (max-pool 7)", "top-k"]])
    for view in probed.trace.layers():
        stop, group = probed.context_stop, view.w_o.shape[0] // view.values.shape[0]
        for head, attention in enumerate(view.attention[:, -1, :stop]):
            norms = kp.theory.value_norms(view.values[head // group, :stop], view.w_o[head])
            ranks = pd.DataFrame({"a": attention, "m": norms}).corr("spearman").iloc[0, 1]
            numbers = {"rank correlation": ranks, "spread of norms": float(norms.std() / norms.mean())}
            correlations.append({"layer": view.index, "head": head} | numbers)
by_head = pd.DataFrame(correlations).groupby(["layer", "head"]).mean()
change = np.log(paper.set_index(["layer", "head"])["L_ours"] / paper.set_index(["layer", "head"])["L_base"])
fig, axes = plt.subplots(1, 2, figsize=(9.4, 3.4), sharey=True, layout="constrained")
for ax, name in zip(axes, by_head, strict=True):
    ax.plot(by_head[name], change.reindex(by_head.index), "o", markersize=3, alpha=0.6, color="#0072B2")
    ax.axhline(0, color="black", linewidth=0.8)
    rho = pd.concat([by_head[name], change], axis=1).corr("spearman").iloc[0, 1]
    ax.set(title=f"Spearman {rho:.2f}")
axes[0].set(ylabel="ln L, second stage / SnapKV", xlabel="rank correlation of attention and value norm")
axes[1].set(xlabel="std / mean of the value norms in a head")
plt.show()
print(by_head.describe().loc[["mean", "25%", "50%", "75%"]].round(2))

# %% [markdown]
# **The protocol.** The last token of the question, and a bare text's next token without any question (a different
# experiment):

# %%
protocols = {}
for probe, template in (("first_decoded", "multi_news"), ("last_prompt", "multi_news"), ("next_token", "none")):
    few = kp.tasks.documents(model, n=3, template=template)
    each = kp.maps.per_head(model, few, "snapkv", "snapkv+two_stage", cache=0.2, probe=probe)
    shares = {name: kp.maps.share_reduced(each, name)["share"] for name in ("L", "centred", "bound", "mass")}
    protocols[probe] = shares | {"sum of L, ratio": each["L_ours"].sum() / each["L_base"].sum()}
display(pd.DataFrame(protocols).T.round(2))

# %% [markdown]
# ## What is found
#
# On this model and these texts (contexts of some 740 tokens) Figure 4 is not replicated: about a third of the heads
# are disturbed less by the second stage, not nine tenths. It does lower the *sum* of L over heads at 20 % and 40 % of
# the cache when a question follows, by 5 to 14 % (22 documents), and not at 10 %, nor for a bare text's next token.
# The reasons:
#
# * the row: the window's attention is not the question's, and what is optimised on one row is worth less on the other;
# * law 4: top-k minimises the evicted mass outright. Value norms within a head vary by a quarter of their mean,
#   attention by factors of e² and more, and where the two run against each other the second stage cuts more attention;
# * pooling, shared sets and ε, each a step away from what Theorem 3.5 speaks of;
# * at 10 % of 722 entries the window (32) alone fills the first stage up to α = 0.4. A larger one (0.8, 0.9) takes
#   back most of what the second stage adds to L there, and leaves the shares of heads about where they are.
#
# A model of 7B parameters with other value norms, at lengths where the window is small, may well differ. `python
# analyses/fig4_head_perturbation.py --model … --docs multi_news` is the same measurement there.
