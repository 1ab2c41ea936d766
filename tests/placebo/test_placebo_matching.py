"""Matching: nearest within the caliper, remedy by remedy; what it must not depend on; what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_trace import FakeTrace, fake_trace

from kvprobe.errors import InterventionError, PromptError, TheoryError
from kvprobe.placebo import MEASURES, REMEDIES, match, set_strengths
from kvprobe.placebo.keysets import jaccard, overlap, size
from kvprobe.spans import span_stats

N, STOP = 150, 140
ROWS = (140, 144, 149)
TARGET = (60, 66)
HARD = [(10, 15), (30, 36), (80, 86), (100, 104), (120, 126)]


def trace_of(lifts=(), seed=0, n=N, **kind):
    """Random rows; the logits of some spans are lifted, which makes those spans stronger."""
    trace = fake_trace(n, queries=ROWS, seed=seed, **kind)

    def lift(logits):
        logits = logits / 3
        for (start, stop), by in lifts:
            logits[..., start:stop] += by
        return logits

    return trace.map(logits=lift)


def check(found, trace, **how):
    """Ratios and strengths are those of the sets, within the caliper, ordered; sets are disjoint from the target."""
    table = set_strengths(trace, [found.target, *found.placebos], **how)
    np.testing.assert_allclose(found.strengths[list(MEASURES)], table[list(MEASURES)], rtol=1e-9)
    ratios = np.log(table[found.match_on] / table[found.match_on][0]).to_numpy()[1:]
    np.testing.assert_allclose(found.ln_ratios, ratios, atol=1e-9)
    assert found.matched and len(found.placebos) == found.k and (np.abs(ratios) <= found.caliper).all()
    assert not any(overlap(keys, found.target) for keys in found.placebos)
    assert len(set(found.placebos)) == found.k


def test_nothing_but_a_trace_and_a_target():
    found = match(trace_of(), TARGET)
    assert (found.k, found.match_on, found.remedy, found.target) == (4, "bound", "contiguous", (TARGET,))
    check(found, trace_of())
    assert all(size(keys) == 6 and keys[0][0] >= 4 and keys[0][1] <= STOP for keys in found.placebos)
    assert not any(overlap(a, b) for a in found.placebos for b in found.placebos if a != b)
    assert list(found.strongest) == ["contiguous"] and found.tried["contiguous"] >= 4


@pytest.mark.parametrize("match_on", MEASURES)
@pytest.mark.parametrize("kind", [{}, {"sink": True}, {"window": 120, "pad": 3}, {"H": 3, "K": 1}])
def test_every_measure_and_every_kind_of_trace(match_on, kind):
    trace = trace_of(**kind)
    check(match(trace, TARGET, 3, match_on), trace)


def test_the_nearest_window_in_bound_is_the_first_placebo_by_brute_force():
    trace = trace_of()
    windows = [(s, s + 6) for s in range(4, STOP - 5) if not overlap(((s, s + 6),), (TARGET, *HARD, (90, 95)))]
    theta = span_stats(trace, [TARGET, *windows], centred=False)["bound"].to_numpy().reshape(2, 6, 3, -1)
    theta = theta.sum((0, 1)).mean(0)
    distance = np.abs(np.log(theta[1:] / theta[0]))
    found = match(trace, TARGET, 2, hard=HARD, protect=(90, 95))
    assert found.placebos[0] == (windows[int(distance.argmin())],)
    assert abs(found.ln_ratios[0]) == pytest.approx(distance.min(), abs=1e-12)
    assert found.strongest["contiguous"] == pytest.approx(theta[1:].max() / theta[0])
    assert found.tried["contiguous"] == (distance <= 0.25).sum()


def test_perturbation_finds_what_exact_values_of_every_window_find():
    trace = trace_of()
    found = match(trace, TARGET, 1, "perturbation")
    windows = [(s, s + 6) for s in range(4, STOP - 5) if not overlap(((s, s + 6),), (TARGET,))]
    exact = set_strengths(trace, [TARGET, *windows], measures=["perturbation"])["perturbation"].to_numpy()
    within = np.abs(np.log(exact[1:] / exact[0])) <= 0.25
    assert within[windows.index(found.placebos[0][0])]
    assert 0 < found.tried["contiguous"] <= within.sum()
    assert found.strongest["contiguous"] >= 0.8 * exact[1:].max() / exact[0]


@pytest.mark.parametrize("match_on", ["bound", "perturbation"])
def test_remedies_are_tried_in_order_and_the_strongest_ratios_say_how_far_off_each_was(match_on):
    lifted = [(TARGET, 3.0), *((span, 3.0) for span in HARD)]
    single = match(trace_of(lifted), TARGET, 3, match_on, hard=HARD, caliper=0.6)
    assert single.remedy == "hard" and {keys[0] for keys in single.placebos} <= set(HARD)
    check(single, trace_of(lifted))
    assert list(single.strongest) == ["contiguous", "hard"] and single.strongest["contiguous"] < 0.5
    weaker = [(TARGET, 3.0), *((span, 1.8) for span in HARD)]
    several = match(trace_of(weaker), TARGET, 3, match_on, hard=HARD)
    assert several.remedy == "hard_set" and all(2 <= len(keys) <= 5 for keys in several.placebos)
    check(several, trace_of(weaker))
    alone = trace_of([(TARGET, 6.0)])
    nothing = match(alone, TARGET, 3, match_on, hard=HARD)
    assert (
        not nothing.matched and nothing.placebos == nothing.ln_ratios == () and list(nothing.strongest) == [*REMEDIES]
    )
    assert all(ratio < math.exp(-0.25) for ratio in nothing.strongest.values()) and len(nothing.strengths) == 1
    assert set(nothing.tried.values()) == {0}


def test_token_sets_reach_what_no_window_reaches():
    scattered = [((at, at + 1), 3.0) for at in range(5, 135, 6) if not 55 < at < 70]
    for match_on, lift in (("bound", 2.4), ("bound", 2.7), ("perturbation", 2.8)):
        trace = trace_of([(TARGET, lift), *scattered])
        found = match(trace, TARGET, 2, match_on, protect=[(90, 100)], remedies=["contiguous", "token_set"])
        assert found.remedy == "token_set" and found.strongest["contiguous"] < 0.78
        check(found, trace)
        for keys in found.placebos:
            assert size(keys) == 6 and keys[0][0] >= 4 and keys[-1][1] <= STOP and not overlap(keys, ((90, 100),))
        assert not any(overlap(a, b) for a in found.placebos for b in found.placebos if a != b)


def test_token_sets_begin_where_sentences_do_if_that_reaches_the_target():
    sentences = [(start, start + 10) for start in range(0, 140, 10)]
    trace = trace_of([((start, start + 2), 1.5) for start, _ in sentences] + [(TARGET, 0.7)])
    found = match(trace, TARGET, 2, remedies=["token_set"], boundaries=sentences, caliper=0.4)
    check(found, trace)
    assert all(start % 10 == 0 for keys in found.placebos for start, _ in keys)
    loose = match(trace, TARGET, 2, remedies=["token_set"], caliper=0.4)
    assert any(start % 10 for keys in loose.placebos for start, _ in keys)


def test_unions_chosen_together_are_unlike_where_there_is_a_choice():
    hard = [(s, s + 5) for s in range(5, 55, 6)]
    trace = trace_of([(TARGET, 3.0), *((span, 1.4) for span in hard)])
    found = match(trace, TARGET, 4, hard=hard, remedies=["hard_set"])
    pairs = [jaccard(a, b) for a in found.placebos for b in found.placebos if a != b]
    assert found.tried["hard_set"] > 20 and max(pairs) <= 0.5


def appended(trace, extra, n=N):
    """``extra`` keys between the context and the rows that no row gives any attention."""

    def with_keys(view):
        dull = view.logits.new_full((*view.logits.shape[:2], extra), -1e4)
        values = torch.randn(len(view.values), extra, view.values.shape[-1], dtype=torch.float64)
        return replace(
            view,
            logits=torch.cat([view.logits[..., :STOP], dull, view.logits[..., STOP:]], -1),
            values=torch.cat([view.values[:, :STOP], values, view.values[:, STOP:]], 1),
            queries=view.queries + extra,
        )

    return FakeTrace(n + extra, tuple(with_keys(view) for view in trace.view))


@pytest.mark.parametrize("match_on", MEASURES)
@pytest.mark.parametrize("remedy", REMEDIES)
def test_far_away_text_and_the_order_of_the_pool_change_nothing(match_on, remedy):
    trace = trace_of([*((span, 0.5) for span in HARD)])
    how = {"remedies": [remedy], "hard": HARD, "caliper": 2.0, "stop": STOP}
    one = match(trace, TARGET, 2, match_on, **how)
    far = match(appended(trace, 60), TARGET, 2, match_on, **how)
    turned = match(trace, TARGET, 2, match_on, **(how | {"hard": HARD[::-1]}))
    assert one.matched and one.placebos == far.placebos == turned.placebos
    np.testing.assert_allclose(far.ln_ratios, one.ln_ratios, atol=1e-9)
    assert far.tried == one.tried == turned.tried
    assert far.strongest == pytest.approx(one.strongest)


def test_selectors_rows_and_weights_are_those_of_the_strengths():
    trace, how = trace_of(L=3), {"heads": {0: [1, 2], 2: [5]}, "after": True, "layer_weights": [1.0, 9.0, 0.1]}
    check(match(trace, TARGET, 3, "perturbation", stop=STOP, **how), trace, **how)
    only = match(trace, TARGET, 3, layers=1)
    assert only.placebos != match(trace, TARGET, 3).placebos


def test_position_caliper_and_profile_weight():
    trace = trace_of()
    near = match(trace, TARGET, 2, position_caliper=0.15, caliper=1.0)
    assert all(abs(keys[0][0] - TARGET[0]) <= 0.15 * STOP for keys in near.placebos)
    plain, like = (match(trace, TARGET, 1, caliper=1.0, profile_weight=w) for w in (0.0, 100.0))
    stats = span_stats(trace, [TARGET, plain.placebos[0][0], like.placebos[0][0]], centred=False)
    profile = np.log(stats["bound"].to_numpy().reshape(12, 3, 3).mean(1))
    rms = np.sqrt(((profile[:, 1:] - profile[:, :1]) ** 2).mean(0))
    assert rms[1] < rms[0] and abs(plain.ln_ratios[0]) < abs(like.ln_ratios[0])


def test_a_target_of_several_spans_and_candidates_without_a_row_left():
    found = match(trace_of(), [(60, 63), (70, 73)], 2)
    assert all(size(keys) == 6 for keys in found.placebos)
    blind = trace_of(window=12)
    check(match(blind, (136, 139), 2, "perturbation", caliper=3.0), blind)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"target": (60, 260)}, PromptError, r"span \(60, 260\) with n = 150"),
        ({"target": "needle"}, PromptError, "target: the trace has no span 'needle'"),
        ({"k": 0}, InterventionError, "k=0; allowed: a whole number, at least 1"),
        ({"match_on": "theta"}, InterventionError, "match_on='theta'; allowed: bound, perturbation"),
        ({"caliper": 0}, InterventionError, "caliper=0; allowed: a finite number > 0"),
        ({"caliper": "wide"}, InterventionError, "caliper='wide'; allowed"),
        ({"remedies": ["contigous"]}, InterventionError, "remedies='contigous'; allowed: contiguous, hard"),
        ({"remedies": "hard"}, InterventionError, "remedies='hard'; allowed: a list of"),
        ({"hard": [(1, 2, 3)]}, PromptError, r"span \(1, 2, 3\)"),
        ({"hard": 5}, PromptError, "hard is 5; allowed: a list of"),
        ({"stop": 400}, PromptError, "stop = 400 with n = 150 keys"),
        ({"first": -1}, InterventionError, "first=-1; allowed"),
        ({"position_caliper": -1}, InterventionError, "position_caliper=-1; allowed"),
        ({"profile_weight": -0.5}, InterventionError, "profile_weight=-0.5; allowed: a finite number >= 0"),
        ({"seed": 1.5}, InterventionError, "seed=1.5; allowed"),
        ({"target": (0, 3), "pad": 3}, TheoryError, r"the target 0:3 has the strength 0 \(bound\)"),
        ({"target": (0, 141)}, TheoryError, "holds all attention of layer 0, head 0, row 140"),
        ({"heads": 9}, InterventionError, "head 9 does not exist"),
    ],
)
def test_wrong_arguments_are_one_line(how, error, message):
    how = dict(how)
    trace = trace_of(pad=how.pop("pad", 0))
    with pytest.raises(error, match=message) as caught:
        match(trace, **({"target": TARGET} | how))
    assert "\n" not in str(caught.value)
