"""From inputs to a summary, on inputs made by hand: what an input lacks, what no row sees, ranges of intervals."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from kvprobe.sinks import averages, summary, sweeping, timelines

NAN = float("nan")
PER_TOKEN = ("mass_per_token", "value_mass_per_token", "ratio", "relative_ratio")
SETTINGS = SimpleNamespace(exclude_layers=(), seed=0)


def bucket(share, value=1.0, n_tokens=4, hidden=False):
    measured = dict.fromkeys(("mass", "value_mass"), 0.0 if hidden else value)
    measured |= dict.fromkeys(PER_TOKEN, NAN if hidden else value)
    return measured | {
        "mass_per_token": NAN if hidden else share,
        "share": share,
        "output": share,
        "n_tokens": n_tokens,
    }


def epsilon(**buckets):
    """Of each bucket: value mass per token; None: no row sees it."""
    return {
        "epsilon": 0.0,
        "value_mass": {name: 0.0 if value is None else 2 * value for name, value in buckets.items()},
        "value_mass_per_token": buckets,
        "auroc": None,
        **dict.fromkeys(sweeping.SPEARMAN),
    }


def test_shares_add_up_to_one_though_an_input_lacks_a_bucket():
    with_sink = {"first4": bucket(0.5), "secondary_sink": bucket(0.2, 7.0), "other": bucket(0.3)}
    without = {"first4": bucket(0.4), "other": bucket(0.6)}
    found = summary.buckets([SimpleNamespace(pooled=with_sink), SimpleNamespace(pooled=without)], seed=0)
    assert {name: row["share"] for name, row in found.items() if row} == pytest.approx(
        {"first4": 0.45, "secondary_sink": 0.1, "other": 0.45}
    )
    row = found["secondary_sink"]
    assert (row["n"], row["output"], row["ratio"], row["n_tokens"]) == (1, 0.1, 7.0, 4)
    assert row["ci"]["share"] == [0, 1] and row["ci"]["ratio"] == [None, None] and found["evidence"] is None


def test_a_bucket_that_no_row_sees_has_no_value_and_a_share_of_nothing():
    found = summary.buckets([SimpleNamespace(pooled={"first4": bucket(0.0, hidden=True), "other": bucket(1.0)})], 0)
    assert (found["first4"]["share"], found["first4"]["mass"], found["first4"]["n"]) == (0, 0, 1)
    assert [found["first4"][name] for name in PER_TOKEN] == [None] * 4


def test_epsilon_rows_leave_out_the_inputs_that_see_nothing_of_a_bucket():
    def probes(*pairs):
        return [
            SimpleNamespace(
                epsilon=[epsilon(first4=first, evidence=evidence)],
                pooled={"first4": {"mass": 0.0 if first is None else 0.5}, "evidence": {"mass": 0.5}},
            )
            for first, evidence in pairs
        ]

    (row,) = sweeping.epsilon_rows(probes((None, 3.0), (1.0, 5.0)), 0)
    assert row["value_mass_per_token"] == {"first4": 1.0, "evidence": 4.0}
    difference = row["difference"]["value_mass_per_token"]
    assert (difference["mean"], difference["n"], difference["excluded"]) == (4.0, 1, 1)
    (row,) = sweeping.epsilon_rows(probes((None, 3.0)), 0)
    assert row["value_mass_per_token"] == {"first4": None, "evidence": 3.0}
    assert row["verdict"]["value_mass_per_token"] is None and row["difference"]["value_per_mass"]["mean"] is None


def test_as_many_first_positions_as_the_longest_input_has():
    place = dict.fromkeys(summary.POSITION_MEASURES, 0.5)
    probes = [SimpleNamespace(positions=[place] * n) for n in (2, 4, 3)]
    found = summary.positions(probes, 0)
    assert [(row["place"], row["n"]) for row in found] == [(0, 3), (1, 3), (2, 2), (3, 1)]


def test_intervals_stay_in_the_range_of_what_they_are_about():
    share, mass = [0.1, 0.9], [0.001, 0.9]
    found = averages.mean_of(share, 0, bounds=averages.BOUNDS["share"])
    assert (found["mean"], found["ci_low"], found["ci_high"], found["n"]) == (0.5, 0, 1, 2)
    wide = averages.mean_of(share, 0)
    assert wide["ci_low"] == pytest.approx(0.5 - 12.7062047 * 0.4) and wide["ci_high"] > 5  # t, 1 degree of freedom
    free = averages.mean_of(mass, 0, bounds=averages.POSITIVE)
    assert free["ci_low"] == 0 and free["ci_high"] > 1
    rounded = averages.mean_of([1.0000001, 0.9], 0, bounds=averages.BOUNDS["share"])
    assert rounded["n"] == 2 and rounded["ci_high"] == 1


def test_every_interval_of_a_summary_has_its_range():
    measured = dict.fromkeys(summary.BUCKET_MEASURES)
    pair = [{"first4": measured | {name: value for name in measured}} for value in (0.02, 0.98)]
    row = summary.buckets([SimpleNamespace(pooled=each) for each in pair], 0)["first4"]
    for name, (low, high) in row["ci"].items():
        assert low == 0 and (high == 1) == (name in ("share", "mass_per_token")), name
    place = [[dict.fromkeys(summary.POSITION_MEASURES, value)] for value in (0.02, 0.98)]
    (row,) = summary.positions([SimpleNamespace(positions=each) for each in place], 0)
    assert all(low == 0 and (high == 1) == (name == "mass") for name, (low, high) in row["ci"].items())


def course(item_buckets, tokens):
    """Two heads; the mass of each is the given one, its value twice that."""
    rows = [
        {"token": token, "layer": 0, "head": head, "bucket": name, "mass": mass, "value": 2 * mass}
        for token in range(tokens)
        for head in range(2)
        for name, mass in item_buckets.items()
    ]
    return SimpleNamespace(courses=pd.DataFrame(rows))


def test_courses_add_up_to_one_at_every_token_that_some_item_has():
    """The item with the secondary sink generates fewer tokens than the other."""
    probes = [course({"first4": 0.3, "secondary_sink": 0.5, "other": 0.2}, 2), course({"first4": 0.4, "other": 0.6}, 4)]
    found = timelines.time_courses(probes, SETTINGS)
    assert found["n"] == [2, 2, 1, 1] and found["n_items"] == 2
    sums = np.sum([row["mass"] for row in found["buckets"].values()], axis=0)
    assert sums == pytest.approx([1] * 4)
    sink = found["buckets"]["secondary_sink"]
    assert sink["mass"] == pytest.approx([0.25, 0.25, 0, 0]) and sink["value"] == pytest.approx([0.5, 0.5, 0, 0])
    assert sink["ratio"] == [2, 2, None, None] and sink["n"] == [1, 1, 0, 0]
    assert found["buckets"]["first4"]["n"] == [2, 2, 1, 1]


def test_course_means_are_ratios_of_means_and_count_layers_without_the_bucket():
    table = pd.DataFrame(
        {
            "bucket": ["a", "a", "a", "a", "b"],
            "layer": [0, 1, 0, 1, 0],
            "head": 0,
            "token": [0, 0, 1, 1, 0],
            "mass": [0.1, 0.3, 0.0, 0.0, 0.4],
            "value": [1.0, 5.0, 0.0, 0.0, 0.0],
        }
    )
    found = timelines.course_means(table).set_index(["bucket", "token"])
    assert found.loc[("a", 0), "ratio"] == pytest.approx(15) and np.isnan(found.loc[("a", 1), "ratio"])
    assert found.loc[("b", 0), "mass"] == pytest.approx(0.2)


def test_changes_of_all_buckets_add_up_to_nothing_though_an_item_lacks_one():
    def after(**changes):
        rows = [
            {"reading": "conditional", "layer": 0, "bucket": name, "share_before": 0.25, "share_after": 0.25 + change}
            for name, change in changes.items()
        ]
        table = pd.DataFrame(rows)
        table["output_before"], table["output_after"] = table["share_before"], 2 * table["share_after"]
        return SimpleNamespace(after=table)

    probes = [after(first4=0.1, secondary_sink=-0.2, other=0.1), after(first4=0.1, other=-0.1)]
    rows = summary.changes(probes, SETTINGS)["readings"]["conditional"]
    assert sum(row["share_change"]["mean"] for row in rows.values()) == pytest.approx(0)
    sink = rows["secondary_sink"]
    assert sink["share_change"]["mean"] == pytest.approx(-0.1) and sink["n_with"] == 1
    assert sink["share_change"]["ci_low"] == -1 and sink["share_before"] == pytest.approx(0.125)
    assert (sink["ratio_before"], sink["ratio_after"]) == (1, 2)


def test_labelled_tokens_in_other_buckets_are_counted():
    def probe(labelled, placed):
        none = {"auroc": {"ratio": None}, "n_positive": 0, "n_negative": 0}
        about = {"texts": [], "counts": {"tokens": labelled, "by_layer": {"label": [labelled]}}, "options": {}}
        pooled = {"secondary_sink": {"n_tokens": placed}} if placed else {}
        return SimpleNamespace(secondary=about | {"recovery": dict.fromkeys(sweeping.LABELS, none)}, pooled=pooled)

    found = sweeping.secondary([probe(11, 8), probe(8, 8), probe(2, 0)], 0)
    assert found["n_tokens"]["mean"] == 7 and found["n_tokens_in_other_buckets"] == pytest.approx(5 / 3)
    assert sweeping.secondary([probe(8, 8), probe(0, 0)], 0)["n_tokens_in_other_buckets"] == 0
