"""The parts of the needle tasks: fitting, haystacks, drawing, distractors, scores."""

import os
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import resources
from kvprobe.errors import TaskError
from kvprobe.tasks import distractors, fitting, scoring
from kvprobe.tasks.haystacks import Essays, Needles, Noise, Piece, documents, sentences
from kvprobe.tasks.needles import Names, Streams, decoys
from kvprobe.tasks.planting import DEPTHS, Planting

# --- fitting


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=3000), st.integers(0, 4), st.data())
def test_the_largest_number_that_fits(steps, low, data):
    sizes = np.concatenate([[7], 7 + np.cumsum(steps * 40)])
    low = min(low, len(sizes) - 2)
    budget = data.draw(st.integers(int(sizes[low]), int(sizes[len(sizes) // 3]) + int(sizes[low])))
    calls = []

    def count(n):
        calls.append(n)
        return int(sizes[n]) if n < len(sizes) else int(sizes[-1]) + 9 * (n - len(sizes) + 1)

    found = fitting.largest(count, budget, low)
    assert count(found) <= budget < count(found + 1) and found >= low


def test_few_counts_are_needed():
    rng = np.random.default_rng(0)
    sizes = np.cumsum(rng.choice([1, 1, 1, 2, 3], 30_000))
    calls = []
    for budget in rng.integers(200, 20_000, 50):
        calls.append(0)

        def count(n):
            calls[-1] += 1
            return int(sizes[n])

        fitting.largest(count, int(budget), 1)
    assert max(calls) <= 12 and np.mean(calls) < 9


@given(st.integers(1, 400), st.integers(1, 400), st.sets(st.integers(1, 400)))
def test_the_smallest_number_that_works(first, low, holes):
    holes = {hole for hole in holes if hole < first}  # works from `first` on, and now and then just before it
    near = {hole for hole in holes if first - hole < fitting.NEARBY}

    def works(n):
        return n >= first or n in near

    wanted = next(n for n in range(low, 1000) if works(n))
    found = fitting.smallest(works, low, 1 << 12)
    assert works(found) and wanted <= found <= max(first, low)
    assert found == low or not works(found - 1)


def test_nothing_works():
    assert fitting.smallest(lambda n: False, 1, 100) is None


# --- haystacks


def test_sentences_are_cut_and_nothing_is_lost():
    text = 'One.  Two! "Three?" he said.\n\nFour … five.) Six'
    assert sentences(text) == ["One.", "Two!", '"Three?"', "he said.", "Four … five.)", "Six"]
    assert sentences("  \n ") == []


@given(st.text(st.sampled_from('ab.!? \n"'), max_size=60))
def test_sentences_join_to_the_text(text):
    assert " ".join(sentences(text)) == " ".join(text.split())


@pytest.mark.parametrize("n", [1, 2, 7, 300, 20_000, 60_000])
def test_essays_are_the_first_words_of_the_text(n):
    essays = Essays(documents(), random.Random(1))
    words = " ".join(essays.sentences).split()
    pieces = essays.pieces(n)
    taken = " ".join(piece.text for piece in pieces).split()
    assert taken == (words * (n // len(words) + 1))[:n]
    assert {piece.label for piece in pieces} == {"content"}
    assert essays.facts(n) == {"units": n, "unit": "word", "haystack_words": len(words), "repeated": n > len(words)}


def test_essays_come_in_an_order_of_the_seed():
    texts = documents()
    orders = {seed: Essays(texts, random.Random(seed)).sentences for seed in range(3)}
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert Essays(texts, random.Random(2)).sentences == orders[2]
    assert all([text[0] for text in texts].count(order[0]) == 1 for order in orders.values())


def test_titles_are_left_out():
    titles = [path.read_text().split("\n")[0] for path in resources.path("essays").glob("*.txt")]
    firsts = [text[0] for text in documents()]
    assert len(titles) == len(firsts) and not any(first.startswith(title) for title in titles for first in firsts)


def test_a_single_text_begins_at_a_random_sentence():
    text = tuple(f"Sentence {i}." for i in range(50))
    starts = {Essays([text], random.Random(seed)).sentences[0] for seed in range(20)}
    assert len(starts) > 5
    turned = Essays([text], random.Random(0)).sentences
    at = text.index(turned[0])
    assert tuple(turned) == text[at:] + text[:at]


def test_the_users_own_text(tmp_path):
    (tmp_path / "b.txt").write_text("Second text. It is short.")
    (tmp_path / "a.txt").write_text("First\n\ntext. Done.")
    (tmp_path / "essays.json").write_text('{"text": "From JSON. Yes."}')
    (tmp_path / "notes.md").write_text("Not this.")
    assert documents(tmp_path) == (("First text.", "Done."), ("Second text.", "It is short."))
    assert documents(tmp_path / "a.txt") == (("First text.", "Done."),)
    assert documents(str(tmp_path / "essays.json")) == (("From JSON.", "Yes."),)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "[1]"),
        ("a.json", '{"words": "x"}'),
        ("a.json", "not json"),
        ("a.txt", b"\xff\xfe\xfd"),
        ("a.json", '{"text": 3}'),
    ],
)
def test_text_that_cannot_be_read(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TaskError, match=r"cannot read '.*': must be UTF-8 text or a .json \{'text': …\}"):
        documents(path)


@pytest.mark.parametrize("name", ["", "missing", "empty.txt"])
def test_no_text_at_all(tmp_path, name):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(TaskError, match=r"no text in .*: must be a folder of .txt files"):
        documents(tmp_path / name)


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Old.")
    assert documents(path) == (("Old.",),)
    path.write_text("New.")
    os.utime(path, ns=(1, 1))
    assert documents(path) == (("New.",),)


def test_noise_is_rulers_line():
    assert {piece.text for piece in Noise().pieces(5)} == {
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    }


def test_needle_lines_are_drawn_once():
    drawn = iter(range(100))
    hay = Needles(lambda: Piece(str(next(drawn))))
    assert [piece.text for piece in hay.pieces(3)] == ["0", "1", "2"]
    assert [piece.text for piece in hay.pieces(5)] == ["0", "1", "2", "3", "4"]
    assert [piece.text for piece in hay.pieces(2)] == ["0", "1"]


# --- drawing and planting


def test_depths_are_rulers():
    assert np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int).tolist() == list(DEPTHS)


def test_names_do_not_repeat():
    class Stuck(random.Random):
        def randint(self, low, high):
            self.calls = getattr(self, "calls", 0) + 1
            return 5_000_000 + (self.calls > 3)

    names, rng = Names(), Stuck()
    assert [names.draw("numbers", rng) for _ in range(2)] == ["5000000", "5000001"] and rng.calls == 4


def test_streams_depend_on_task_seed_and_purpose_only():
    first = Streams("a", 0)("x").random()
    assert first == Streams("a", 0)("x").random()
    others = [Streams("b", 0)("x"), Streams("a", 1)("x"), Streams("a", 0)("y")]
    assert first not in [stream.random() for stream in others]


def test_decoys_are_plain_sentences():
    lines = [piece.text for piece in decoys(32, random.Random(0))]
    assert len(set(lines)) == 32 and all(line[0].isupper() and line.endswith(".") for line in lines)
    assert not any("magic" in line for line in lines)
    assert [len(sentences(line)) for line in lines] == [1] * 32
    with pytest.raises(TaskError, match="decoys is 33, must be at most 32"):
        decoys(33, random.Random(0))


@given(st.integers(1, 60), st.integers(0, 8), st.integers(0, 8), st.booleans(), st.integers(0, 5))
def test_every_piece_is_planted_where_its_depth_says(units, needles, others, lines, seed):
    text = tuple(f"Sentence number {i} is here." for i in range(30))
    hay = Noise() if lines else Essays([text, text], random.Random(seed))
    pieces = [Piece(f"NEEDLE {i}.", "evidence") for i in range(needles)]
    pieces += [Piece(f"DECOY {i}.", "decoy") for i in range(others)]
    planting = Planting(hay, pieces, Streams("t", seed))
    units = max(units, planting.minimum)
    context = planting.compose(units)
    assert context.text == planting.text(units)
    own = hay.pieces(units)
    rest = context.text
    for piece, (start, stop) in zip(pieces, context.planted, strict=True):
        assert context.text[start:stop] == piece.text
        rest = rest.replace(piece.text, "")
    assert rest.split() == " ".join(piece.text for piece in own).split()
    for piece, (start, _), depth in zip(pieces, context.planted, context.depths, strict=True):
        before = context.text[:start]
        for other in pieces:
            before = before.replace(other.text, "")
        count = before.count(own[0].text) if lines else len(sentences(before))
        assert count == int(len(own) * depth / 100 + 1e-9 * lines), piece
        assert depth in DEPTHS or lines
    assert len(set(context.depths)) == len(pieces)
    shown = [context.text[slice(*sentence)] for run in context.runs for sentence in run]
    assert shown == [sentence for piece in own for sentence in sentences(piece.text)]


def test_decoys_do_not_move_needles():
    hay = Essays(documents(), random.Random(0))
    pieces = [Piece("NEEDLE.", "evidence")] * 3
    alone = Planting(hay, pieces, Streams("t", 0)).places(100)
    crowded = Planting(hay, [*pieces, *decoys(5, random.Random(0))], Streams("t", 0)).places(100)
    assert alone[1] == crowded[1][:3] and len(set(crowded[1])) == 8


def test_more_pieces_than_depths():
    hay = Essays(documents(), random.Random(0))
    with pytest.raises(TaskError, match=r"41 needles and decoys, must be at most 40 \(one a depth\)"):
        Planting(hay, [Piece("N.", "hard")] * 41, Streams("t", 0))


# --- distractors

SPLITS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=30), min_size=1, max_size=5)


