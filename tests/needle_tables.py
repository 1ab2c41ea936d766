"""Small made-up tables of a needle run, and the way back from a drawing to its coordinates."""

import numpy as np
import pandas as pd

from kvprobe import plots

LABELS = {"evidence": 1, "hard": 3, "decoy": 2, "distractor": 5}
LAYERS, HEADS = 4, 3


def make_spans(items=2, labels=LABELS, seed=0):
    rng = np.random.default_rng(seed)
    kinds = [label for label, count in labels.items() for _ in range(count)]
    shape = (items, LAYERS, HEADS, 4, len(kinds))
    item, layer, head, at, span = (grid.ravel() for grid in np.indices(shape))
    mass = 10 ** rng.normal(-3, 0.5, item.size)
    return pd.DataFrame(
        {
            "item": item,
            "layer": layer,
            "head": head,
            "where": np.array(["context_end", "last", "answer_0", "answer_1"])[at],
            "label": np.array(kinds)[span],
            "start": 10 * span,
            "stop": 10 * span + 8,
            "mass": mass,
            "value_mass": mass * 10 ** rng.normal(2, 0.3, item.size),
        }
    )


def make_heads(items=2, contrasts=("vs_hard", "vs_distractor"), layers=LAYERS, heads=HEADS):
    rng = np.random.default_rng(1)
    frames = []
    for contrast in contrasts:
        for where in ("last", "answer"):
            layer, head = (grid.ravel() for grid in np.indices((layers, heads)))
            about = {"contrast": contrast, "where": where, "feature": "mass", "n_items": items, "items_at_1": 0}
            columns = {"layer": layer, "head": head, "auroc": rng.random(layer.size), "excluded": False, "p_max_t": 1.0}
            frames.append(pd.DataFrame(about | columns))
    return pd.concat(frames, ignore_index=True)


def make_arms(items=2, labels=LABELS, together=1, seed=2):
    rng, rows = np.random.default_rng(seed), []
    for item in range(items):
        rows.append({"item": item, "label": "clean", "spans": "", "delta_logprob": 0.0, "score": 1.0})
        for label, count in labels.items():
            joint = label == "evidence"
            for k in range(1 if joint else count):
                spans = " ".join(f"{j}:{j + 1}" for j in range(together if joint else 1))
                value = -17.0 - item if joint else rng.normal(0, 0.05)
                rows.append(
                    {"item": item, "label": label, "spans": spans, "delta_logprob": value, "score": float(k != 1)}
                )
    return pd.DataFrame(rows)


def make_tables(items=2, labels=LABELS, together=1):
    table = pd.DataFrame({"item": range(items)} | {label: labels.get(label, 0) for label in LABELS})
    contrasts = [
        name
        for name, of in (("vs_hard", "hard decoy"), ("vs_distractor", "distractor"))
        if any(labels.get(label) for label in of.split())
    ]
    heads = make_heads(items, contrasts) if contrasts else pd.DataFrame()
    return {
        "items": table,
        "spans": make_spans(items, labels),
        "heads": heads,
        "arms": make_arms(items, labels, together),
    }


def make_summary(items=2, **more):
    effect = {"delta_logprob": -17.5, "ci_low": -63.9, "ci_high": -11.1}
    settings = {"p": 1, "exclude_layers": [], "options": {"template": "ruler"}}
    about = {"model": "tiny/model", "task": "niah_multikey_1", "length": 1500, "n_items": items, "seed": 7}
    return about | {"settings": settings, "ablation": {"evidence": effect}, "auroc": {}, "auroc_answer": {}} | more


def axes():
    return plots.sheet(6, 4).subplots()


def points(ax, label):
    return next(line.get_xydata() for line in ax.lines if line.get_label() == label)
