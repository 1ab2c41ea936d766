"""Agreement of two seeds: Spearman's rho, and its bootstrap over cells by a loop."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from kvprobe.errors import TaskError
from kvprobe.heads import Cell, Trial, gather, stability
from kvprobe.stats.bca import resample_weights

SHAPE = (3, 4)


def trials(seed, noise=1.0, n=8, missed=()):
    """Heads of different true scores (many of them 0, as retrieval scores are), with noise."""
    truth, drawn = np.maximum(np.arange(12).reshape(SHAPE) - 5, 0.0), np.random.default_rng(seed)
    return [
        Trial(
            Cell(300 + i, 50, 0, seed),
            9,
            "v",
            "t",
            float(i not in missed),
            1.0,
            truth + noise * drawn.random(SHAPE).round(1),
            truth + noise * drawn.random(SHAPE),
            0.0,
        )
        for i in range(n)
    ]


def test_rho_is_scipy_s_of_the_mean_scores():
    one, two = trials(1, 9.0, missed=(2,)), trials(2, 9.0, missed=(5, 6))
    found = stability(one, two, resamples=50)
    expected = spearmanr(*(gather(each).scores.ravel().round(12) for each in (one, two))).statistic
    assert found.rho == pytest.approx(expected, abs=1e-12)
    assert (found.n_cells, found.n_heads, found.n_kept, found.undefined) == (8, 12, (7, 6), 0)
    assert found.ci_low < found.ci_high <= 1 and found.method.startswith("Spearman")


@pytest.mark.parametrize("kind", ["retrieval", "reasoning"])
def test_the_interval_is_a_bootstrap_over_cells_with_both_seeds_drawn_together(kind):
    one, two = trials(1, 9.0, missed=(2,)), list(reversed(trials(2, 9.0, missed=(5, 6))))
    found = stability(one, two, kind, resamples=200, seed=7, level=0.9)
    two = sorted(two, key=lambda each: each.cell.length)
    rhos = []
    for weights in resample_weights(8, 7, 200):
        means = []
        for group in (one, two):
            drawn = [each for each, times in zip(group, weights, strict=True) for _ in range(int(times))]
            means.append(np.mean([getattr(each, kind) for each in drawn if each.kept(kind)], axis=0).ravel().round(12))
        rhos.append(spearmanr(*means).statistic)
    np.testing.assert_allclose((found.ci_low, found.ci_high), np.quantile(rhos, (0.05, 0.95)), atol=1e-12)
    assert found.bias == pytest.approx(np.mean(rhos) - found.rho)


def test_the_same_scores_agree_and_opposite_ones_do_not():
    one = trials(1)
    same = stability(one, one, resamples=99)
    assert (same.rho, same.ci_low, same.overlap) == (pytest.approx(1), pytest.approx(1), 1)
    opposite = [Trial(*(each.cell, 9, "v", "t", 1.0, 1.0, -each.retrieval, each.reasoning, 0.0)) for each in one]
    found = stability(one, opposite, resamples=99, k=3)
    assert found.rho == pytest.approx(-1) and found.overlap == 0 and found.top_k == 3


def test_the_overlap_is_of_the_best_heads_alone():
    one, two = trials(1, 0.0), trials(2, 0.0)
    for each in two:
        each.retrieval[2, 3], each.retrieval[0, 0] = 0.0, 99.0
    assert stability(one, two, resamples=20, k=4).overlap == 0.75


def test_constant_scores_have_no_rank_correlation_and_say_so():
    flat = [Trial(each.cell, 9, "v", "t", 1.0, 1.0, 0 * each.retrieval, each.reasoning, 0.0) for each in trials(2)]
    found = stability(trials(1), flat, resamples=20)
    assert np.isnan([found.rho, found.ci_low, found.ci_high, found.bias]).all() and found.undefined == 20


def test_one_cell_has_no_interval():
    found = stability(trials(1, n=1), trials(2, n=1), resamples=20)
    assert np.isfinite(found.rho) and np.isnan([found.ci_low, found.ci_high]).all()


def test_resamples_without_an_answer_are_left_out_and_counted():
    found = stability(trials(1, n=3, missed=(0, 1)), trials(2, n=3), resamples=400)
    assert found.undefined == sum(weights[2] == 0 for weights in resample_weights(3, 0, 400)) > 50
    assert np.isfinite(found.ci_low)


def test_other_cells_are_refused():
    with pytest.raises(TaskError, match="8 and 7 trials of 7 common cells: stability compares two seeds"):
        stability(trials(1), trials(2, n=7))
    with pytest.raises(TaskError, match="16 and 8 trials of 8 common cells"):
        stability(trials(1) + trials(1), trials(2))
    with pytest.raises(TaskError, match="none of 8 trials has recall"):
        stability(trials(1), trials(2, missed=range(8)))


def test_heads_without_a_score_are_not_shared():
    """Index order must not make two seeds agree: heads with score 0 fill up a top k, but nobody named them."""

    def only(seed, **scores):
        table = np.zeros(SHAPE)
        for place, score in scores.items():
            table.flat[int(place[1:])] = score
        return [Trial(Cell(300 + i, 50, 0, seed), 9, "v", "t", 1.0, 1.0, table, table, 0.0) for i in range(3)]

    assert stability(only(0, h11=1.0), only(1, h10=1.0), k=10, resamples=20).overlap == 0
    assert stability(only(0, h11=1.0), only(1, h11=1.0, h10=0.5), k=10, resamples=20).overlap == 0.5
    nothing = stability(only(0), only(1), k=10, resamples=20)
    assert nothing.overlap is None and np.isnan(nothing.rho)
