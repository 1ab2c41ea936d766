"""What is drawn is what the tables say: arrays, coordinates and labels are read back from the axes."""

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.collections import EllipseCollection, LineCollection
from needle_tables import HEADS, LABELS, LAYERS, axes, make_arms, make_heads, make_spans, make_summary, points

from kvprobe import plots
from kvprobe.errors import StatisticsError, TheoryError


def one_map(**columns):
    frame = make_heads(contrasts=["vs_hard"])
    return frame[frame["where"] == "last"].assign(**columns)


def test_head_map_shows_the_table():
    frame, ax = one_map(), axes()
    shuffled = frame.sample(frac=1, random_state=0)
    image = plots.head_map(ax, shuffled, title="a title")
    expected = frame["auroc"].to_numpy().reshape(LAYERS, HEADS).T
    np.testing.assert_array_equal(image.get_array(), expected)
    assert image.norm(0.5) == 0.5 and (image.norm.vmin, image.norm.vmax) == (0, 1)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "head")
    dashes = next(part for part in ax.collections if isinstance(part, LineCollection))
    below = {(x.mean(), y[0]) for x, y in (segment.T for segment in dashes.get_segments())}
    assert below == {(layer, head) for head, layer in np.argwhere(expected < 0.5)}


def test_head_map_circles_significant_heads_of_kept_layers():
    frame = one_map(p_max_t=0.5, excluded=lambda table: table["layer"] == 0)
    frame.loc[frame["head"] == 1, "p_max_t"] = 0.01
    ax = axes()
    plots.head_map(ax, frame)
    circles = next(part for part in ax.collections if isinstance(part, EllipseCollection))
    assert circles.get_offsets().tolist() == [[1, 1], [2, 1], [3, 1]]
    assert ax.get_title("left") == "3 of 9 heads significant: p < 0.05"
    hatched = [patch for patch in ax.patches if patch.get_hatch()]
    assert [patch.get_x() for patch in hatched] == [-0.5]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"p_max_t": 0.4}, "none significant: with 2 items, smallest p = 0.400"),
        ({"p_max_t": 0.4, "items_at_1": 2}, "none significant: with 2 items, AUROC 1 has p = 0.400"),
        (
            {"p_max_t": 0.4, "p_attainable": 0.125, "n_items": 1},
            "no head could be significant: with 1 item, p is at least 0.125",
        ),
        ({"p_max_t": np.nan}, ""),
    ],
)
def test_head_map_says_why_no_head_is_significant(columns, line):
    ax = axes()
    plots.head_map(ax, one_map(**columns))
    assert ax.get_title("left") == line


def test_head_map_of_undefined_heads_and_of_many_heads():
    frame = one_map()
    frame.loc[frame["layer"] == 2, "auroc"] = np.nan
    image = plots.head_map(axes(), frame)
    assert np.argwhere(np.ma.getmaskarray(image.get_array()))[:, 1].tolist() == [2] * HEADS
    ax = axes()
    plots.head_map(ax, make_heads(contrasts=["vs_hard"], layers=128, heads=64).query("where == 'last'"))
    assert ax.images[0].get_array().shape == (64, 128)
    assert not any(isinstance(part, LineCollection) for part in ax.collections)  # dashes would be noise


def test_head_map_refuses_mixed_and_empty_tables():
    with pytest.raises(StatisticsError, match="24 rows hold 12 heads: choose one contrast, where and feature"):
        plots.head_map(axes(), make_heads(contrasts=["vs_hard"]))
    with pytest.raises(StatisticsError, match="0 rows hold 0 heads"):
        plots.head_map(axes(), make_heads().iloc[:0])


@pytest.mark.parametrize("where", ["last", "answer"])
def test_masses_are_means_over_layers_heads_and_answer_tokens(where):
    spans, ax = make_spans(), axes()
    plots.mass_against_value_mass(ax, spans, where)
    rows = spans[spans["where"].str.startswith(where)]
    for label, count in LABELS.items():
        of = rows[rows["label"] == label]
        expected = [[group["mass"].mean(), group["value_mass"].mean()] for _, group in of.groupby(["item", "start"])]
        drawn = points(ax, label)
        assert len(drawn) == 2 * count
        np.testing.assert_allclose(sorted(drawn.tolist()), sorted(expected), rtol=1e-12)
        np.testing.assert_allclose(points(ax, f"{label} median")[0], np.median(expected, axis=0), rtol=1e-12)


def test_masses_of_empty_classes_single_spans_and_spans_out_of_sight():
    spans = make_spans(items=1, labels={"evidence": 1, "decoy": 2})
    spans.loc[(spans["label"] == "decoy") & (spans["start"] == 10), ["mass", "value_mass"]] = 0.0
    ax = axes()
    plots.mass_against_value_mass(ax, spans, p=2)
    counts = {label: len(points(ax, label)) for label in LABELS}
    assert counts == {"evidence": 1, "hard": 0, "decoy": 1, "distractor": 0}
    assert not [line for line in ax.lines if line.get_label().endswith("median")]
    assert "not drawn: 1 span without attention" in [text.get_text() for text in ax.texts]
    assert r"\Vert_2" in ax.get_ylabel()
    plots.mass_against_value_mass(axes(), spans.assign(mass=0.0))  # nothing to draw is no error


