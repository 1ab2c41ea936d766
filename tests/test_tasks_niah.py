"""RULER's needle tasks: protocol, lengths, spans, answers."""

import json
import random
import re
import subprocess
import sys
import uuid
from functools import cache
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvprobe import resources, tasks
from kvprobe.errors import TaskError
from kvprobe.tasks import niah
from kvprobe.tasks.building import Builder
from kvprobe.tasks.haystacks import NOISE, documents
from kvprobe.tasks.options import resolve
from kvprobe.tasks.planting import DEPTHS

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
#: The definitions: haystack, keys, values, needles k / values v / queries q.
DEFINITION = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", None, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", None, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
NAMES = list(DEFINITION)
COMPLETE = {"needles", "values", "queries", "decoys", "distractors", "distractor", "template", "haystack", "path"}
COMPLETE |= {"depths", "balance", "tokens_to_generate", "protocol", "units", "unit", "tokens", "chat", "keys"}
ESSAYS = [name for name in NAMES if DEFINITION[name][0] == "essay"]
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S[^:]*?) is: ([0-9a-f-]+)\.")
VALUE = {
    "numbers": re.compile(r"[1-9]\d{6}"),
    "uuids": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
}


@cache
def trained():
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    texts = [path.read_text() for path in sorted(resources.path("essays").glob("*.txt"))]
    texts += [resources.path("tasks", "decoys.txt").read_text(), *(part for part in niah.PLURAL + niah.SINGULAR)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=3000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    return raw.to_str()


def byte_level(first="<s> ", last=""):
    raw = Tokenizer.from_str(trained())
    special = [("<s>", 0), ("</s>", 1)]
    raw.post_processor = processors.Sequence(
        [processors.TemplateProcessing(single=f"{first}$A{last}", special_tokens=special)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = CHAT
    return wrapped


class Bytes:
    """A slow tokenizer without offsets; a token is up to ``size`` bytes, across words and borders."""

    is_fast, chat_template, bos_token_id = False, None, None

    def __init__(self, size):
        self.size = size

    def __call__(self, text, add_special_tokens=True, verbose=True):
        data = text.encode()
        return {"input_ids": [int.from_bytes(b"\1" + data[i : i + self.size]) for i in range(0, len(data), self.size)]}

    def decode(self, ids, **_):
        return b"".join(token.to_bytes(8).lstrip(b"\0")[1:] for token in ids).decode(errors="replace")


def model(tokenizer, max_length=8192):
    return SimpleNamespace(tokenizer=tokenizer, max_length=max_length)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


@pytest.fixture(scope="module")
def made(tokenizer):
    """An item by task, made once."""

    @cache
    def one(name, length=1500, seed=0, **options):
        return tasks.make(name, model(tokenizer), length=length, seed=seed, **{"distractors": "max", **options})

    return one


def shown(tokenizer, item, span):
    return tokenizer.decode(item.prompt.ids[slice(*span)])


def parts(item):
    """Instruction, context, question and beginning of the answer, cut by the text alone."""
    instruction, rest = item.prompt.text.split("\n", 1)
    context, last = rest.rsplit("\n", 1)
    question, prefix = last.split("?", 1)
    return instruction, context, question + "?", prefix


def hidden(item):
    """(kind, key, value) of every needle in the context, in order."""
    return NEEDLE.findall(parts(item)[1])


# --- the registry


def test_names_and_unknown_names(tokenizer):
    assert tasks.names() == NAMES
    with pytest.raises(TaskError) as caught:
        tasks.make("niah_multikey_4", model(tokenizer), length=500, seed=0)
    assert str(caught.value) == f"no task 'niah_multikey_4', must be one of {', '.join(NAMES)}"
    with pytest.raises(TaskError, match="no needle task 'vt'"):
        niah.make("vt", model(tokenizer), length=500, seed=0)


def test_another_family_is_one_more_name(monkeypatch):
    family = SimpleNamespace(TASKS=("vt",), make=lambda name, model, **options: (name, options))
    monkeypatch.setitem(sys.modules, "kvprobe.tasks.tracing", family)
    monkeypatch.setattr(tasks, "FAMILIES", (*tasks.FAMILIES, "tracing"))
    assert tasks.names() == [*NAMES, "vt"]
    assert tasks.make("vt", None, length=9, seed=1, hops=4) == ("vt", {"length": 9, "seed": 1, "hops": 4})


# --- the protocol


@pytest.mark.parametrize("name", NAMES)
def test_the_definition(made, name):
    item, (_, key_kind, kind, k, v, q) = made(name), DEFINITION[name]
    instruction, context, question, prefix = parts(item)
    needles = hidden(item)
    keys, values = [key for _, key, _ in needles], [value for _, _, value in needles]
    asked = list(dict.fromkeys(key for _, key, value in needles if value in item.references))
    assert {label for label, *_ in needles} == {kind}
    assert all(VALUE[kind].fullmatch(value) for value in values) and len(set(values)) == len(values)
    assert len(set(keys)) == (len(needles) if k is None else k)
    assert len(needles) == len(context.split("\n")) if k is None else len(needles) == k * v
    assert len(item.references) == q * v == len(item.spans["evidence"]) and len(asked) == q
    if key_kind == "uuids":
        assert all(VALUE["uuids"].fullmatch(key) for key in keys)
    else:
        assert all("-" in key and not key[0].isdigit() for key in keys)
    several = q * v > 1
    query = ", ".join(item.settings["keys"][:-1]) + ", and " + item.settings["keys"][-1] if q > 1 else keys and asked[0]
    if several:
        assert instruction == (
            f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards."
        )
        assert question == f"What are all the special magic {kind} for {query} mentioned in the provided text?"
        assert prefix == f" The special magic {kind} for {query} mentioned in the provided text are"
    else:
        one = kind[:-1]
        assert instruction == (
            f"A special magic {one} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {one} afterwards."
        )
        assert question == f"What is the special magic {one} for {query} mentioned in the provided text?"
        assert prefix == f" The special magic {one} for {query} mentioned in the provided text is"


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_lines_are_noise_or_needles(made, name):
    lines = parts(made(name))[1].split("\n")
    noise = [line for line in lines if not NEEDLE.fullmatch(line)]
    assert len(noise) == (len(lines) - 1 if name == "niah_single_1" else 0) and set(noise) <= {NOISE}


@pytest.mark.parametrize("name", ESSAYS)
def test_essays_around_the_needles_are_whole(made, name):
    item = made(name, decoys=3)
    rest = parts(item)[1]
    for wanted in [*(found.group() for found in NEEDLE.finditer(rest)), *_decoy_lines()]:
        rest = rest.replace(wanted, "")
    text = " ".join(rest.split())
    assert len(text.split()) == item.settings["units"]
    whole = [" ".join(document) for document in documents()]
    assert any(document.startswith(text) or text.startswith(document) for document in whole)


def _decoy_lines():
    return [line for line in resources.path("tasks", "decoys.txt").read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("name", ESSAYS)
def test_depths_are_drawn_from_the_grid_without_replacement(made, name):
    depths = made(name, decoys=4).settings["depths"]
    drawn = depths["evidence"] + depths["hard"] + depths["decoy"]
    assert set(drawn) <= set(DEPTHS) and len(set(drawn)) == len(drawn)


def test_positions_vary_over_the_text(tokenizer):
    for name in ("niah_single_1", "niah_single_2", "niah_multikey_2"):
        items = [tasks.make(name, model(tokenizer), length=700, seed=seed, distractors=0) for seed in range(25)]
        places = [item.settings["depths"]["evidence"][0] for item in items]
        assert min(places) < 25 and max(places) > 75 and len(set(places)) > 8


@pytest.mark.parametrize("name", NAMES)
def test_criticalkv_asks_in_the_plural(made, name):
    instruction, _, question, prefix = parts(made(name, template="criticalkv"))
    assert instruction.startswith("Some special magic ") and question.startswith("What are all the special magic ")
    assert prefix.endswith(" mentioned in the provided text are")
    assert made(name, template="criticalkv").settings["protocol"] == "CriticalKV"


# --- lengths


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_within_one_unit(tokenizer, name, chat):
    for length in (900, 1337, 3000, 8192):
        for generate in (128, 40):
            options = {"distractors": 0, "chat": chat, "tokens_to_generate": generate}
            item = tasks.make(name, model(tokenizer), length=length, seed=length, **options)
            ids = tokenizer(item.prompt.text, add_special_tokens=not chat)["input_ids"]
            assert item.prompt.ids.tolist() == ids and len(ids) == item.settings["tokens"]
            assert len(ids) + generate <= length and item.length == length
            plan = niah.plan(name, resolve(name, niah.TASKS[name], options), length)
            more = Builder(plan, tokenizer).count(item.settings["units"] + 1)
            assert length < more + generate


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"distractors": 0, "decoys": 2}, {"distractors": 6}], ids=str)
def test_the_smallest_length_is_exact(tokenizer, name, options):
    if DEFINITION[name][0] == "needle":
        options = {**options, "distractors": 0}
    for seed in (0, 1):

        def make(length, seed=seed):
            return tasks.make(name, model(tokenizer), length=length, seed=seed, **options)

        with pytest.raises(TaskError, match=rf"too small for {name}: the smallest length that works is \d+") as caught:
            make(20)
        smallest = int(re.search(r"works is (\d+)", str(caught.value)).group(1))
        assert len(make(smallest).prompt) + 128 == smallest
        for length in (smallest - 1, smallest - 2, smallest - 7, smallest // 2):
            with pytest.raises(TaskError, match=rf"length {length} .* works is {smallest}"):
                make(length)


def test_lengths_beyond_the_model(tokenizer):
    with pytest.raises(TaskError, match="length is 4001, the model reads at most 4000"):
        tasks.make("niah_single_2", model(tokenizer, 4000), length=4001, seed=0)
    with pytest.raises(TaskError, match=r"works is \d+ \(the model reads at most 300\)"):
        tasks.make("niah_single_2", model(tokenizer, 300), length=300, seed=0)
    assert tasks.make("niah_single_2", model(tokenizer, None), length=9000, seed=0).length == 9000


def test_a_text_that_is_used_up_begins_again(tokenizer):
    item = tasks.make("niah_single_2", model(tokenizer, None), length=40_000, seed=0)
    assert item.settings["repeated"] and item.settings["units"] > item.settings["haystack_words"]
    assert not tasks.make("niah_single_2", model(tokenizer), length=2000, seed=0).settings["repeated"]


@pytest.mark.parametrize(
    ("name", "value"), [("length", 1.5), ("length", "900"), ("length", 0), ("length", True), ("seed", "a")]
)
def test_length_and_seed_are_whole_numbers(tokenizer, name, value):
    with pytest.raises(TaskError, match=f"{name} is {value!r}, must be a whole number"):
        tasks.make("niah_single_1", model(tokenizer), **{"length": 900, "seed": 0, name: value})
    same = tasks.make("niah_single_1", model(tokenizer), length=np.int64(900), seed=np.int64(0))
    assert json.dumps([same.length, same.seed]) == "[900, 0]"


# --- spans


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_spans_show_what_they_are(tokenizer, made, name, chat):
    item = made(name, length=2000, decoys=3, chat=chat)
    text = item.prompt.text
    evidence = [shown(tokenizer, item, span) for span in item.spans["evidence"]]
    hard = [shown(tokenizer, item, span) for span in item.spans["hard"]]
    decoy = [shown(tokenizer, item, span).strip() for span in item.spans["decoy"]]
    for quoted, value in zip(evidence, item.references, strict=True):
        ((_, key, found),) = NEEDLE.findall(quoted)
        assert found == value and key in item.settings["keys"] and quoted.strip().startswith("One of the")
    needles = NEEDLE.findall(text)
    assert sorted(NEEDLE.findall(" ".join([*evidence, *hard]))) == sorted(needles)
    assert all(not set(item.references) & set(re.findall(r"[0-9a-f-]{7,}", quoted)) for quoted in hard)
    assert len(decoy) == len(set(decoy)) == 3 and set(decoy) <= set(_decoy_lines())
    for span in item.spans["distractor"]:
        quoted = shown(tokenizer, item, span)
        assert quoted in text and not any(value in quoted for _, _, value in needles) and "magic" not in quoted
    assert list(item.spans) == ["evidence", "hard", "decoy", "distractor"]
    assert all(item.spans[label] == sorted(item.spans[label]) for label in ("hard", "decoy", "distractor"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("distractor", ["sentence", "window"])
def test_all_spans_are_disjoint_and_inside_the_context(made, name, distractor):
    item = made(name, distractor=distractor, decoys=2)
    spans = sorted(span for label in item.spans.values() for span in label)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    start, stop = item.prompt["context"]
    assert start <= spans[0][0] and spans[-1][1] <= stop <= item.context_stop == item.prompt["question"][0]


def test_spans_share_no_token_where_tokens_cross_words():
    for size, distractor in ((5, "sentence"), (7, "sentence"), (7, "window")):
        options = {"distractors": "max", "distractor": distractor, "decoys": 2}
        item = tasks.make("niah_multikey_1", model(Bytes(size)), length=1500, seed=0, **options)
        spans = sorted(span for label in item.spans.values() for span in label)
        assert len(item.spans["distractor"]) > 10 and all(a[1] <= b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("name", NAMES)
def test_context_and_question_meet_at_context_stop(tokenizer, made, name):
    item = made(name)
    instruction, context, question, prefix = parts(item)
    assert tokenizer.decode(item.prompt.ids[: item.context_stop]) == f"<s>{instruction}\n{context}\n"
    assert tokenizer.decode(item.prompt.ids[item.context_stop :]) == question + prefix
    assert shown(tokenizer, item, item.prompt["context"]).strip() == context


@pytest.mark.parametrize("name", [name for name in NAMES if DEFINITION[name][0] != "needle"])
def test_distractors_are_as_long_as_the_evidence(tokenizer, name):
    for distractor in ("sentence", "window"):
        item = tasks.make(name, model(tokenizer), length=3000, seed=1, distractor=distractor)
        sizes = [stop - start for start, stop in item.spans["evidence"]]
        assert len(item.spans["distractor"]) == item.settings["distractors"] == 20
        assert item.settings["distractor_tokens"] == round(np.mean(sizes))
        wanted = item.settings["distractor_tokens"]
        for start, stop in item.spans["distractor"]:
            assert 10 * abs(stop - start - wanted) <= wanted
            assert distractor == "sentence" or stop - start == wanted


@pytest.mark.parametrize("name", ESSAYS)
def test_sentence_distractors_begin_with_a_sentence(tokenizer, made, name):
    item = made(name)
    starts = {sentence for document in documents() for sentence in document}
    for start, stop in item.spans["distractor"]:
        quoted = shown(tokenizer, item, (start, stop)).strip()
        assert any(s.startswith(quoted) or quoted.startswith(s) for s in starts)


def test_kinds_of_distractors_by_haystack(made):
    assert made("niah_single_1").settings["distractor"] == "window"
    assert made("niah_single_2").settings["distractor"] == "sentence"
    assert made("niah_single_2", haystack="noise").settings["distractor"] == "window"


def test_positions_of_distractors_are_balanced(tokenizer):
    item = tasks.make("niah_single_2", model(tokenizer), length=4000, seed=0, depth=50)
    ((start, _),) = item.spans["evidence"]
    before = sum(span[0] < start for span in item.spans["distractor"])
    assert before == 10 and item.settings["balance"]["position_auroc"] == 0.5
    assert abs(item.settings["balance"]["evidence_depth"] - item.settings["balance"]["distractor_depth"]) < 5


def test_too_few_distractors(tokenizer):
    with pytest.raises(TaskError) as caught:
        tasks.make("niah_single_2", model(tokenizer), length=600, seed=0)
    found = re.fullmatch(
        r"length 600 holds (\d+) of the 20 distractors asked for: the smallest longer length that works is (\d+); "
        r"or ask for distractors=\1 or 'max'",
        str(caught.value),
    )
    fit, longer = int(found.group(1)), int(found.group(2))
    assert 0 < fit < 20
    assert len(tasks.make("niah_single_2", model(tokenizer), length=longer, seed=0).spans["distractor"]) == 20
    for wish in (fit, "max"):
        item = tasks.make("niah_single_2", model(tokenizer), length=600, seed=0, distractors=wish)
        assert len(item.spans["distractor"]) == fit
    with pytest.raises(TaskError):
        tasks.make("niah_single_2", model(tokenizer), length=600, seed=0, distractors=fit + 1)


def test_no_distractors_among_needles(tokenizer, made):
    item = tasks.make("niah_multikey_2", model(tokenizer), length=900, seed=0)
    assert item.spans["distractor"] == [] == made("niah_multikey_2").spans["distractor"]
    assert len(item.spans["hard"]) == item.settings["units"] > 5
    with pytest.raises(TaskError, match="distractors=5: 0 fit a haystack of needles; compare with the hard ones"):
        tasks.make("niah_multikey_2", model(tokenizer), length=900, seed=0, distractors=5)


# --- answers


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_answers_continue_the_prompt(tokenizer, made, name, chat):
    item = made(name, chat=chat)
    whole = tokenizer(item.prompt.text + item.answer, add_special_tokens=not chat)["input_ids"]
    assert item.prompt.ids.tolist() + list(item.answer_ids) == whole and len(item.answer_ids) > 0
    assert item.settings["answer_border"] == "exact"
    refs = item.references
    assert item.answer == (f" {refs[0]}" if len(refs) == 1 else f" {', '.join(refs[:-1])}, and {refs[-1]}")
    assert tasks.scoring.string_match_all(item.answer, refs) == 1.0
    end = parts(item)[3] if not chat else item.prompt.text.rsplit("<|assistant|>\n", 1)[1]
    assert item.prompt.text.endswith(end) and not any(value in end for value in refs)


def test_values_of_one_key_are_in_the_order_of_the_text(made):
    for seed in range(4):
        item = made("niah_multivalue", seed=seed)
        assert [value for _, _, value in hidden(item)] == list(item.references)
        assert item.spans["evidence"] == sorted(item.spans["evidence"])


def test_values_of_several_keys_are_in_the_order_of_the_question(made):
    unsorted = 0
    for seed in range(4):
        item = made("niah_multiquery", seed=seed)
        value = {key: value for _, key, value in hidden(item)}
        assert [value[key] for key in item.settings["keys"]] == list(item.references)
        unsorted += item.spans["evidence"] != sorted(item.spans["evidence"])
    assert unsorted


def test_a_tokenizer_that_joins_prompt_and_answer():
    separate = 0
    for size in (5, 7):
        joining = Bytes(size)
        item = tasks.make("niah_multikey_1", model(joining), length=900, seed=0, distractors=0)
        assert joining.decode(item.answer_ids) == item.answer
        whole = joining(item.prompt.text + item.answer)["input_ids"]
        exact = whole[: len(item.prompt)] == item.prompt.ids.tolist()
        assert item.settings["answer_border"] == ("exact" if exact else "separate")
        separate += not exact
        for span, value in zip(item.spans["evidence"], item.references, strict=True):
            assert value in joining.decode(item.prompt.ids[slice(*span)].tolist())
    assert separate


def test_a_tokenizer_that_closes_every_text():
    with pytest.raises(TaskError, match="the tokenizer ends every text with '</s>', so no answer can follow"):
        tasks.make("niah_single_1", model(byte_level(last=" </s>")), length=900, seed=0, distractors=0)


def test_the_answer_begins_in_the_assistants_turn(tokenizer, made):
    item = made("niah_single_2", chat=True)
    assert item.prompt.text.startswith("<|user|>\nA special magic number is hidden")
    assert re.search(r"text\?</s>\n<\|assistant\|>\n The special magic number for .* text is$", item.prompt.text)
    assert item.prompt.ids.tolist().count(tokenizer.bos_token_id) == 0
    assert made("niah_single_2").prompt.ids[0] == tokenizer.bos_token_id


# --- options


def test_numbers_of_needles(made):
    item = made("niah_multikey_1", needles=9, values=2, queries=2)
    assert len(hidden(item)) == 18 and len(item.references) == 4 and len(item.spans["hard"]) == 14
    assert len(made("niah_multiquery", queries=6).references) == 6  # as many keys as are asked for
    assert parts(item)[0].startswith("Some special magic numbers")


def test_needles_stay_when_other_options_change(made):
    plain, base = made("niah_multikey_1"), hidden(made("niah_multikey_1"))
    for options in ({"decoys": 4}, {"length": 3000}, {"template": "criticalkv"}, {"distractors": 3}, {"chat": True}):
        other = made("niah_multikey_1", **options)
        assert NEEDLE.findall(other.prompt.text) == base
        assert other.settings["depths"]["evidence"] == plain.settings["depths"]["evidence"]
        assert other.references == plain.references


def test_depth_of_the_needle(made):
    for depth, where in ((0, 0.0), (50, 0.5), (100, 1.0)):
        for name in ("niah_single_1", "niah_single_2", "niah_multikey_1"):
            item = made(name, depth=depth, length=3000, decoys=2)
            start, stop = item.prompt["context"]
            ((at, end),) = item.spans["evidence"]
            assert abs((at - start if where < 1 else end - start) / (stop - start) - where) < 0.06
            assert item.settings["depths"]["evidence"] == [depth]


def test_depths_of_all_needles(made):
    item = made("niah_multikey_1", depths=(90, 10.5, 50, 30))
    assert item.settings["depths"]["evidence"] == [90.0] and item.settings["depths"]["hard"] == [10.5, 30.0, 50.0]
    assert item.spans["evidence"][0] > item.spans["hard"][-1]
    several = made("niah_multivalue", depths=(90, 10, 50, 30))
    assert several.settings["depths"]["evidence"] == [10.0, 30.0, 50.0, 90.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needle": 3}, "niah_multikey_1 has no option 'needle', must be one of needles, values, queries, decoys"),
        ({"needles": 0}, "needles is 0, must be a whole number of at least 1"),
        ({"values": 1.5}, "values is 1.5, must be a whole number of at least 1"),
        ({"queries": True}, "queries is True, must be a whole number of at least 1"),
        ({"queries": 3, "needles": 2}, "queries is 3, must be at most the 2 needles"),
        ({"decoys": -1}, "decoys is -1, must be a whole number of at least 0"),
        ({"decoys": 33, "needles": 1}, "decoys is 33, must be at most 32"),
        ({"needles": 30, "decoys": 11}, "41 needles and decoys, must be at most 40 (one a depth)"),
        ({"distractors": "all"}, "distractors is 'all', must be a whole number of at least 0 or 'max'"),
        ({"distractor": "word"}, "distractor is 'word', must be 'sentence' or 'window'"),
        ({"template": "plain"}, "template is 'plain', must be 'ruler' or 'criticalkv'"),
        ({"haystack": "wiki"}, "haystack is 'wiki', must be 'noise' or 'essay' or 'needle'"),
        ({"haystack": "noise", "path": "x"}, "path='x' is for haystack='essay', not 'noise'"),
        ({"path": "/nowhere/at/all"}, "no text in '/nowhere/at/all'"),
        ({"haystack": "needle", "needles": 3}, "needles=3: the haystack of niah_multikey_1 is needles"),
        ({"tokens_to_generate": -1}, "tokens_to_generate is -1, must be a whole number of at least 0"),
        ({"depth": 101}, "depth is 101, must be a number from 0 to 100 (per cent)"),
        ({"depth": "deep"}, "depth is 'deep', must be a number from 0 to 100 (per cent)"),
        ({"depth": 5, "queries": 2}, "depth=5 is for one needle asked for: give depths (a list of 4)"),
        ({"depth": 5, "depths": [1, 2, 3, 4]}, "depth=5 is for one needle asked for"),
        ({"depths": [1, 2]}, "depths is [1, 2], must be 4 numbers, one a needle"),
        ({"depths": [1, 2, 3, -4]}, "depth is -4, must be a number from 0 to 100 (per cent)"),
    ],
    ids=str,
)
def test_bad_options_are_quoted(tokenizer, options, message):
    with pytest.raises(TaskError) as caught:
        tasks.make("niah_multikey_1", model(tokenizer), length=1500, seed=0, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_users_own_text(tokenizer, tmp_path):
    (tmp_path / "one.txt").write_text(
        " ".join(f"The goose number {i} crossed the old bridge slowly." for i in range(90))
    )
    item = tasks.make("niah_single_2", model(tokenizer), length=900, seed=0, path=tmp_path, distractors="max")
    assert "goose" in parts(item)[1] and item.settings["path"] == str(tmp_path)
    noise = tasks.make("niah_single_1", model(tokenizer), length=900, seed=0, path=tmp_path, distractors=0)
    assert noise.settings["haystack"] == "essay" and NOISE not in noise.prompt.text


def test_settings_are_complete_and_json_ready(made):
    for name in NAMES:
        settings = made(name, decoys=1).settings
        assert json.loads(json.dumps(settings)) == settings
        assert set(settings) >= COMPLETE


# --- determinism


def test_the_same_seed_gives_the_same_item(tokenizer):
    random.seed(1)
    state, numpy_state = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    for name in NAMES:
        one, two = (
            tasks.make(name, model(tokenizer), length=1200, seed=5, distractors="max", decoys=2) for _ in range(2)
        )
        assert one.prompt.ids.tolist() == two.prompt.ids.tolist() and one.spans == two.spans
        assert one.settings == two.settings and one.answer_ids == two.answer_ids
        random.random()
    random.seed(1)
    tasks.make("niah_single_2", model(tokenizer), length=1200, seed=5)
    assert random.getstate() == state and (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


def test_seeds_and_tasks_differ(tokenizer):
    cases = [(name, seed) for name in NAMES for seed in range(3)]
    items = [tasks.make(name, model(tokenizer), length=900, seed=seed, distractors=0) for name, seed in cases]
    assert all(not set(a.references) & set(b.references) for a, b in combinations(items, 2))


def test_draws_are_the_same_everywhere():
    # Values that were drawn when this was written: another machine, Python or hash seed must draw them, too.
    code = (
        "from kvprobe.tasks import niah, options as o; "
        "p = niah.plan('niah_multikey_3', o.resolve('niah_multikey_3', niah.TASKS['niah_multikey_3'], {}), 42); "
        "print(p.planting.pieces[0].value, p.planting.places(1000)[0])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "3b2efc3a-492b-418b-b075-113e423498ff [267]"
    assert uuid.UUID(result.stdout.split()[0]).version == 4


# --- the embedded model's tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_with_the_embedded_models_tokenizer(smol_tokenizer, name):
    for chat in (False, True):
        item = tasks.make(name, model(smol_tokenizer), length=1500, seed=3, decoys=4, distractors="max", chat=chat)
        whole = smol_tokenizer(item.prompt.text + item.answer)["input_ids"]
        assert item.prompt.ids.tolist() + list(item.answer_ids) == whole
        for span, value in zip(item.spans["evidence"], item.references, strict=True):
            assert value in shown(smol_tokenizer, item, span)


def test_decoys_are_about_as_long_as_needles(smol_tokenizer):
    def size(text):
        return len(smol_tokenizer(" " + text)["input_ids"])

    needle = size("One of the special magic numbers for quiet-meadow is: 1234567.")
    sizes = [size(line) for line in _decoy_lines()]
    assert len(sizes) >= 24 and abs(np.mean(sizes) - needle) < 0.1 * needle
    assert all(0.75 * needle < n < 1.25 * needle for n in sizes)
