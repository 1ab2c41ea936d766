"""Items and traces from the user's JSON lines: what a line becomes, and one clear line for everything wrong with it."""

import json
from types import SimpleNamespace

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.errors import DataError, TaskError
from kvprobe.tasks import scoring, user
from kvprobe.tasks.items import Item
from kvprobe.tasks.traces import TraceItem

TEXT = "Ann's code is 17. Bob's code is 52. Cid's code is 88. What is Bob's code? It is"
ROW = {"text": TEXT, "target": "Bob's code is 52.", "answer": "52"}
FULL = {
    **ROW,
    "hard": ["Ann's code is 17.", [36, 53]],
    "protect": "It is",
    "question": " What is Bob's code? It is",
    "references": ["52", "fifty-two"],
    "id": "bob",
    "meta": {"source": "own"},
}
TRACE = "Six by nine is 54. Two by nine is 18. So 54 it is, and 54 again: six by nine is 54."
TRACE_ROW = {"text": TRACE, "target": [0, 17], "mentions": [[15, 17, 1], [41, 43, 2], [55, 57, 3], [80, 82, 4]]}


@pytest.fixture(scope="module")
def model():
    """The tokenizer of the tiny models: one token a byte, nothing added."""
    return SimpleNamespace(tokenizer=tiny.tokenizer(), max_length=512)


@pytest.fixture
def file(tmp_path):
    def written(*rows):
        path = tmp_path / "own.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
        return path

    return written


def refused(function, path, model):
    with pytest.raises(DataError) as caught:
        function(path, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- items


def test_a_full_line(file, model):
    (item,) = user.items(file(FULL), model)
    assert isinstance(item, Item) and (item.task, item.seed, item.length) == ("user", 0, len(TEXT))
    assert item.prompt.text == TEXT and item.prompt.ids.tolist() == model.tokenizer(TEXT)["input_ids"]
    assert item.spans == {"evidence": [(18, 35)], "hard": [(0, 17), (36, 53)], "protect": [(74, 79)]}
    assert item.context_stop == 53 and item.prompt["question"] == (53, 79) and item.prompt["context"] == (0, 53)
    assert item.answer == " 52" and model.tokenizer.decode(item.answer_ids) == " 52"
    assert (
        item.references == ("52", "fifty-two") and scoring.string_match_all("it is 52, fifty-two", item.references) == 1
    )
    assert item.settings == {
        "id": "bob",
        "line": 1,
        "meta": {"source": "own"},
        "tokens": 79,
        "answer_border": "exact",
        "answer_space": True,
    }
    assert json.loads(json.dumps(item.settings)) == item.settings


def test_a_short_line(file, model):
    (item,) = user.items(file(ROW), model)
    assert item.context_stop == len(TEXT) - 1 == item.prompt["question"][0] and item.prompt["question"][1] == len(TEXT)
    assert item.spans == {"evidence": [(18, 35)], "hard": [], "protect": []}
    assert item.references == ("52",) and item.settings["id"] == "own-1"


def test_lines_keep_their_order_and_numbers(file, model):
    rows = user.items(file("", {**ROW, "id": 7}, "  ", ROW, ""), model)
    assert [item.settings["id"] for item in rows] == ["7", "own-4"]
    assert [item.settings["line"] for item in rows] == [2, 4]


def test_spans_with_the_embedded_tokenizer(file, smol_tokenizer):
    smol = SimpleNamespace(tokenizer=smol_tokenizer, max_length=8192)
    (item,) = user.items(file(FULL), smol)
    shown = [
        smol_tokenizer.decode(item.prompt.ids[a:b]).strip() for a, b in item.spans["evidence"] + item.spans["hard"]
    ]
    assert shown == ["Bob's code is 52.", "Ann's code is 17.", "Cid's code is 88."]
    assert smol_tokenizer.decode(item.prompt.ids[item.context_stop :]) == FULL["question"]
    whole = smol_tokenizer(TEXT + " 52")["input_ids"]
    assert item.prompt.ids.tolist() + list(item.answer_ids) == whole


WORDS = st.lists(st.text(st.sampled_from("abcdeé漢🙂 "), min_size=1, max_size=6), min_size=3, max_size=8)


@settings(deadline=None, max_examples=60)
@given(WORDS, st.data())
def test_ranges_are_characters_whatever_the_text(tmp_path_factory, model, words, data):
    text = "x" + "".join(words) + "."
    chosen = data.draw(st.integers(0, len(words) - 1))
    start = 1 + len("".join(words[:chosen]))
    row = {"text": text, "target": [start, start + len(words[chosen])], "answer": "y"}
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=data.draw(st.booleans())), encoding="utf-8")
    (item,) = user.items(path, model)
    lead = len(text[:start].encode())
    assert item.spans["evidence"] == [(lead, lead + len(words[chosen].encode()))]


