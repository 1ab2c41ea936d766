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
# # Does this span matter, or would anything that large have done it?
#
# Cut the needle out of the cache and the answer is gone. But a model whose cache has lost *anything it was leaning on*
# answers worse. The control for an ablation is an ablation that is as strong a blow and cuts something else. This
# notebook builds that control on one model, and shows where there is none.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import display

import kvprobe as kp

model = kp.load("smollm2-135m")
settings = kp.placebo.Settings(
    "niah_multikey_1", length=700, items=3, seed=1, kappas=(0.25, 0.5), options={"needles": 9}
)
items = settings.make(model)
item = items[0]
(target,) = item.spans["evidence"]
print("target:", model.decode(item.prompt.ids[slice(*target)]))
print(
    "hard  :", model.decode(item.prompt.ids[slice(*item.spans["hard"][0])]), f"… and {len(item.spans['hard']) - 1} more"
)

# %% [markdown]
# ## Length matching is no control
#
# One clean run of the prompt with its answer, and the rows that a mask would touch: the question's and the answer's. θ
# (CriticalKV's Theorem 3.3) of *every* window of the target's length comes from that one run, summed over layers and
# heads and averaged over rows.

# %%
rows = list(range(item.context_stop, len(item.prompt) + len(item.answer_ids)))
trace = kp.observe(model, item.prompt.extended(item.answer_ids), rows)
windows = kp.placebo.window_strengths(trace, target[1] - target[0])
own = kp.placebo.set_strengths(trace, [target])

fig, ax = plt.subplots(figsize=(9, 3), layout="constrained")
stop = item.context_stop - windows.length
ax.semilogy(np.arange(4, stop), windows.bound[4:stop], color="#0072B2", linewidth=0.8)
for start, end in item.spans["hard"]:
    ax.axvspan(start, end, color="#E69F00", alpha=0.3, linewidth=0)
ax.axvspan(*target, color="#D55E00", alpha=0.5, linewidth=0)
ax.axhline(own["bound"][0], color="#D55E00", linestyle="--", linewidth=0.8)
ax.set(xlabel="first token of the window", ylabel="θ (L1 norm, summed over heads)")
ax.set_title("θ of every window of the target's length; target red, other needles amber")
plt.show()
share = own["bound"][0] / np.median(windows.bound[4:stop])
print(f"the target is {share:.0f} times as strong a blow as the median window of its length")

# %% [markdown]
# ## Equal θ is not an equal blow
#
# θ is a bound, and not equally loose for all spans. L, the exact change of the layers' attention output, is what the
# blow really is. For the target, for other needles and for windows of ordinary text:

# %%
ordinary = kp.placebo.length_only(
    trace.n,
    target,
    8,
    protect=[(0, item.prompt["context"][0])],
    hard=item.spans["hard"],
    seed=0,
    stop=item.context_stop,
)
sets = {"target": [(target,)], "other needles": [(span,) for span in item.spans["hard"]], "ordinary text": ordinary}
strengths = {name: kp.placebo.set_strengths(trace, chosen) for name, chosen in sets.items()}
table = pd.DataFrame(
    {
        "L": {name: frame["perturbation"].mean() for name, frame in strengths.items()},
        "θ / L": {name: (frame["bound"] / frame["perturbation"]).mean() for name, frame in strengths.items()},
        "θ_c / L": {name: (frame["centred"] / frame["perturbation"]).mean() for name, frame in strengths.items()},
    }
)
display(table.round(2))

# %% [markdown]
# So the target is matched twice, at equal θ and at equal L, and both are shown side by side. Candidates come from pools
# that are tried in order: windows of ordinary text, single other needles, unions of other needles, scattered tokens.

# %%
spans = {"hard": item.spans["hard"], "protect": [(0, item.prompt["context"][0])], "stop": item.context_stop}
for match_on in ("bound", "perturbation"):
    found = kp.placebo.match(trace, target, k=4, match_on=match_on, **spans)
    print(f"{match_on}: remedy {found.remedy}, strongest candidate over target:", end=" ")
    print({name: round(ratio, 2) for name, ratio in found.strongest.items()})
    display(found.strengths.round(0).assign(ln_ratio=[0.0, *found.ln_ratios]).round({"ln_ratio": 3}))

# %% [markdown]
# At equal θ the placebos' L is well below the target's: that contrast would compare a hard blow with a soft one.
#
# ## The experiment
#
# All arms of an item go through one batch over one shared context: clean, identity (a mask over nothing, which must
# equal clean bit for bit), the target, its placebos under both matchings, windows matched in length only, the gate
# (the target's values silenced, attention untouched), and doses. Only items that the model answers enter the contrast.

# %%
result = kp.placebo.run(model, items, settings=settings)
summary = {"model": model.name} | result.summary
print(f"{summary['n_answered']} of {summary['n_items']} answered; identity − clean: {summary['identity_max_abs']}")
display(result.items()[["item", "answered", "bound_remedy", "perturbation_remedy", "perturbation_max_abs_ln_ratio"]])
contrasts = result.contrasts()
columns = ["match_on", "mean", "ci_low", "ci_high", "p_permutation", "p_attainable", "tested", "p_permutation_all", "n"]
display(contrasts[contrasts["confirmatory"]][columns].round(4).reset_index(drop=True))

# %%
figures = kp.plots.placebo_figures(result.tables(), summary)
display(figures["effects"])

# %% [markdown]
# Unions of needles share needles, and what they do goes together: among them the target would look the odd one out. So
# the test permutes its label among placebos that share no token (`tested` of them an item); `p_permutation_all` is what
# a permutation among all would have said. With three or four items and one or two such placebos an item no test can
# reach a small p; the interval uses all placebos.
#
# ## Are they really alike?
#
# The balance of everything else: before matching (target against length-only windows) and after (target against its
# placebos). With so few items this is a description, not a test: perfectly balanced groups of eight pass |SMD| < 0.1
# in one case out of six. Length cannot be balanced here: unions of needles are longer than one needle.

# %%
display(figures["love"])

# %% [markdown]
# ## Dose and response
#
# A finite bias −β cuts a span partly. On clean logits a dose κ has exactly κ of the full perturbation, so the target's
# and the placebos' curves share one axis of strength.

# %%
display(figures["doses"])

# %% [markdown]
# ## Where there is no such control
#
# With a single needle nothing in the essay is as strong a blow. The honest output is `no_overlap`, and how far off the
# strongest candidates are; what can still be compared is the *direction* of the blow: the target's own change of the
# attention outputs, injected at every layer and row, against vectors of the same norm that point where an ordinary
# span's change points.

# %%
single = kp.placebo.Settings("niah_single_2", length=600, items=1, seed=0)
alone = kp.placebo.run(model, settings=single, arms=("length_only", "injected"))
found = alone.summary["contrasts"]["perturbation"]
print({name: found[name] for name in ("matched", "unmatched", "no_overlap_ratio", "strongest", "kind")})
arms = alone.arms()
shown = arms[arms["arm"].isin(["target", "injected_target", "injected", "length_only"])]
display(shown.groupby("arm", sort=False)[["perturbation", "delta_logprob", "kl"]].mean().round(2))

# %% [markdown]
# Two cautions. The clean run's changes, injected at every layer at once, add up to a harder blow than the mask, whose
# deeper layers answer a changed input. And this control does not pass calibration: an ordinary span's own Δo is milder
# than other vectors of its norm (`analyses/placebo_calibration.py`). It describes; the contrasts above test.