def laid(runs):
    """Runs of sentence lengths as token spans, with gaps between runs."""
    at, found = 5, []
    for run in runs:
        found.append([])
        for size in run:
            found[-1].append((at, at + size))
            at += size
        at += 7
    return found


@given(SPLITS, st.integers(5, 50), st.randoms(use_true_random=False))
def test_tiles_are_disjoint_and_as_long_as_the_evidence(runs, tokens, rng):
    runs = laid(runs)
    starts = {start for run in runs for start, _ in run}
    stops = {stop for run in runs for _, stop in run}
    for tiles, aligned in (
        (distractors.sentence_tiles(runs, tokens), True),
        (distractors.window_tiles(runs, tokens, rng), False),
    ):
        assert all(a[1] <= b[0] for a, b in pairwise(tiles))
        for start, stop in tiles:
            assert any(run[0][0] <= start and stop <= run[-1][1] for run in runs)
            assert 10 * abs(stop - start - tokens) <= tokens
            if aligned:
                assert start in starts and (stop in stops or stop - start == tokens)
            else:
                assert stop - start == tokens


def test_as_many_windows_as_fit():
    runs = laid([[10, 10, 5], [9], [40]])
    assert len(distractors.window_tiles(runs, 10, random.Random(0))) == 2 + 0 + 4
    places = {tuple(distractors.window_tiles(runs, 10, random.Random(seed))) for seed in range(5)}
    assert len(places) > 1