@pytest.mark.parametrize(
    "target",
    ["Bob's code is 52.", [18, 35], ["Bob's code is 52."], [[18, 35]], [[31, 35], "Bob's code is"], ["52.", [18, 32]]],
)
def test_ways_to_give_a_target(file, model, target):
    (item,) = user.items(file({**ROW, "target": target}), model)
    covered = sorted(token for span in item.spans["evidence"] for token in range(*span))
    assert covered == list(range(18, 35)) and item.spans["evidence"] == sorted(item.spans["evidence"])


@pytest.mark.parametrize(
    ("end", "answer", "wanted"),
    [
        ("is", "52", " 52"),
        ("is", " 52", " 52"),
        ("is ", "52", "52"),
        ("is:", "52", " 52"),
        ("is (", "52", "52"),
        ("is", ".", "."),
        ("is", "\n52", "\n52"),
        ("是", "52", "52"),
        ("is?", "52", " 52"),
    ],
)
def test_a_word_is_not_glued_to_the_text(file, model, end, answer, wanted):
    (item,) = user.items(file({**ROW, "text": TEXT[:-2] + end, "answer": answer}), model)
    assert item.answer == wanted and item.settings["answer_space"] == (wanted != answer)
    assert item.references == (answer.strip(),)


# --- traces


def test_a_trace(file, model):
    row = {**TRACE_ROW, "rederive": [[65, 82]], "hard": "Two by nine is 18", "protect": ["So"], "id": 3, "meta": None}
    (item,) = user.traces(file(row), model)
    assert isinstance(item, TraceItem) and (item.task, item.seed) == ("user", 0)
    assert item.target == ((0, 17),) and item.hard == ((19, 36),)
    assert item.protect == ((38, 40), (41, 43), (55, 57), (80, 82))
    assert [(m.span, m.k, m.rederive) for m in item.mentions] == [
        ((15, 17), 1, False),
        ((41, 43), 2, False),
        ((55, 57), 3, False),
        ((80, 82), 4, True),
    ]
    assert item.settings == {"id": "3", "line": 1, "meta": None, "tokens": len(TRACE)}


def test_a_short_trace_has_no_rederivation(file, model):
    (item,) = user.traces(file(TRACE_ROW), model)
    assert not any(mention.rederive for mention in item.mentions) and item.hard == ()


# --- what is refused


def without(row, *fields):
    return {name: value for name, value in row.items() if name not in fields}


