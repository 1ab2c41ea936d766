"""Score-against-budget runs small enough for loops: items of 24 to 26 tokens, and made-up tables of answers."""

from dataclasses import dataclass

import catalogue
import numpy as np
import pandas as pd

from kvprobe import Prompt, eviction
from kvprobe.curves import Settings
from kvprobe.tasks import Item

STOPS = (20, 18, 20)
LENGTHS = (26, 24, 26)
PADS = (0, 0, 3)
GOLD = ((41, 300, 7), (9, 120), (41, 300, 7))
REFERENCES = ("e", "t", "3")
SMALL = {"window": 4, "kernel": 3}
CACHES = ("0.5", "0.8", "1")


@dataclass(frozen=True)
class Small(Settings):
    """Three items of random tokens: a context, a question of six; the last one is padded on the left."""

    def item(self, model, index):
        ids, pad = catalogue.ids(self.seed * 10_000 + index, LENGTHS[index]), PADS[index]
        mask = [0] * pad + [1] * len(ids)
        prompt = Prompt.from_ids([0] * pad + ids, attention_mask=mask)
        return Item("small", index, 40, prompt, "", GOLD[index], REFERENCES, STOPS[index] + pad, {})


def policies(*, live=False):
    """Ragged and equal budgets, both selectors, with and without attention; ``live`` ones can be evicted twice."""
    named = ("snapkv", "snapkv+two_stage", "adakv", "adakv+two_stage")
    found = [eviction.policy(name, **SMALL) for name in named]
    found += [eviction.policy("streaming", sinks=2), eviction.policy("random", seed=3)]
    return tuple(found if live else [*found, eviction.policy("oracle")])


def settings(**more):
    given = {"policies": policies(), "caches": CACHES, "items": 3}
    return Small(**given | more)


def answers(scores, logprobs=None, notes=None, caches=("0.2", "0.4")):
    """A table of answers from ``{policy: [[score of each item] of each cache]}``; ``full`` has one list."""
    rows = []
    for policy, by_cache in scores.items():
        for place, values in enumerate(by_cache):
            for item, score in enumerate(values):
                cache = "1" if policy == "full" else caches[place]
                logprob = 0.0 if logprobs is None else logprobs[policy][place][item]
                facts = {} if notes is None else notes(policy, cache, item)
                rows.append(
                    {"item": item, "policy": policy, "cache": cache, "kept": 0.1 * (item + 1), "score": float(score)}
                    | {"logprob": logprob, "notes": facts}
                )
    shuffled = np.random.default_rng(0).permutation(len(rows))
    return pd.DataFrame([rows[k] for k in shuffled])


def curves(policies, caches, seed=0):
    """A made-up table of rows, as :meth:`kvprobe.curves.Result.rows` makes them."""
    rng, rows = np.random.default_rng(seed), []
    for place, policy in enumerate(policies):
        for cache in caches:
            score = float(np.clip(0.2 + cache - 0.04 * place + rng.normal(0, 0.1), 0, 1))
            ends = {"ci_low": max(0.0, score - 0.2), "ci_high": min(1.0, score + 0.2)}
            rows.append({"policy": policy, "cache": cache, "kept": cache, "score": score, "n": 10} | ends)
    return pd.DataFrame(rows)


def summary(table, **more):
    """What ``kvprobe evict`` would have printed for them."""
    about = {
        "model": "tiny/model",
        "task": "niah_single_1",
        "length": 1500,
        "n_items": 10,
        "seed": 7,
        "setting": "context",
        "semantics": "prefill-then-evict: question and answer tokens see what is left of the compressed part",
        "full": {"score": 0.9, "ci_low": 0.6, "ci_high": 0.99},
        "rows": table.to_dict("records"),
        "pairs": [],
        "timings_s": {"total_s": 1.0},
        "peak_rss_mib": 100.0,
    }
    return about | more
