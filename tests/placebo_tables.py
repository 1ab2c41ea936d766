"""Made-up tables of a placebo run, and what is read back from its figures."""

import numpy as np
import pandas as pd

from kvprobe import plots

VARIABLES = ("bound", "perturbation", "centred", "value_mass", "mass", "length", "position")
STRENGTHS = VARIABLES[:5]
KAPPAS = (0.25, 0.5, 0.75)
MATCHINGS = ("bound", "perturbation")


def make_balance(matchings=MATCHINGS, n=12, seed=0):
    """Rows in no order: far apart before, near after, where matched on nearest."""
    rng, rows = np.random.default_rng(seed), []
    for match_on in matchings:
        for variable in VARIABLES:
            matched, before = variable == match_on, rng.normal(2.5 if variable in STRENGTHS else 0.2, 0.8)
            after = rng.normal(0, 0.03 if matched else 0.3)
            row = {"match_on": match_on, "variable": variable, "matched": matched, "n": n, "flagged": False}
            row |= {"max_abs_ln_ratio": abs(rng.normal(0.1, 0.05)) if matched else np.nan}
            row |= {"smd_before": before, "before_low": before - 0.8, "before_high": before + 1.0}
            rows.append(row | {"smd_after": after, "after_low": after - 0.2, "after_high": after + 0.25})
    return pd.DataFrame(rows).sample(frac=1, random_state=seed).sort_values("match_on", kind="stable")


def make_arms(items=12, placebos=4, matchings=MATCHINGS, doses=True, unmatched=(), injected=(), seed=1):
    """The target does −16 nats, equal blows do little; every third item is not answered; one of five is length-only."""
    rng, rows = np.random.default_rng(seed), []

    def add(item, arm, effect, strength, match_on="", number=0, kappa=np.nan, spans="", remedy=""):
        row = {"item": item, "arm": arm, "match_on": match_on, "remedy": remedy, "number": number, "spans": spans}
        row |= {"kappa": kappa, "delta_logprob": effect, "kl": abs(effect) / 2, "answered": item % 3 != 2}
        rows.append(row | {name: strength * (1 + 0.1 * place) for place, name in enumerate(reversed(STRENGTHS))})

    for item in range(items):
        blow, effect = float(np.exp(rng.normal(4, 0.3))), -16 + rng.normal(0, 3)
        add(item, "clean", 0.0, 0.0)
        add(item, "identity", 0.0, 0.0)
        add(item, "target", effect, blow, spans="100:120")
        add(item, "gate", 0.8 * effect, blow, spans="100:120")
        for number in range(placebos):
            spans = f"{300 + 40 * number}:{320 + 40 * number}"
            add(item, "length_only", rng.normal(0, 0.02), blow / 20, number=number, spans=spans)
        for kappa in KAPPAS if doses else ():
            add(item, "dose_target", effect * kappa**2, blow * kappa, number=0, kappa=kappa, spans="100:120")
        if item in injected:
            add(item, "injected_target", 0.9 * effect, blow, remedy="injected")
            for number in range(placebos):
                add(item, "injected", rng.normal(-0.5, 0.3), blow, number=number, remedy="injected")
        for match_on in matchings if item not in unmatched else ():
            for number in range(placebos):
                spans, near = f"{700 + 50 * number}:{740 + 50 * number}", blow * np.exp(rng.normal(0, 0.08))
                hurt, remedy = rng.normal(-0.4, 0.4), "hard_set" if item % 4 else "contiguous"
                add(item, "placebo", hurt, near, match_on, number, spans=spans, remedy=remedy)
                for kappa in KAPPAS if doses and number == 0 else ():
                    add(item, "dose_placebo", hurt * kappa, near * kappa, match_on, number, kappa, spans, remedy)
    return pd.DataFrame(rows).sample(frac=1, random_state=seed)


def make_contrasts(matchings=MATCHINGS):
    """One row an estimand and outcome."""
    rows = [
        {
            "match_on": name,
            "estimand": "content at equal blow",
            "mean": -15.7 - place,
            "ci_low": -17.5,
            "ci_high": -13.9,
        }
        for place, name in enumerate(matchings)
    ]
    rows += [row | {"outcome": "kl", "mean": 7.7} for row in rows]
    rows.append({"match_on": "", "estimand": "total", "mean": -16.1, "ci_low": np.nan, "ci_high": np.nan})
    frame = pd.DataFrame(rows).assign(p_permutation=0.0004, n=8)
    return frame.assign(outcome=frame["outcome"].fillna("logprob") if "outcome" in frame else "logprob")


def make_summary(items=12, **more):
    """What ``kvprobe placebo`` would have printed, as far as figures name it."""
    return {"model": "tiny/model", "task": "niah_multikey_1", "length": 1500, "n_items": items, "seed": 7} | more


def make_tables(name):
    """Tables of one named case."""
    tables = {"arms": make_arms(), "balance": make_balance(), "contrasts": make_contrasts()}
    if name == "all no_overlap":
        arms = make_arms(matchings=(), injected=range(12), doses=False)
        return {"arms": arms, "balance": make_balance()[:0], "contrasts": make_contrasts(())}
    if name == "one item":
        balance = make_balance(n=1).assign(smd_after=np.nan, smd_before=np.nan, after_low=np.nan, flagged=True)
        return {"arms": make_arms(1), "balance": balance, "contrasts": make_contrasts().assign(p_permutation=np.nan)}
    if name == "no doses":
        return tables | {"arms": make_arms(doses=False)}
    if name == "one matching":
        only = MATCHINGS[1:]
        return {"arms": make_arms(matchings=only), "balance": make_balance(only), "contrasts": make_contrasts(only)}
    if name == "some unmatched":
        return tables | {"arms": make_arms(unmatched=(1, 5, 6), injected=(1, 5, 6))}
    if name == "not answered":
        return tables | {"arms": make_arms().assign(answered=False)}
    if name == "undefined":
        arms, balance = tables["arms"].reset_index(drop=True), tables["balance"].reset_index(drop=True)
        arms.loc[arms.index % 7 == 0, ["delta_logprob", "kl"]] = np.nan
        arms.loc[arms.index % 11 == 0, "perturbation"] = np.nan
        arms.loc[arms.index % 13 == 0, "perturbation"] = 0.0
        balance.loc[balance["variable"] == "length", ["smd_before", "smd_after", "flagged"]] = [np.inf, 0.0, True]
        balance.loc[balance["variable"] == "length", ["before_low", "after_low"]] = np.nan
        balance.loc[balance["variable"] == "position", ["smd_after", "after_low", "after_high"]] = np.nan
        return {"arms": arms, "balance": balance, "contrasts": tables["contrasts"].assign(mean=np.nan, ci_low=np.nan)}
    if name == "many":
        return tables | {"arms": make_arms(40, 5), "balance": make_balance(n=40)}
    return tables


NAMES = ("usual", "all no_overlap", "one item", "no doses", "one matching", "some unmatched", "not answered")
NAMES = (*NAMES, "undefined", "many")


def make_case(name):
    """Tables and their figures."""
    tables = make_tables(name)
    summary = make_summary(tables["arms"]["item"].nunique())
    return tables, summary, plots.placebo_figures(tables, summary)