SPAN = "must be a text that occurs exactly once, or a pair [start, stop] of characters; or a list of those"
BAD_ITEMS = [
    ("{nonsense", "is not JSON (Expecting property name"),
    ('{"text": "a", "text": "b"}', "is not JSON (the field 'text' stands there twice)"),
    ('{"meta": NaN}', "is not JSON (NaN is no number of JSON)"),
    ("[1, 2]", "is [1, 2], must be a JSON object"),
    (
        {**ROW, "targets": "x"},
        "unknown field 'targets', allowed are text, target, answer, protect, hard, question, refer",
    ),
    ({**ROW, "mentions": []}, "unknown field 'mentions', allowed are"),
    (without(ROW, "text"), "text is missing, must be a text that is not empty"),
    ({**ROW, "text": 3}, "text is 3, must be a text that is not empty"),
    ({**ROW, "text": " \n"}, "text is ' \\n', must be a text that is not empty"),
    ({**ROW, "text": "x" * 600, "target": [0, 5]}, "the text has 600 tokens, the model reads at most 512"),
    ({**ROW, "text": "a\ud800b", "target": [0, 1]}, "the text holds a lone surrogate at character 1"),
    ({**ROW, "text": "a", "target": [0, 1]}, "text is 'a', must be at least two tokens"),
    (without(ROW, "answer"), "answer is missing, must be a text that is not empty"),
    ({**ROW, "answer": ""}, "answer is '', must be a text that is not empty"),
    ({**ROW, "answer": "  "}, "answer is ' ', must be a text that is not empty"),
    ({**ROW, "answer": 52}, "answer is 52, must be a text that is not empty"),
    ({**ROW, "answer": "5" * 433}, "must be short enough: 79 + 434 tokens, the model reads at most 512"),
    (without(ROW, "target"), f"target is missing, {SPAN}, not empty"),
    ({**ROW, "target": None}, f"target is None, {SPAN}, not empty"),
    ({**ROW, "target": []}, f"target is [], {SPAN}, not empty"),
    ({**ROW, "target": [1, 2, 3]}, f"target is [1, 2, 3], {SPAN}, not empty"),
    ({**ROW, "target": [0.5, 3]}, f"target is [0.5, 3], {SPAN}, not empty"),
    ({**ROW, "target": [True, 3]}, f"target is [True, 3], {SPAN}, not empty"),
    ({**ROW, "target": {"start": 1}}, f"target is {{'start': 1}}, {SPAN}, not empty"),
    ({**ROW, "target": "Dan"}, "target: span 'target': 'Dan' occurs 0 times in the text, must be exactly once"),
    ({**ROW, "target": "code"}, "target: span 'target': 'code' occurs 4 times in the text, must be exactly once"),
    ({**ROW, "target": ""}, "target: span 'target': '' occurs 0 times in the text"),
    ({**ROW, "target": [18, 99]}, "target: span 'target' is (18, 99), must have 0 <= start < stop <= 79 (characters)"),
    ({**ROW, "target": [35, 18]}, "target: span 'target' is (35, 18), must have"),
    ({**ROW, "target": [-5, 3]}, "target: span 'target' is (-5, 3), must have"),
    (
        {**ROW, "target": [[18, 30], [25, 35]]},
        "target \"Bob's code i\" (tokens 18 to 30) and target 'ode is 52.' (tokens 25 to 35) overlap",
    ),
    ({**ROW, "hard": 5}, f"hard is 5, {SPAN}"),
    ({**ROW, "hard": ["Ann", 5]}, f"hard is ['Ann', 5], {SPAN}"),
    ({**ROW, "hard": ["nobody"]}, "hard: span 'hard': 'nobody' occurs 0 times in the text"),
    (
        {**ROW, "hard": [[10, 20]]},
        "hard ' is 17. Bo' (tokens 10 to 20) and target \"Bob's code is 52.\" (tokens 18 to 35) over",
    ),
    ({**ROW, "hard": [[0, 9], [5, 12]]}, 'hard "Ann\'s cod" (tokens 0 to 9) and hard'),
    ({**ROW, "protect": None}, f"protect is None, {SPAN}"),
    ({**ROW, "protect": "52"}, "and protect '52' (tokens 32 to 34) overlap, must share no token"),
    ({**ROW, "protect": "Ann's", "hard": [[0, 17]]}, 'protect "Ann\'s" (tokens 0 to 5) overlap'[:30]),
    ({**ROW, "target": "s code? It is"}, "must end before the prompt's last token (or give a question), at token 78"),
    ({**FULL, "target": "What"}, "target 'What' (tokens 54 to 58) must end before the question, at token 53"),
    ({**FULL, "hard": ["What"]}, "hard 'What' (tokens 54 to 58) must end before the question, at token 53"),
    ({**ROW, "question": "Who?"}, "question is 'Who?', must be the end of the text, with something before it"),
    ({**ROW, "question": TEXT}, "must be the end of the text, with something before it"),
    ({**ROW, "question": ""}, "question is '', must be a text that is not empty"),
    ({**ROW, "question": [3, 9]}, "question is [3, 9], must be a text that is not empty"),
    ({**ROW, "references": "52"}, "references is '52', must be a list of texts, none of them empty"),
    ({**ROW, "references": []}, "references is [], must be a list of texts, none of them empty"),
    ({**ROW, "references": ["52", " "]}, "references is ['52', ' '], must be a list of texts"),
    ({**ROW, "id": ""}, "id is '', must be a text or a whole number"),
    ({**ROW, "id": 1.5}, "id is 1.5, must be a text or a whole number"),
    ({**ROW, "id": True}, "id is True, must be a text or a whole number"),
]
BAD_TRACES = [
    (
        {**TRACE_ROW, "answer": "54"},
        "unknown field 'answer', allowed are text, target, mentions, rederive, hard, protect",
    ),
    (without(TRACE_ROW, "text"), "text is missing, must be a text that is not empty"),
    (without(TRACE_ROW, "target"), f"target is missing, {SPAN}, not empty"),
    (without(TRACE_ROW, "mentions"), "mentions is missing, must be a list of [start, stop, k]"),
    ({**TRACE_ROW, "mentions": []}, "mentions have k = [], must be at least 1, not go back, and reach 2 or more"),
    ({**TRACE_ROW, "mentions": "54"}, "mentions is '54', must be a list of [start, stop, k], all whole numbers"),
    ({**TRACE_ROW, "mentions": [[15, 17]]}, "mentions is [[15, 17]], must be a list of [start, stop, k], all whole"),
    ({**TRACE_ROW, "mentions": [[15, 17, 1.0]]}, "must be a list of [start, stop, k], all whole numbers"),
    ({**TRACE_ROW, "mentions": [[15, 17, True]]}, "must be a list of [start, stop, k], all whole numbers"),
    (
        {**TRACE_ROW, "mentions": [[15, 99, 1]]},
        "mentions: span 'mentions' is (15, 99), must have 0 <= start < stop <= 83",
    ),
    ({**TRACE_ROW, "mentions": [[15, 17, 1]]}, "mentions have k = [1], must be"),
    ({**TRACE_ROW, "mentions": [[15, 17, 2]]}, "with k = 2 must begin behind the target, which ends before token 17"),
    ({**TRACE_ROW, "rederive": [[19, 36]]}, "rederive 'Two by nine is 18' holds no mention, must hold one with k of"),
    ({**TRACE_ROW, "rederive": [41, 43]}, "rederive is [41, 43], must be a list of [start, stop], all whole numbers"),
    ({**TRACE_ROW, "rederive": [[43, 41]]}, "rederive: span 'rederive' is (43, 41), must have"),
    ({**TRACE_ROW, "protect": "54"}, "protect: span 'protect': '54' occurs 4 times in the text, must be exactly once"),
    ({**TRACE_ROW, "protect": [[0, 3]]}, "protect 'Six' (tokens 0 to 3) and target"),
    (
        {**TRACE_ROW, "hard": "again"},
        "hard 'again' (tokens 58 to 63) must end before the first later mention, at token 41",
    ),
    ({**TRACE_ROW, "text": TRACE * 7}, "the text has 581 tokens, the model reads at most 512"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ITEMS, ids=str)
def test_bad_items_name_file_line_and_field(file, model, row, message):
    path = file(ROW, row)
    shown = refused(user.items, path, model)
    assert shown.startswith(f"{str(path)!r}, line 2: ") and message in shown


@pytest.mark.parametrize(("row", "message"), BAD_TRACES, ids=str)
def test_bad_traces_name_file_line_and_field(file, model, row, message):
    path = file("", TRACE_ROW, row)
    shown = refused(user.traces, path, model)
    assert shown.startswith(f"{str(path)!r}, line 3: ") and message in shown


def test_bad_files(tmp_path, file, model):
    assert refused(user.items, file("", " "), model).endswith("is empty, must hold at least one JSON object a line")
    assert "No such file or directory; must be a file of JSON lines" in refused(user.items, tmp_path / "no", model)
    assert "must be a file of JSON lines" in refused(user.traces, tmp_path, model)
    assert "must be a file of JSON lines" in refused(user.traces, "a\0b", model)
    (tmp_path / "latin").write_bytes(b'{"text": "\xe9"}')
    assert "is not UTF-8" in refused(user.items, tmp_path / "latin", model)
    with pytest.raises(TaskError, match="path is 3, must be the path of a file of JSON lines"):
        user.items(3, model)


def test_two_lines_with_one_id(file, model):
    shown = refused(user.items, file({**ROW, "id": "1"}, {**ROW, "id": 1}), model)
    assert shown.endswith("line 2: id '1' is that of line 1, must be its own")


def test_a_byte_order_mark_and_line_separators_in_strings(tmp_path, model):
    path = tmp_path / "own.jsonl"
    path.write_text("\ufeff" + json.dumps({**ROW, "meta": "a\u2028b"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    (item,) = user.items(path, model)
    assert item.settings["meta"] == "a\u2028b"


def test_nothing_is_returned_if_a_later_line_is_bad(file, model):
    assert "line 3: answer is ''" in refused(user.items, file(ROW, {**ROW, "id": 2}, {**ROW, "answer": ""}), model)
