"""Trace memory: rows, effects by k, selectivity and deep tokens, by loops over plain runs."""

import dataclasses
import math

import numpy as np
import pandas as pd
import placebo_items
import pytest

import kvprobe as kp
from kvprobe import placebo
from kvprobe.outcomes import settle
from kvprobe.placebo.memory import Rows, memory_summary, mention_frame, trace_design
from kvprobe.tasks import user


def plain(reader, item, *parts):
    """Logits at all rows and depth at all rows of one run by itself, [n, V] and [n]."""
    n = len(item.prompt)
    out = kp.intervene(reader, item.prompt, [parts], suffix=n, streams=n)[0]
    return out.logits.double().log_softmax(-1), settle(reader, out, None, 0.23, "first").depth


def test_rows_are_those_before_each_token_of_a_mention(own_traces):
    for item in own_traces:
        rows, ids = Rows.of(item), item.prompt.ids.tolist()
        wanted = [(m, at) for m, mention in enumerate(item.mentions) for at in range(mention.start, mention.stop)]
        assert rows.start == item.mentions[0].start - 1
        assert [rows.start + at for at in rows.at] == [at - 1 for _, at in wanted]
        assert rows.tokens == [ids[at] for _, at in wanted] and rows.mention == [m for m, _ in wanted]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_mentions_are_what_plain_runs_say(reader, own_traces, traced, index):
    item, ids = own_traces[index], own_traces[index].prompt.ids.tolist()
    clean, masked = plain(reader, item), plain(reader, item, kp.KVMask([*item.target], queries="after"))
    table = traced.mentions()
    table = table[table["item"] == index].reset_index(drop=True)
    assert len(table) == len(item.mentions) == 4
    for m, mention in enumerate(item.mentions):
        row, at = table.loc[m], range(mention.start, mention.stop)
        assert (row["k"], row["rederive"], row["start"]) == (mention.k, mention.rederive, mention.start)
        assert row["tokens"] == mention.stop - mention.start
        for name, (logprobs, depth) in (("clean", clean), ("masked", masked)):
            each = [float(depth[i - 1]) for i in at]
            assert row[f"depth_{name}"] == pytest.approx(sum(each) / len(each))
            assert row[f"logprob_{name}"] == pytest.approx(sum(float(logprobs[i - 1, ids[i]]) for i in at), abs=1e-3)
        assert row["deep_clean"] == np.mean([float(clean[1][i - 1]) >= 2 for i in at])
        assert row["effect"] == row["depth_masked"] - row["depth_clean"]
        assert row["delta_logprob"] == row["logprob_masked"] - row["logprob_clean"]
    first = table[table["k"] == 1].iloc[0]
    assert first["delta_logprob"] == pytest.approx(0, abs=1e-4) and first["effect"] == 0  # it stands in what is masked


def test_an_arms_outcome_is_over_later_mentions_that_are_not_worked_out_again(reader, own_traces, traced):
    item, ids = own_traces[1], own_traces[1].prompt.ids.tolist()
    table = traced.arms()
    table = table[table["item"] == 1]
    later = [at for m in item.mentions if m.k > 1 and not m.rederive for at in range(m.start, m.stop)]
    assert len(later) == 4 and sum(m.rederive for m in item.mentions) == 1
    base, _ = plain(reader, item)
    for _, row in table[~table["arm"].str.startswith("inject")].iterrows():
        keys = placebo_items.spans_of(row["spans"])
        beta = row["beta"] if math.isfinite(row["beta"]) else math.inf
        part = kp.ValueGate(keys, 0.0, queries="after") if row["arm"] == "gate" else None
        part = part or (kp.KVMask(keys, queries="after", beta=beta) if keys else None)
        logprobs, depth = plain(reader, item, *([part] if part else []))
        each = [float(logprobs[i - 1, ids[i]]) for i in later]
        assert row["logprob"] == pytest.approx(sum(each), abs=2e-3), row["arm"]
        assert row["logprob_per_token"] == pytest.approx(sum(each) / 4, abs=1e-3)
        assert row["settling_depth"] == pytest.approx(np.mean([float(depth[i - 1]) for i in later]))
        kl = sum(float((base[i - 1].exp() * (base[i - 1] - logprobs[i - 1])).sum()) for i in later)
        assert row["kl"] == pytest.approx(kl, abs=1e-3)
        assert row["flips"] == sum(int(base[i - 1].argmax() != logprobs[i - 1].argmax()) for i in later)
        assert row["match"] == all(int(logprobs[i - 1].argmax()) == ids[i] for i in later)
    assert table["delta_settling"].tolist() == (table["settling_depth"] - table["settling_depth"].iloc[0]).tolist()


