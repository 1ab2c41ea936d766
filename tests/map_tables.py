"""Made-up tables of ``kvprobe map`` and what is read back from its figures."""

import math

import numpy as np
import pandas as pd
from matplotlib.collections import LineCollection

from kvprobe import plots

PRESETS = ("paper", "released")
CACHES = (0.025, 0.05, 0.1, 0.2, 0.4)


def make_heads(presets=PRESETS, layers=30, heads=9, docs=22, scale=0.4, shift=0.1, seed=0):
    """Rows in no order: L, its log ratio, its p."""
    rng, n = np.random.default_rng(seed), layers * heads
    parts = []
    for preset in presets:
        base, ratio = rng.lognormal(0, 2, n), rng.normal(shift, scale, n)
        p_bh = rng.choice([0.001, 0.05, 0.0500001, 0.7], n)
        table = pd.DataFrame({"layer": np.repeat(np.arange(layers), heads), "head": np.tile(np.arange(heads), layers)})
        table = table.assign(L_base=base, L_ours=base * 2**ratio, log2_ratio=ratio, p_bh=p_bh)
        table = table.assign(difference=table["L_ours"] - base, p_attainable=0.5 ** (docs - 1), n_docs=docs)
        parts.append(table.assign(reduced=table["difference"] < 0, preset=preset).sample(frac=1, random_state=seed))
    return pd.concat(parts, ignore_index=True)


def make_layers(presets=PRESETS, layers=30, docs=22, seed=1):
    """Layers over four orders of magnitude, reductions on both sides of zero."""
    rng, parts = np.random.default_rng(seed), []
    for preset in presets:
        base = np.geomspace(0.1, 1000, layers) * rng.lognormal(0, 0.3, layers)
        reduction = base * rng.normal(0, 0.1, layers)
        half = base * 0.05 if docs > 1 else np.full(layers, np.nan)
        table = pd.DataFrame({"layer": np.arange(layers), "base": base, "ours": base - reduction})
        table = table.assign(reduction=reduction, ci_low=reduction - half, ci_high=reduction + 1.5 * half, n_docs=docs)
        parts.append(table.assign(preset=preset).iloc[::-1])
    return pd.concat(parts, ignore_index=True)


def make_budgets(presets=PRESETS, caches=CACHES, docs=22, seed=2):
    table = make_layers(presets, len(caches), docs, seed).rename(columns={"layer": "cache"})
    table["cache"] = [caches[place] for place in table["cache"]]
    share = np.random.default_rng(seed).uniform(0.1, 0.9, len(table))
    half = 0.04 if docs > 1 else np.nan
    return table.assign(heads_reduced=share, heads_low=share - half, heads_high=share + 2 * half)


def make_summary(heads, **more):
    """What ``kvprobe map`` would have printed."""
    docs, presets = int(heads["n_docs"].max()), {}
    for preset, frame in heads.groupby("preset", sort=False):
        share = float((frame["difference"] < 0).mean())
        ends = (max(share - 0.04, 0), min(share + 0.06, 1)) if docs > 1 else (math.nan, math.nan)
        found = {"share": share, "ci_low": ends[0], "ci_high": ends[1], "method": "hull", "n_heads": len(frame)}
        presets[preset] = {"heads_reduced": found | {"n_docs": docs}}
    about = {
        "model": "tiny/model",
        "policy": "snapkv",
        "against": "snapkv+two_stage",
        "presets": presets,
        "n_docs": docs,
        "docs": "shipped essays",
        "tokens": {"min": 738, "max": 783},
        "truncated": 0,
        "probe": "first_decoded",
        "cache": 0.2,
        "caches_left_out": [],
        "measure": "attn_out",
        "norm": 1,
        "published": {"source": "a paper, Fig. 4", "share": {"Big-8B": 0.92}},
    }
    return about | more


def case_tables(name):
    heads, layers, budgets = make_heads(), make_layers(), make_budgets()
    if name == "one preset":
        return make_heads(PRESETS[:1]), make_layers(PRESETS[:1]), make_budgets(PRESETS[:1]), {}
    if name == "one layer":
        return make_heads(layers=1), make_layers(layers=1), make_budgets(caches=(0.2,)), {}
    if name == "one of each":
        one = ("as given",)
        return make_heads(one, 1, 1), make_layers(one, 1), make_budgets(one, (0.025,)), {}
    if name == "large":
        tenths = tuple(np.arange(1, 11) / 10)
        return make_heads(layers=100, heads=128), make_layers(layers=100), make_budgets(caches=tenths), {}
    if name == "one document":
        return make_heads(docs=1), make_layers(docs=1), make_budgets(docs=1), {}
    if name in ("all reduced", "none reduced"):
        sign = -1 if name == "all reduced" else 1
        heads = heads.assign(log2_ratio=sign * heads["log2_ratio"].abs(), difference=sign * heads["difference"].abs())
        return heads.assign(reduced=sign < 0), layers, budgets, {}
    if name == "equal":
        zero = {"reduction": 0.0, "ci_low": 0.0, "ci_high": 0.0}
        heads = heads.assign(log2_ratio=0.0, difference=0.0, reduced=False, p_bh=1.0)
        return heads, layers.assign(ours=layers["base"], **zero), budgets.assign(ours=budgets["base"], **zero), {}
    if name == "nothing evicted":
        zero = {"base": 0.0, "ours": 0.0, "reduction": 0.0, "ci_low": 0.0, "ci_high": 0.0}
        heads = heads.assign(log2_ratio=np.nan, difference=0.0, reduced=False, p_bh=1.0)
        return heads, layers.assign(**zero), budgets.assign(**zero), {}
    if name == "undefined":
        heads.loc[heads["layer"] == 2, "log2_ratio"] = np.nan
        heads.loc[heads["layer"] == 3, "log2_ratio"] = np.inf
        layers.loc[layers["layer"] == 0, ["base", "ours"]] = 0.0
        budgets.loc[0, ["heads_low", "heads_high", "ci_low", "ci_high"]] = np.nan
        return heads, layers, budgets, {}
    long = {"model": "a/" + "very-long-name-" * 12, "against": "expected_attention+layer_global+two_stage"}
    if name == "two presets":
        return heads, layers, budgets, {}
    return heads, layers, budgets, long | {"policy": "expected_attention+layer_global", "caches_left_out": [0.025]}


NAMES = ("one preset", "one layer", "one of each", "large", "one document", "all reduced", "none reduced", "equal")
NAMES = ("two presets", *NAMES, "nothing evicted", "undefined", "long names")


def make_case(name):
    heads, layers, budgets, more = case_tables(name)
    summary = make_summary(heads, **more)
    return heads, layers, budgets, summary, plots.map_figures(heads, layers, budgets, summary)


def grid_axes(figure, columns):
    """[rows, columns] of the panels; colour bars are left out."""
    axes = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    return np.array(axes, dtype=object).reshape(-1, columns)


def presets_of(table):
    return [(preset, table[table["preset"] == preset]) for preset in dict.fromkeys(table["preset"])]


def lines(ax):
    return {line.get_label(): line for line in ax.lines}


def drawn_bars(ax):
    """{x: (low, high)} of every bar."""
    parts = [part for each in ax.collections if isinstance(each, LineCollection) for part in each.get_segments()]
    return {round(part[0][0], 9): (part[0][1], part[1][1]) for part in parts if part[0][0] == part[1][0]}


def words(figure):
    return " ".join(" ".join(each.get_text() for each in figure.texts).replace("\N{NO-BREAK SPACE}", " ").split())