def test_whole_sentences_are_preferred_to_cuts():
    assert distractors.sentence_tiles(laid([[12, 9, 30, 21]]), 20) == [(5, 26), (26, 46), (56, 77)]


def test_distractors_lie_on_both_sides_and_near():
    tiles = [(start, start + 10) for start in range(0, 1000, 10) if start != 500]
    chosen = distractors.choose(tiles, [(500, 510)], 20, random.Random(0))
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(tiles) and len(chosen) == 20
    assert sum(start < 500 for start, _ in chosen) == 10
    assert all(abs(start - 500) <= 10 * 30 for start, _ in chosen)
    assert chosen != distractors.choose(tiles, [(500, 510)], 20, random.Random(1))
    figures = distractors.balance([(500, 510)], chosen, (0, 1000))
    assert figures["position_auroc"] == 0.5 and figures["evidence_depth"] == 50.0
    assert abs(figures["distractor_depth"] - 50) < 5


def test_a_side_without_room_is_filled_from_the_other():
    tiles = [(start, start + 10) for start in range(10, 300, 10)]
    chosen = distractors.choose(tiles, [(0, 10)], 5, random.Random(0))
    assert len(chosen) == 5 and distractors.balance([(0, 10)], chosen, (0, 300))["position_auroc"] == 0.0
    assert distractors.choose(tiles, [(0, 10)], 99, random.Random(0)) == tiles


def test_several_needles_share_the_distractors():
    tiles = [(start, start + 10) for start in range(0, 4000, 10) if start % 1000 != 500]
    evidence = [(start, start + 10) for start in (500, 1500, 2500, 3500)]
    chosen = distractors.choose(tiles, evidence, 20, random.Random(0))
    near = [sum(abs(start - own[0]) < 500 for start, _ in chosen) for own in evidence]
    assert near == [5, 5, 5, 5]


def test_balance_of_nothing():
    assert distractors.balance([(5, 10)], [], (0, 100)) == {
        "position_auroc": None,
        "evidence_depth": 5.0,
        "distractor_depth": None,
    }


# --- scores


@pytest.mark.parametrize(
    ("prediction", "references", "whole", "part"),
    [
        (" 1234567.", ["1234567"], 1.0, 1.0),
        ("It is 123.", ["1234567"], 0.0, 0.0),
        ("11 and 33", ["11", "22", "33", "44"], 0.5, 1.0),
        ("ABCD-ef", ["abcd-EF"], 1.0, 1.0),
        ("", ["x"], 0.0, 0.0),
    ],
)
def test_scores(prediction, references, whole, part):
    assert scoring.string_match_all(prediction, references) == whole
    assert scoring.string_match_part(prediction, references) == part


@pytest.mark.parametrize("references", [[], "1234", ["a", ""]])
def test_scores_need_references(references):
    for score in (scoring.string_match_all, scoring.string_match_part):
        with pytest.raises(TaskError, match="must be a list of one or more non-empty strings"):
            score("a", references)
