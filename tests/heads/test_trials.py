"""Where the needle is, which items a grid makes, and what a scan keeps."""

import head_trials
import numpy as np
import pytest

from kvprobe.errors import InterventionError, TaskError
from kvprobe.heads import Cell, Grid, Trial, decoded, gather, needle_tokens, profile_of, share, top
from kvprobe.prompts import Prompt, alignment
from kvprobe.tasks.items import Item


class Model:
    """As much of a model as locating a needle needs."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


def words(model, before, evidence, value, after, encode):
    """An item whose texts are tokenised each by itself."""
    ids = [encode(text) for text in (before, evidence, after)]
    start = len(ids[0])
    prompt = Prompt.from_ids(ids[0] + ids[1] + ids[2])
    return Item("t", 0, 99, prompt, value, (), (value,), start, {"evidence": [(start, start + len(ids[1]))]})


@pytest.mark.parametrize(
    ("evidence", "value", "seen", "size"),
    [
        (" The magic number for x is: 4057188.", "4057188", "4057188", 7),  # a digit a token
        (" The magic number for x is: 7.", "7", "7", 1),
        (" The magic fruit for x is: apple.", "apple", " apple", 1),  # the space is part of the token
        (" The magic fruit for x is: green apple tree.", "green apple tree", " green apple tree", 3),
    ],
)
def test_the_needle_is_the_tokens_of_the_value(smol_tokenizer, evidence, value, seen, size):
    model = Model(smol_tokenizer)
    asked = words(model, "Hear this.", evidence, value, " So?", lambda t: smol_tokenizer.encode(t))
    start, stop = needle_tokens(model, asked)
    assert stop - start == size and alignment.decode(smol_tokenizer, asked.prompt.ids[start:stop].tolist()) == seen
    assert needle_tokens(model, asked, "needle") == asked.spans["evidence"][0]


@pytest.mark.parametrize("task", ["niah_single_2", "niah_single_3", "niah_multikey_1"])
def test_the_needle_of_generated_items_decodes_to_the_value(smol_tokenizer, task):
    from types import SimpleNamespace

    model = SimpleNamespace(tokenizer=smol_tokenizer, max_length=8192)
    for cell, asked in Grid(task=task, lengths=(500,), depths=(0, 60), seeds=(3,)).items(model):
        start, stop = needle_tokens(model, asked)
        first, last = asked.spans["evidence"][0]
        assert first < start < stop <= last
        assert alignment.decode(smol_tokenizer, asked.prompt.ids[start:stop].tolist()).strip() == asked.references[0]
        assert len(asked.prompt) <= cell.length - 50


def test_a_needle_that_is_not_there_names_the_nearest_text(tiny):
    model = tiny("llama")
    asked = head_trials.item(model, "Say. ", "one is 1234567, ok", "1234568", "so")
    for span in ("value", "needle"):
        with pytest.raises(
            TaskError, match=r"value '1234568' is not in the evidence .*; nearest: '1234567,'"
        ) as caught:
            decoded(model, asked, span=span)
        assert "\n" not in str(caught.value)
    twice = head_trials.item(model, "Say. ", "QZX is QZX", "QZX", "so")
    with pytest.raises(TaskError, match=r"'QZX' occurs 2 times in the evidence"):
        decoded(model, twice)


def test_items_without_one_value_and_one_evidence_are_refused(tiny):
    model = tiny("llama")
    asked = head_trials.item(model, "Say. ", "one is QZX", "QZX", "so")
    object.__setattr__(asked, "spans", {})
    with pytest.raises(TaskError, match="by_hand has 0 spans of evidence and 1 values; heads are scored on"):
        decoded(model, asked)
    object.__setattr__(asked, "spans", {"evidence": [(3, 5), (6, 7)]})
    with pytest.raises(TaskError, match="has 2 spans of evidence"):
        decoded(model, asked)


def test_bad_words_are_one_line(tiny):
    model = tiny("llama")
    asked = head_trials.item(model, "Say. ", "one is QZX", "QZX", "so")
    with pytest.raises(TaskError, match="span is 'key', must be one of value, needle"):
        decoded(model, asked, span="key")
    with pytest.raises(InterventionError, match="new_tokens=0 is not allowed"):
        decoded(model, asked, new_tokens=0)


def test_a_grid_is_every_length_depth_needle_and_seed():
    grid = Grid(lengths=(300, 600), depths=(0, 50, 100), needles=2, seeds=(4, 7))
    cells = grid.cells()
    assert len(set(cells)) == len(cells) == 24
    assert {(c.length, c.depth, c.needle, c.seed) for c in cells} == {
        (length, depth, needle, seed)
        for length in (300, 600)
        for depth in (0, 50, 100)
        for needle in (0, 1)
        for seed in (4, 7)
    }
    full = Grid.full(seeds=(0,))
    assert (len(full.lengths), len(full.depths), full.needles, len(full.cells())) == (20, 10, 3, 600)
    assert full.lengths[0] == 1000 and full.lengths[-1] == 50_000 and full.depths[::9] == (0.0, 100.0)
    assert Grid.full(longest=8000, task="niah_multikey_1").lengths[-1] == 8000


def test_an_item_belongs_to_its_cell_whatever_the_grid(smol_tokenizer):
    from types import SimpleNamespace

    model = SimpleNamespace(tokenizer=smol_tokenizer, max_length=8192)
    cell, seeds = Cell(300, 50, 0, 1), {}
    one, other = Grid(lengths=(300,), depths=(50,), seeds=(1,)), Grid(seeds=(0, 1, 2))
    assert one.item(model, cell).prompt.ids.tolist() == other.item(model, cell).prompt.ids.tolist()
    for each in Grid(lengths=(300,), needles=2, seeds=(0, 1, 2)).cells():
        seeds[each] = each.item_seed
    assert len(set(seeds.values())) == len(seeds) == 30 and min(seeds.values()) > 10**7
    first, second = (one.item(model, Cell(300, 50, 0, seed)) for seed in (0, 1))
    assert first.references != second.references and first.settings["depths"] == second.settings["depths"]
    assert Cell(300, 50, 0, 1).item_seed == Cell(300, 50.0, 0, 1).item_seed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": "niah_9"}, "no task 'niah_9', must be one of"),
        ({"lengths": ()}, r"lengths is \(\), must be one or more numbers"),
        ({"depths": (0, 0)}, r"depths is \(0, 0\), must be one or more numbers, each once"),
        ({"seeds": 3}, "seeds is 3, must be one or more numbers"),
        ({"lengths": (300, 0)}, "lengths is 0, must be a whole number of at least 1"),
        ({"needles": 0}, "needles is 0, must be a whole number of at least 1"),
        ({"new_tokens": 2.5}, "new_tokens is 2.5, must be a whole number"),
        ({"options": {"depth": 3}}, "options name 'depth': the grid sets it"),
    ],
)
def test_grids_that_make_no_sense_are_one_line(given, said):
    with pytest.raises(TaskError, match=said) as caught:
        Grid(**given)
    assert "\n" not in str(caught.value)


def trials(recalls, f1s, seed=0):
    drawn = np.random.default_rng(seed)
    return [
        Trial(Cell(300, 10 * i, 0, seed), 9, "v", "t", r, f, drawn.random((2, 3)), drawn.random((2, 3)), 0.0)
        for i, (r, f) in enumerate(zip(recalls, f1s, strict=True))
    ]


def test_scores_are_means_over_the_trials_that_were_answered():
    some = trials([1, 0.5, 0.51, 0], [0.2, 0.9, 0.5, 0.6])
    found = gather(some)
    assert (found.n, found.n_kept) == (4, 2)
    np.testing.assert_allclose(found.scores, (some[0].retrieval + some[2].retrieval) / 2)
    other = gather(some, "reasoning")
    assert other.n_kept == 2
    np.testing.assert_allclose(other.scores, (some[1].reasoning + some[3].reasoning) / 2)
    assert gather(some, threshold=0.9).n_kept == 1


def test_nothing_answered_is_an_error():
    with pytest.raises(TaskError, match=r"none of 2 trials has recall > 0.5 \(best 0.40\)"):
        gather(trials([0.4, 0], [1, 1]))
    with pytest.raises(TaskError, match="kind is 'sink', must be one of retrieval, reasoning"):
        gather(trials([0.4, 0], [1, 1]), "sink")
    with pytest.raises(TaskError, match="none of 0 trials"):
        gather([])


def test_top_heads_and_the_share_of_heads():
    scores = np.array([[0.1, 0.5, 0.05], [0.5, 0.0, 0.1]])
    assert top(scores, 3) == [(0, 1, 0.5), (1, 0, 0.5), (0, 0, 0.1)]
    assert share(scores) == 4 / 6 and share(scores, 0.2) == 2 / 6


def test_a_profile_says_what_it_was_made_from(tiny):
    from kvprobe.versions import versions

    model, grid = tiny("llama"), Grid(lengths=(300,), depths=(0, 10), seeds=(5,), options={"haystack": "noise"})
    found = profile_of(model, grid, trials([1, 0], [1, 1]), kind="reasoning", threshold=0.25)
    assert (found.model, found.kind, found.n_layers, found.n_heads) == (model.name, "reasoning", 2, 3)
    facts = found.facts
    assert (facts["n"], facts["n_kept"], facts["threshold"], facts["span"]) == (2, 2, 0.25, "value")
    assert (facts["task"], facts["lengths"], facts["depths"], facts["seeds"]) == ("niah_single_2", [300], [0, 10], [5])
    assert facts["revision"] is None and facts["versions"] == versions() and facts["options"] == {"haystack": "noise"}


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        (["4", "05", ".", "\n", "4", "05"], 3),
        (["\n", " 4", "05", "\n\n", "x"], 3),  # a new line before anything is written ends nothing
        ([" ", "\n", "4"], 3),
        (["4", ".\nThe"], 1),
        (["4", "05"], 2),
        ([], 0),
    ],
)
def test_the_answer_ends_with_its_first_line(pieces, kept):
    from types import SimpleNamespace

    from kvprobe.heads.trials import first_line

    model = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: "".join(pieces[token] for token in ids)))
    assert first_line(model, range(len(pieces))) == tuple(range(kept))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_an_answer_that_is_tried_is_the_one_that_is_stepped_through(smol, monkeypatch, seed):
    """Guessed right, wrong, too short, too early, or not at all: the same tokens as decoding one by one."""
    from dataclasses import replace

    from kvprobe import runs, tasks
    from kvprobe.heads import trials
    from kvprobe.interventions import KVMask

    item = tasks.make("niah_single_2", smol, length=320, seed=seed, tokens_to_generate=14, distractors=0)
    prefix = runs.prefill(smol, item.prompt, len(item.prompt) - 1)
    options = {"suffix": 1, "prefix": prefix, "keep_trace": False}
    for new_tokens in (1, 5, 14):
        stepped = runs.intervene(smol, item.prompt, KVMask([]), generate=new_tokens, **options).generated
        assert 0 < len(stepped) <= new_tokens
        wrong = (*item.answer_ids[:3], item.answer_ids[0], *item.answer_ids[4:])
        for guess in (item.answer_ids, wrong, item.answer_ids[:-2], item.answer_ids[2:], tuple(stepped), ()):
            assert trials.greedy(smol, replace(item, answer_ids=guess), new_tokens, prefix) == list(stepped)


def test_no_step_is_taken_where_the_whole_text_was_guessed(tiny, monkeypatch):
    from types import SimpleNamespace

    from kvprobe.heads import trials

    model, item = tiny("llama"), head_trials.item(tiny("llama"), "ab", "cd", "d", "ef")
    eos, said = sorted(trials.engine.end_of_sequence(model))[0], iter([[5, 6, 7], [9, 5, 6], [5, 6, 7]])
    monkeypatch.setattr(trials, "_said", lambda *given: next(said))
    monkeypatch.setattr(trials.runs, "intervene", lambda *given, **more: SimpleNamespace(generated=[8]))

    def written(guess, new_tokens=9):
        from dataclasses import replace

        return trials.greedy(model, replace(item, answer_ids=guess), new_tokens, None)

    assert written((5, 6)) == [5, 6, 7, 8]  # the guess, the row behind it, and what was stepped through
    assert written((5, 6)) == [9, 5, 6, 7, 8]  # a token before the guess, then the guess
    monkeypatch.setattr(trials, "_said", lambda *given: [5, 6, eos])
    assert written((5, 6)) == [5, 6] and written((5, 6), 1) == [5]