def test_placebos_end_before_the_second_mention_and_keep_off_all_mentions(own_traces, traced):
    table = traced.arms()
    seen = set()
    for index, item in enumerate(own_traces):
        second = min(mention.start for mention in item.mentions if mention.k > 1)
        barred = {at for span in (*item.target, *item.protect) for at in range(*span)} | {0, 1, 2, 3}
        barred |= {at for mention in item.mentions for at in range(mention.start, mention.stop)}
        hard = {at for span in item.hard for at in range(*span)}
        for _, row in table[(table["item"] == index) & table["arm"].isin(["placebo", "length_only"])].iterrows():
            held = {at for start, stop in placebo_items.spans_of(row["spans"]) for at in range(start, stop)}
            assert max(held) < second and not held & barred
            assert not held & hard or row["remedy"] in ("hard", "hard_set")
            seen.add(row["arm"])
    assert seen == {"placebo", "length_only"}


def test_room_between_later_mentions_is_nobodys_placebo(reader, tmp_path):
    """A placebo there could not touch the second mention, as the target does."""
    row = placebo_items.trace_row(0)
    row["text"] += 3 * placebo_items.FILLER + "And so 54."
    row["mentions"].append([len(row["text"]) - 3, len(row["text"]) - 1, 5])
    (item,) = user.traces(placebo_items.written(tmp_path / "own.jsonl", row), reader)
    for seed in range(4):
        settings = placebo.Settings("trace_memory", placebos=3, rows=10, seed=seed, caliper=2.0)
        design = trace_design(reader, settings, item, 0)
        placebos = [keys for match in design.matches.values() for keys in match.placebos]
        assert len(placebos) == 6
        assert all(keys[-1][1] <= item.mentions[1].start for keys in (*design.windows, *placebos))


def test_a_first_mention_beside_the_target_is_protected(reader, tmp_path):
    row = placebo_items.trace_row(0)
    at = row["text"].index("fair")
    row["mentions"].insert(1, [at, at + 4, 1])
    (item,) = user.traces(placebo_items.written(tmp_path / "own.jsonl", row), reader)
    for seed in range(6):
        settings = placebo.Settings("trace_memory", placebos=3, rows=10, seed=seed)
        design = trace_design(reader, settings, item, 0)
        placebos = [keys for match in design.matches.values() for keys in match.placebos]
        for keys in (*design.windows, *placebos):
            assert all(stop <= at or start >= at + 4 for start, stop in keys)


def test_strengths_are_means_over_the_observed_rows_behind_each_set(reader, own_traces, traced):
    item, table = own_traces[0], traced.arms()
    n = len(item.prompt)
    rows = sorted({round(4 + i * (n - 5) / 39) for i in range(40)})
    trace = kp.observe(reader, item.prompt, rows)
    table = table[(table["item"] == 0) & table["arm"].isin(["target", "length_only", "placebo"])]
    for _, row in table.iterrows():
        keys = placebo_items.spans_of(row["spans"])
        behind = kp.observe(reader, item.prompt, [q for q in rows if q >= keys[-1][1]])
        wanted = placebo.set_strengths(behind, [keys]).iloc[0]
        for name in ("bound", "perturbation", "value_mass", "mass"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-4), name
    assert trace.n == n


def test_layers_are_weighed_in_traces_too(reader, own_traces):
    item = own_traces[0]
    design, weighed = (
        trace_design(reader, placebo.Settings("trace_memory", residual_norm=on, rows=9, placebos=2), item, 0)
        for on in (False, True)
    )
    rows, n = list(design.trace.queries), len(item.prompt)
    out = kp.intervene(reader, item.prompt, [()], suffix=n, streams=n)[0]
    norms = out.streams.resid_post.double()[:, rows].norm(dim=-1).mean(-1)
    wanted = sum(
        placebo.set_strengths(design.trace, [design.target], layers=layer, after=True)["perturbation"].iloc[0]
        / float(norms[layer])
        for layer in range(3)
    )
    assert weighed.table["perturbation"].iloc[0] == pytest.approx(wanted, rel=1e-4)
    assert design.table["perturbation"].iloc[0] != pytest.approx(wanted, rel=1e-2)


def table_of(rows):
    columns = ("item", "k", "rederive", "tokens", "depth_clean", "depth_masked", "deep_clean")
    frame = pd.DataFrame(rows, columns=columns)
    frame["effect"] = frame["depth_masked"] - frame["depth_clean"]
    return frame.assign(delta_logprob=-frame["effect"])


TABLE = [
    (0, 1, False, 2, 5.0, 5.0, 0.5),
    (0, 2, False, 2, 4.0, 7.0, 0.5),
    (0, 2, False, 4, 4.0, 5.0, 0.25),
    (0, 3, True, 2, 6.0, 6.5, 1.0),
    (1, 1, False, 6, 5.0, 5.0, 0.0),
    (1, 2, False, 2, 3.0, 4.0, 0.0),
    (1, 3, False, 2, 3.0, 9.0, 0.5),
    (2, 1, False, 2, 5.0, 5.0, 1.0),
    (2, 2, False, 1, 5.0, 4.0, 0.0),
    (2, 3, True, 2, 5.0, 8.0, 1.0),
]