def test_answer_by_arm_shows_every_arm_and_the_summary():
    arms, ax = make_arms(), axes()
    plots.answer_by_arm(ax, arms, make_summary()["ablation"])
    for label in LABELS:
        expected = arms.loc[arms["label"] == label, "delta_logprob"].tolist()
        assert points(ax, label)[:, 1].tolist() == expected
    ticks = [tick.get_text() for tick in ax.get_xticklabels()]
    assert ticks[0] == "asked needle (E)\nn = 2 items, 2 spans\nanswer right in 100%"
    assert ticks[1] == "other needle (H)\nn = 2 items, 6 spans\nanswer right in 67%"
    assert ax.texts[0].get_text() == "−17.5\n[−63.9, −11.1]"
    low, high = ax.get_ylim()
    assert low < -63.9 and high > arms["delta_logprob"].max()  # the interval is wider than the points


def test_answer_by_arm_joins_the_means_of_an_item():
    arms, ax = make_arms(items=3), axes()
    plots.answer_by_arm(ax, arms)
    lines = [line for line in ax.lines if len(line.get_xydata()) == 4 and line.get_label().startswith("_")]
    assert len(lines) == 3
    for item, line in enumerate(lines):
        means = arms[arms["item"] == item].groupby("label")["delta_logprob"].mean()
        np.testing.assert_allclose(line.get_ydata(), means[list(LABELS)], rtol=1e-12)
        np.testing.assert_allclose(line.get_xydata()[0], points(ax, "evidence")[item])  # the line starts at its star


@pytest.mark.parametrize("missing", [None, np.nan])
def test_answer_by_arm_of_one_item_has_no_interval(missing):
    arms, ax = make_arms(items=1, labels={"evidence": 4, "distractor": 5}, together=4), axes()
    effects = {"evidence": {"delta_logprob": -17.0, "ci_low": missing, "ci_high": missing}, "hard": None}
    plots.answer_by_arm(ax, arms, effects)
    mean = arms.loc[arms["label"] == "distractor", "delta_logprob"].mean()
    assert [text.get_text() for text in ax.texts] == ["−17.0", f"{mean:+.3f}".replace("-", "−")]
    ticks = [tick.get_text() for tick in ax.get_xticklabels()]
    assert len(ticks) == 2 and ticks[0].splitlines()[1] == "n = 1 item, 4 spans (an item's at once)"


def test_attention_change_shows_three_readings():
    change = {
        "first4": {"raw": 0.002, "corrected": -0.004, "conditional": -0.01},
        "content": {"raw": 0.007, "corrected": -0.002, "conditional": -0.0112},
    }
    ax = axes()
    plots.attention_change(ax, change)
    heights = [[bar.get_height() for bar in container] for container in ax.containers]
    np.testing.assert_allclose(heights, [[0.2, 0.7], [-0.4, -0.2], [-1.0, -1.12]], atol=1e-12)
    assert [text.get_text() for text in ax.texts][:2] == ["+0.20", "+0.70"]
    assert [tick.get_text().split("\n")[0] for tick in ax.get_xticklabels()] == [
        "first 4 positions",
        "rest of the context",
    ]
    assert "percentage points" in ax.get_ylabel()


@pytest.fixture
def trace():
    import torch

    from kvprobe.traces import LayerView

    logits = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 0, 31:] = -torch.inf
    view = LayerView(0, logits, torch.empty(0), torch.empty(0), None, torch.tensor([30, 39]))
    spans = {"context": (0, 30)}
    return SimpleNamespace(layer=lambda index: view, queries=[30, 39], spans=spans, meta={"model": "tiny"}, view=view)


def test_head_spans_draws_one_row_and_the_share_of_each_span(trace):
    row = trace.view.attention[1, 0].numpy()
    spans = {"evidence": [(3, 6), (9, 10)], "mine": (20, 25)}
    figure = plots.head_spans(trace, 0, 1, query=30, spans=spans, tokens=[f"$t{k}" for k in range(40)], top=4)
    left, right = figure.axes
    stems = next(part for part in left.collections if part.get_label() == "attention")
    np.testing.assert_allclose(
        [segment[1] for segment in stems.get_segments()], np.stack([np.arange(40), row], 1), atol=1e-7
    )
    shares = [text.get_text() for text in left.get_legend().get_texts()]
    assert shares == [f"asked needle (E): {row[[3, 4, 5, 9]].sum():.1%}", f"mine: {row[20:25].sum():.1%}", "the query"]
    best = np.argsort(-row)[:4]
    assert [tick.get_text() for tick in right.get_yticklabels()] == [f"'$t{key}'  {key}" for key in best]
    np.testing.assert_allclose([bar.get_width() for bar in right.patches], row[best])
    figure.draw_without_rendering()  # dollar signs of a token are not read as mathematics


def test_head_spans_on_given_axes_and_a_logarithmic_scale(trace):
    ax = axes()
    assert plots.head_spans(trace, 0, 2, log=True, ax=ax) is ax.figure
    row = trace.view.attention[2, 1].numpy()
    np.testing.assert_allclose(points(ax, "attention"), np.stack([np.arange(40), row], 1)[row >= 1e-6])
    assert ax.get_yscale() == "log" and ax.get_title("left") == "layer 0, head 2, query at 39"
    assert ax.get_legend().get_texts()[0].get_text() == f"context: {row[:30].sum():.1%}"


def test_head_spans_refuses_what_the_trace_does_not_have(trace):
    with pytest.raises(TheoryError, match="query 31 was not observed: the trace has 30, 39"):
        plots.head_spans(trace, 0, 0, query=31)
    with pytest.raises(TheoryError, match="head 3 does not exist: layer 0 has heads 0 … 2"):
        plots.head_spans(trace, 0, 3)
    with pytest.raises(TheoryError, match="2 tokens were given for a trace of 40 keys"):
        plots.head_spans(trace, 0, 0, tokens=["a", "b"])
