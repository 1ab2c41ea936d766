"""Arithmetic traces: one derivation, later mentions, and placebos, judged by reading the text again."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import tasks
from kvprobe.errors import TaskError
from kvprobe.tasks import trace_text
from kvprobe.tasks.trace_memory import TASKS
from kvprobe.tasks.traces import Marks, Mention, build

EQUATION = re.compile(r"(\d+) \* (\d+) = (\d+)")
CHANGE = re.compile(r"is (\d+), and with(out|) (\d+)(?: more| of them) it is (\d+)\.")
STATED = re.compile(r"(\d+) (\w+) with (\d+) (\w+) each")


def model(tokenizer, max_length=None):
    return SimpleNamespace(tokenizer=tokenizer, max_length=max_length)


@pytest.fixture(scope="module", params=["tiny", "embedded"])
def reader(request, smol_tokenizer):
    return model(tiny.tokenizer() if request.param == "tiny" else smol_tokenizer)


def make(reader, seed=0, **options):
    return tasks.trace("trace_memory", reader, seed=seed, **options)


def text(reader, item, span):
    return reader.tokenizer.decode(item.prompt.ids[slice(*span)].tolist())


@st.composite
def options(draw):
    mentions = draw(st.integers(2, 12))
    return {
        "mentions": mentions,
        "rederive": draw(st.integers(0, min(2, mentions - 2))),
        "quantities": draw(st.integers(6, 11)),
        "digits": draw(st.integers(3, 6)),
    }


SEEDS = st.integers(-(10**6), 10**6)


# --- the text


@settings(deadline=None, max_examples=40)
@given(SEEDS, options())
def test_the_arithmetic_is_right_and_no_number_stands_for_two_things(smol_tokenizer, seed, given):
    item = make(model(smol_tokenizer), seed, **given)
    problem, solution = item.prompt.text.split("\n\n")
    stated = STATED.findall(problem)
    derived = EQUATION.findall(solution)
    assert len(stated) == given["quantities"] + 1 and len(derived) == len(stated) + given["rederive"]
    assert all(int(a) * int(b) == int(c) and len(c) == given["digits"] for a, b, c in derived)
    assert [(a, b) for a, b, _ in derived[: len(stated)]] == [(a, b) for a, _, b, _ in stated]
    changes = CHANGE.findall(solution)
    assert all(int(v) + (-1 if out else 1) * int(n) == int(r) for v, out, n, r in changes)
    assert len({things for *_, things in stated}) == len({groups for _, groups, *_ in stated}) == len(stated)
    # what every number in the text means: a factor, a value, a change or its result; none means two things
    meanings = [number for a, _, b, _ in stated for number in (a, b)] + [c for *_, c in derived[: len(stated)]]
    meanings += [number for _, _, n, r in changes for number in (n, r)]
    assert len(set(meanings)) == len(meanings) and set(re.findall(r"\d+", item.prompt.text)) == set(meanings)


@settings(deadline=None, max_examples=30)
@given(SEEDS, options())
def test_every_sentence_about_a_quantity_names_its_own_value(smol_tokenizer, seed, given):
    solution = make(model(smol_tokenizer), seed, **given).prompt.text.split("\n\n")[1]
    value = dict(re.findall(r"We get the number of (\w+) from .* = (\d+)\.", solution))
    used = re.findall(r"The number of (\w+) is (\d+)", solution)
    again = re.findall(r"We get the number of (\w+) again from .* = (\d+)\.", solution)
    assert len(value) == given["quantities"] + 1 and all(value[things] == shown for things, shown in used + again)
    assert len(used) + len(again) == 2 * (given["mentions"] - 1)


# --- the spans


@settings(deadline=None, max_examples=30)
@given(SEEDS, options())
def test_spans_decode_to_what_they_mark(reader, seed, given):
    item = make(reader, seed, **given)
    value, (a, b) = str(item.settings["value"]), item.settings["factors"]
    (target,) = item.target
    assert text(reader, item, target).strip() == f"{a} * {b} = {value}"
    assert [text(reader, item, mention.span).strip() for mention in item.mentions] == [value] * given["mentions"]
    # every place at which the value stands is a mention, and nothing else is
    assert len(re.findall(rf"\b{value}\b", item.prompt.text)) == given["mentions"]
    assert [mention.k for mention in item.mentions] == list(range(1, given["mentions"] + 1))
    assert sum(mention.rederive for mention in item.mentions) == given["rederive"]
    for mention in item.mentions:
        before = text(reader, item, (max(0, mention.start - 14), mention.start)).rstrip()
        assert (mention.rederive or mention.k == 1) == before.endswith(f"* {b} =")
    assert item.mentions == tuple(sorted(item.mentions, key=lambda mention: mention.start))


@settings(deadline=None, max_examples=30)
@given(SEEDS, options())
def test_placebos_are_the_other_derivations(reader, seed, given):
    item = make(reader, seed, **given)
    (target,), later = item.target, item.mentions[1:]
    found = [EQUATION.fullmatch(text(reader, item, span).strip()) for span in item.hard]
    assert len(found) == given["quantities"] >= 6 and all(found)
    assert sorted(int(match[3]) for match in found) == sorted(item.settings["others"].values())
    assert item.settings["value"] not in item.settings["others"].values()
    assert {stop - start for start, stop in item.hard} == {target[1] - target[0]}  # single digits are tokens in both
    assert max(stop for _, stop in item.hard) <= later[0].start and target[1] <= later[0].start
    assert item.hard[0] < target < item.hard[-1]  # placebos on both sides
    taken = Counter(token for span in (*item.target, *item.hard) for token in range(*span))
    assert max(taken.values()) == 1
    assert not set(taken) & {token for span in item.protect for token in range(*span)}


@settings(deadline=None, max_examples=20)
@given(SEEDS, options())
def test_protected_are_the_factors_in_the_problem_and_later_mentions(reader, seed, given):
    item = make(reader, seed, **given)
    (operands,) = set(item.protect) - {mention.span for mention in item.mentions[1:]}
    a, b = item.settings["factors"]
    assert re.fullmatch(rf"{a} \w+ with {b}", text(reader, item, operands).strip())
    start, stop = item.prompt["problem"]
    assert start <= operands[0] < operands[1] <= stop
    assert len(item.protect) == given["mentions"]


def test_the_last_tokens_of_the_target_are_its_first_mention(reader):
    for seed in range(5):
        item = make(reader, seed)
        assert item.mentions[0].stop == item.target[0][1] and item.target[0][0] < item.mentions[0].start


# --- seeds, options, lengths


@settings(deadline=None, max_examples=10)
@given(SEEDS, options())
def test_the_same_seed_gives_the_same_trace(reader, seed, given):
    one, two = make(reader, seed, **given), make(reader, seed, **given)
    assert one.prompt.ids.tolist() == two.prompt.ids.tolist() and one.settings == two.settings
    assert (one.target, one.mentions, one.hard, one.protect) == (two.target, two.mentions, two.hard, two.protect)
    assert json.loads(json.dumps(one.settings)) == one.settings and one.settings["tokens"] == len(one.prompt)
    assert one.settings.items() >= given.items() and (one.task, one.seed) == ("trace_memory", seed)


def test_seeds_differ_and_places_vary(smol_tokenizer):
    items = [make(model(smol_tokenizer), seed) for seed in range(40)]
    assert len({item.prompt.text for item in items}) == 40
    assert {item.settings["place"] for item in items} == {1, 2, 3, 4, 5}
    assert {mention.k for item in items for mention in item.mentions if mention.rederive} == {2, 3, 4, 5}


def test_the_text_does_not_depend_on_the_tokenizer(smol_tokenizer):
    for seed in range(3):
        one, two = make(model(smol_tokenizer), seed), make(model(tiny.tokenizer()), seed)
        assert one.prompt.text == two.prompt.text


def test_default_traces_fit_a_small_context(smol_tokenizer):
    lengths = [len(make(model(smol_tokenizer), seed).prompt) for seed in range(20)]
    assert 250 <= min(lengths) <= max(lengths) <= 450


def test_values_whose_factors_run_out_are_drawn_anew():
    for seed in range(200):
        pairs = trace_text.products(__import__("random").Random(seed), 12, 3)
        numbers = [number for a, b in pairs for number in (a, b, a * b)]
        assert len(pairs) == 12 and len(set(numbers)) == 36 and all(100 <= a * b <= 999 for a, b in pairs)
        assert not any(number % 10 == 0 for a, b in pairs for number in (a, b))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mention": 3}, "trace_memory has no option 'mention', must be one of mentions, quantities, digits, rederive"),
        ({"mentions": 1}, "mentions is 1, must be from 2 to 12"),
        ({"mentions": 13}, "mentions is 13, must be from 2 to 12"),
        ({"mentions": "5"}, "mentions is '5', must be a whole number"),
        ({"quantities": 5}, "quantities is 5, must be from 6 to 11"),
        ({"quantities": True}, "quantities is True, must be a whole number"),
        ({"digits": 2}, "digits is 2, must be from 3 to 6"),
        ({"rederive": 3}, "rederive is 3, must be from 0 to 2"),
        ({"rederive": 1, "mentions": 2}, "rederive is 1, needs mentions of at least 3, not 2"),
        ({"length": 0}, "length is 0, must be a whole number of at least 1 or None"),
        ({"seed": 1.5}, "seed is 1.5, must be a whole number"),
    ],
    ids=str,
)
def test_bad_options_are_quoted(smol_tokenizer, given, message):
    with pytest.raises(TaskError) as caught:
        make(model(smol_tokenizer), **{"seed": 0, **given})
    assert str(caught.value) == message


def test_lengths_are_limits(smol_tokenizer):
    n = len(make(model(smol_tokenizer)).prompt)
    assert len(make(model(smol_tokenizer), length=n).prompt) == n
    with pytest.raises(TaskError, match=f"length is {n - 1}, this trace has {n} tokens: give at least that many"):
        make(model(smol_tokenizer), length=n - 1)


def test_names():
    assert tasks.trace_names() == ["trace_memory"] == list(TASKS)
    assert "trace_memory" not in tasks.names()
    with pytest.raises(TaskError, match="no trace task 'niah', must be one of trace_memory"):
        tasks.trace("niah", None, seed=0)


class Pairs:
    """Tokens of ``size`` bytes, wherever words and numbers end."""

    is_fast, bos_token_id = False, None

    def __init__(self, size):
        self.size = size

    def __call__(self, text, add_special_tokens=True, verbose=True):
        data = text.encode()
        return {"input_ids": [int.from_bytes(b"\1" + data[i : i + self.size]) for i in range(0, len(data), self.size)]}

    def decode(self, ids, **_):
        return b"".join(token.to_bytes(8).lstrip(b"\0")[1:] for token in ids).decode(errors="replace")


def test_tokens_that_hold_more_than_the_value_are_refused():
    with pytest.raises(
        TaskError, match=r"the tokens of the value '\d{3}' are '.*' \(tokens .*\), must be the value alone"
    ):
        make(model(Pairs(5)))


# --- marks of any text

TEXT = "Six by nine is 54. Two by nine is 18. So 54 it is, and 54 again: six by nine is 54."
SPANS = {"target": [(0, 17)], "mentions": [(15, 17, 1), (41, 43, 2), (55, 57, 3), (80, 82, 4)]}


def marked(**changes):
    return build("own", 0, model(tiny.tokenizer()), TEXT, Marks(**{**SPANS, **changes}), {})


def test_marks_become_token_spans():
    item = marked(rederive=[(65, 82)], hard=[(19, 36)], protect=[(38, 40)])
    lead = 0  # the tiny tokenizer adds nothing, and a token is a byte
    assert item.target == ((lead, 17),) and item.hard == ((19, 36),)
    assert item.mentions == (Mention(15, 17, 1), Mention(41, 43, 2), Mention(55, 57, 3), Mention(80, 82, 4, True))
    assert item.protect == ((38, 40), (41, 43), (55, 57), (80, 82))
    assert all(TEXT[slice(*mention.span)] == "54" for mention in item.mentions)


def test_a_target_in_pieces_is_sorted():
    assert marked(target=[(7, 17), (0, 3)]).target == ((0, 3), (7, 17))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hard": [(10, 20)]},
            "target 'Six by nine is 54' (tokens 0 to 17) and hard 'e is 54. T' (tokens 10 to 20) overlap",
        ),
        ({"hard": [(19, 36), (30, 38)]}, "hard 'Two by nine is 18' (tokens 19 to 36) and hard"),
        ({"protect": [(16, 30)]}, "and protect '4. Two by nine' (tokens 16 to 30) overlap, must share no token"),
        ({"hard": [(19, 36)], "protect": [(35, 37)]}, "and protect '8.' (tokens 35 to 37) overlap"),
        ({"hard": [(40, 44)]}, "hard ' 54 ' (tokens 40 to 44) and protect '54' (tokens 41 to 43) overlap"),
        ({"hard": [(44, 50)]}, "hard 'it is,' (tokens 44 to 50) must end before the first later mention, at token 41"),
        ({"target": [(0, 17), (44, 50)]}, "mention '54' (tokens 41 to 43) with k = 2 must begin behind the target"),
        ({"target": [(0, 3), (1, 5)]}, "target 'Six' (tokens 0 to 3) and target 'ix b' (tokens 1 to 5) overlap"),
        ({"mentions": [(15, 17, 1)]}, "mentions have k = [1], must be at least 1, not go back, and reach 2 or more"),
        ({"mentions": []}, "mentions have k = [], must be"),
        ({"mentions": [(15, 17, 0), (41, 43, 2)]}, "mentions have k = [0, 2], must be"),
        ({"mentions": [(15, 17, 2), (41, 43, 2)]}, "mention '54' (tokens 15 to 17) with k = 2 must begin behind"),
        ({"mentions": [(41, 43, 3), (55, 57, 2)]}, "mentions have k = [3, 2], must be"),
        ({"mentions": [(41, 43, 2), (42, 44, 3)]}, "mention '54' (tokens 41 to 43) and mention '4 ' (tokens 42 to 44)"),
        ({"mentions": [(0, 3, 1), (41, 43, 2)]}, "mention 'Six' (tokens 0 to 3) with k = 1 has no token before it"),
        ({"rederive": [(19, 36)]}, "rederive 'Two by nine is 18' holds no mention, must hold one with k of at least 2"),
        ({"rederive": [(0, 17)]}, "rederive 'Six by nine is 54' holds no mention, must hold one with k of at least 2"),
    ],
    ids=str,
)
def test_marks_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(TaskError) as caught:
        marked(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)