def test_effects_by_k_are_means_over_items_of_means_over_mentions():
    found = memory_summary(table_of(TABLE), 0)
    two, three = found["by_k"]
    assert (two["k"], two["n"], three["k"], three["n"]) == (2, 3, 3, 1)
    assert two["effect"] == pytest.approx((2.0 + 1.0 - 1.0) / 3) and three["effect"] == pytest.approx(6.0)
    assert two["delta_logprob"] == pytest.approx(-(3 + 1 + 1 - 1) / 4)
    from scipy.stats import t

    half = t.ppf(0.975, 2) * np.std([2.0, 1.0, -1.0], ddof=1) / math.sqrt(3)
    assert (two["ci_low"], two["ci_high"]) == pytest.approx((2 / 3 - half, 2 / 3 + half))
    assert (three["ci_low"], three["ci_high"]) == (None, None)
    assert (found["rederived"]["effect"], found["rederived"]["n"]) == (pytest.approx(1.75), 2)


def test_selectivity_is_within_item():
    """Items 0 and 2 have a mention that is worked out again; item 1 has none and does not enter."""
    found = memory_summary(table_of(TABLE), 0)["selectivity"]
    assert (found["mean"], found["n"]) == (pytest.approx(np.mean([2.0 - 0.5, -1.0 - 3.0])), 2)
    without = memory_summary(table_of([row for row in TABLE if not row[2]]), 0)
    assert without["selectivity"] == {
        "mean": None,
        "ci_low": None,
        "ci_high": None,
        "n": 0,
        "why": "no item has a mention worked out again",
    }
    assert without["rederived"] is None


def test_the_deep_ratio_counts_tokens():
    found = memory_summary(table_of(TABLE), 0)["deep_ratio"]
    first, later = (2 * 0.5 + 2 * 1.0) / 10, (2 * 0.5 + 4 * 0.25 + 2 * 0.5) / 11
    assert (found["first"], found["later"]) == pytest.approx((first, later))
    assert found["ratio"] == pytest.approx(first / later)
    none = memory_summary(table_of([(*row[:6], 0.0) for row in TABLE]), 0)["deep_ratio"]
    assert none == {"first": 0.0, "later": 0.0, "ratio": None}
    late = memory_summary(table_of([(*row[:6], float(row[1] > 1)) for row in TABLE]), 0)["deep_ratio"]
    assert late == {"first": 0.0, "later": 1.0, "ratio": 0.0}


def test_of_a_run_the_summary_is_that_of_its_mentions(traced):
    found = memory_summary(mention_frame(traced.probes), 0)
    assert {name: traced.summary[name] for name in found} == found
    assert [row["k"] for row in found["by_k"]] == [2, 3, 4] and found["selectivity"]["n"] == 2
    assert [row["n"] for row in found["by_k"]] == [3, 3, 1]  # the fourth is worked out again in two of three
    assert traced.summary["outcome"] == "settling_depth" and traced.summary["accuracy"] is None
    assert traced.summary["semantics"].startswith("never existed")
    assert traced.arms()["answered"].all() and "mentions" in traced.tables()
    assert "mention_rows" not in traced.items()


def test_an_items_run_has_no_mentions(ran):
    assert ran.mentions() is None and "mentions" not in ran.tables() and "by_k" not in ran.summary


@pytest.mark.parametrize("direction", ["placebo", "random"])
def test_unmatched_traces_get_vectors(reader, own_traces, direction):
    settings = placebo.Settings("trace_memory", placebos=2, kappas=(), rows=20, caliper=1e-9, direction=direction)
    result = placebo.run(reader, own_traces[:1], settings=settings)
    found = result.summary["contrasts"]["perturbation"]
    assert (found["kind"], found["contrast"]["n"], found["remedy"]["injected"]) == ("injected", 1, 1)
    table = result.arms()
    assert (table["arm"] == "injected").sum() == 2 and result.summary["identity_max_abs"] == 0
    own = table[table["arm"] == "target"]["perturbation"].iloc[0]
    assert (table[table["remedy"] == "injected"]["perturbation"] == own).all()


def test_generated_traces_run(loaded):
    settings = placebo.Settings("trace_memory", length=None, items=1, placebos=2, kappas=(), rows=16)
    result = placebo.run(loaded(), settings=dataclasses.replace(settings, inject="never"))
    assert result.summary["task"] == "trace_memory" and result.summary["length"] is None
    found = result.summary["contrasts"]["perturbation"]
    assert found["matched"] + found["unmatched"] == 1
    assert len(result.mentions()) == 5
