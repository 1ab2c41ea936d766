"""Made-up results of an audit, every number of which is known."""

import itertools
from types import SimpleNamespace

import numpy as np
import pandas as pd

from kvprobe.plots import audits

ALPHAS = (0.0, 0.25, 0.5, 1.0)
VALUES = {"alpha": ALPHAS, "epsilon": (0.0, 1e-6, 1e-4, 1e-2), "norm": (1.0, 2.0)}


def audit(
    presets=("paper", "released"),
    bases=("snapkv", "adakv"),
    caches=(0.1, 0.2, 0.4),
    docs=5,
    layers=4,
    heads=3,
    *,
    valid=True,
    levels=("layer", "head"),
    low=0.2,
    kinds=("alpha", "epsilon", "norm"),
    scored=True,
    seed=0,
):
    """A made-up result with its summary; ``low`` is the smallest σ of any head."""
    rng, n = np.random.default_rng(seed), np.nan if docs == 1 else 1.0
    pairs = list(itertools.product(presets, bases))
    rows, by_layer, cells = [], [], []
    for preset, base in pairs:
        for cache, level in itertools.product(caches, levels):
            actual, up = rng.uniform(1, 9), rng.uniform(1.1, 3, 5).cumprod()
            row = {"preset": preset, "base": base, "cache": cache, "level": level, "actual": actual}
            row |= dict(zip(audits.ALL | audits.VALID, (actual, *actual * up), strict=True))
            row |= {name: row[name] if valid else np.nan for name in audits.VALID}
            row |= {"ratio": row["stage2_bound"] / row["previous_bound"], "n_docs": docs}
            for name, column in (("bound", "bound"), ("centred", "centred_bound")):
                over = row[column] / actual
                row |= {f"{name}_over_actual": over, f"{name}_over_actual_low": 0.9 * over * n}
                row |= {f"{name}_over_actual_high": 1.2 * over * n}
            for place, name in enumerate(("selected", "oracle")):
                share = 0.7 + 0.1 * place + 0.1 * cache
                row |= {f"share_{name}": share, f"share_{name}_low": n * (share - 0.05)}
                row |= {f"share_{name}_high": n * (share + 0.02)}
            rows.append(row)
        for cache, layer in itertools.product(caches, range(layers)):
            over = rng.uniform(1.5, 9)
            row = {"preset": preset, "base": base, "cache": cache, "layer": layer}
            for name, value in (("bound", over), ("centred", 0.5 + over / 2)):
                row |= {f"{name}_over_actual": value, f"{name}_over_actual_low": 0.8 * value * n}
                row |= {f"{name}_over_actual_high": 1.3 * value * n}
            by_layer.append(row)
        for cache, doc in itertools.product(caches, range(docs)):
            index = pd.MultiIndex.from_product([range(layers), range(heads)], names=["layer", "head"])
            each = pd.DataFrame(index=index).reset_index().assign(doc=str(doc), cache=cache)
            each = each.assign(preset=preset, base=base, sigma=rng.uniform(low, 1, len(index)))
            cells.append(each.assign(sigma_oracle=lambda t: (1 + t["sigma"]) / 2))
    summary = {"model": "tiny/model", "n_docs": docs, "docs": "given texts", "tokens": {"min": 90, "max": 120}}
    summary |= {"truncated": 2, "probe": "first_decoded", "norm": 1}
    summary["policies"] = [[{"name": base}, {"name": f"{base}+two_stage"}] for _, base in pairs]
    swept, scores = swept_tables(presets, bases[0], caches[:2], kinds, docs, rng)
    result = SimpleNamespace(
        rows=lambda: pd.DataFrame(rows),
        layer_rows=lambda: pd.DataFrame(by_layer),
        sigmas=lambda: pd.concat(cells),
        sweeps=swept if kinds else None,
        scores=scores if scored and kinds else None,
    )
    return result, summary


def swept_tables(presets, base, caches, kinds, docs, rng):
    swept, scores = [], []
    for kind, preset, cache in itertools.product(kinds, presets, caches):
        for value in (*VALUES[kind], np.nan):
            change, reduced, score = rng.normal(), rng.uniform(0.1, 0.9), rng.uniform(0.1, 0.9)
            about = {"sweep": kind, "preset": preset, "cache": cache, "value": value}
            width = 0.5 if docs > 1 else np.nan
            row = about | {"base": base, "change": change, "ci_low": change - width, "ci_high": change + 2 * width}
            row |= {"heads_reduced": reduced, "heads_low": reduced - width / 10, "heads_high": reduced + width / 5}
            row |= {"n_tokens": 100.0, "epsilon_n": 100 * (value if kind == "epsilon" else 1e-4), "n_docs": docs}
            if value == value:
                swept.append(row)
            ends = {"logprob_low": -2 * score, "logprob_high": 0.1, "ci_low": score - 0.1, "ci_high": score + 0.05}
            scores.append(about | {"task": "niah_single_1", "score": score, "delta_logprob": -score, "n": 8} | ends)
    return pd.DataFrame(swept), pd.DataFrame(scores)
