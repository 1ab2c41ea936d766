"""Documents: texts as prompts whose context is compressed and whose question follows."""

import re
from functools import cache
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tokenizer as byte_tokenizer

from kvprobe import resources
from kvprobe.errors import DataError, TaskError
from kvprobe.prompts import Prompt
from kvprobe.tasks.document import TEMPLATES, Document, documents
from kvprobe.tasks.sources import Text, read

CHAT = "{% for m in messages %}<s>{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
MULTI_NEWS = (
    "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
    "Now, write a one-page summary of all the news.\n\nSummary:"
)


class Chunks:
    """A slow tokenizer without offsets: every five characters are a token, across words and borders."""

    is_fast, chat_template, bos_token_id, size = False, None, None, 5

    def __call__(self, text, add_special_tokens=True, verbose=True):
        data = text.encode("ascii")
        return {"input_ids": [int.from_bytes(b"\1" + data[i : i + 5]) for i in range(0, len(data), 5)]}

    def decode(self, ids, **_):
        return b"".join(token.to_bytes(8).lstrip(b"\0")[1:] for token in ids).decode("ascii")


@cache
def byte_level():
    made = byte_tokenizer()
    made.chat_template = CHAT
    return made


def model(max_length=None, tokenizer=None):
    return SimpleNamespace(tokenizer=tokenizer or byte_level(), max_length=max_length)


def shown(document, start, stop, tokenizer=None):
    return (tokenizer or byte_level()).decode(document.prompt.ids[start:stop])


# Words with braces, percent signs and characters of several bytes, between whitespace of all kinds.
WORDS = st.lists(st.text(st.sampled_from("ab{}%éß漢🙂context"), min_size=1, max_size=6), min_size=1, max_size=30)
SPACES = st.lists(st.sampled_from([" ", "  ", "\n", "\n\n", "\t", " \n"]), min_size=31, max_size=31)
EDGES = st.sampled_from(["", " ", "\n"])
TEXTS = st.builds(
    lambda words, spaces, first, last: (
        first + "".join(chain(*zip(words, [*spaces[: len(words) - 1], last], strict=True)))
    ),
    WORDS,
    SPACES,
    EDGES,
    EDGES,
)
OWN = st.sampled_from(["multi_news", "none", "{context}?", "Read {this}: {context}", "a{context}%s {}", "{{context}}"])


# --- the prompt


def test_the_template_is_longbenchs():
    assert TEMPLATES == {"multi_news": MULTI_NEWS, "none": "{context}"}


@settings(deadline=None)
@given(TEXTS, OWN)
def test_the_prompt_is_the_template_with_the_text(text, template):
    (document,) = documents(model(), [text], template=template)
    whole = TEMPLATES.get(template, template)
    before, after = whole.split("{context}")
    assert document.prompt.text == whole.replace("{context}", text)
    assert shown(document, 0, None) == document.prompt.text
    assert shown(document, *document.prompt["context"]) == text
    assert shown(document, 0, document.context_stop) == before + text
    assert shown(document, document.context_stop, None) == after
    assert (document.name, document.truncated, document.texts) == ("text-0", False, 1)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab c\n"), min_size=1, max_size=40).filter(str.strip), OWN)
def test_a_token_that_straddles_the_border_belongs_to_the_context(text, template):
    (document,) = documents(model(tokenizer=Chunks()), [text], template=template)
    before, after = TEMPLATES.get(template, template).split("{context}")
    start, stop = len(before) // 5, -(-len(before + text) // 5)
    assert document.prompt["context"] == (start, stop) and document.context_stop == stop
    assert document.context_stop == len(document.prompt) or after


@settings(deadline=None)
@given(TEXTS, OWN)
def test_a_chat_message_has_the_same_parts(text, template):
    (document,) = documents(model(), [text], template=template, chat=True)
    before, after = TEMPLATES.get(template, template).split("{context}")
    message = (before + text + after).strip()
    assert document.prompt.text == f"<s>{message}</s><s>"
    assert shown(document, *document.prompt["context"]).strip() == text.strip()
    assert document.prompt["context"][1] == document.context_stop < len(document.prompt)
    assert shown(document, 0, document.context_stop).rstrip() == "<s>" + (before + text).strip()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("template", ["multi_news", "none"])
@pytest.mark.parametrize("length", [None, 650])
def test_with_the_embedded_models_tokenizer(smol_tokenizer, chat, template, length):
    options = {"chat": chat, "template": template, "length": length}
    found = documents(model(8192, smol_tokenizer), n=3, **options)
    before, after = TEMPLATES[template].split("{context}")
    for document, text in zip(found, read(), strict=False):
        ids = document.prompt.ids.tolist()
        assert ids == smol_tokenizer(document.prompt.text, add_special_tokens=not chat)["input_ids"]
        seen = shown(document, *document.prompt["context"], smol_tokenizer)
        head, tail = (
            shown(document, *part, smol_tokenizer)
            for part in ((0, document.context_stop), (document.context_stop, None))
        )
        assert head + tail == document.prompt.text and head.endswith(seen)
        assert document.truncated == (length is not None)
        words = len(seen.split())
        assert seen.split() == text.text.split()[:words] and (words == len(text.text.split())) != document.truncated
        assert after.strip() in tail and before in head
        if length is None:
            assert text.text.strip() in seen
            continue
        longer = " ".join(re.findall(r"\s*\S+", text.text)[words : words + 1])
        more = document.prompt.text.replace(seen.rstrip(), seen.rstrip() + longer)
        assert len(ids) <= length < len(smol_tokenizer(more, add_special_tokens=not chat)["input_ids"])


# --- lengths


def brute(tokenizer, template, text, length):
    """The longest piece that fits: all of the text, or the text up to the end of any word."""
    stops = [match.end() for match in re.finditer(r"\S+", text)] + [len(text)]
    pieces = [text[:stop] for stop in stops]
    return max(
        (piece for piece in pieces if len(tokenizer(template.replace("{context}", piece))["input_ids"]) <= length),
        key=len,
        default=None,
    )


@settings(max_examples=200, deadline=None)
@given(TEXTS, OWN, st.integers(1, 300), st.sampled_from([byte_level, Chunks]))
def test_texts_are_cut_behind_the_last_word_that_fits(text, template, length, make):
    tokenizer = make()
    text = text if make is byte_level else text.encode("ascii", "replace").decode()
    wanted = brute(tokenizer, TEMPLATES.get(template, template), text, length)
    if wanted is None:
        first = re.match(r"\s*\S+", text).group()
        smallest = len(tokenizer(TEMPLATES.get(template, template).replace("{context}", first))["input_ids"])
        message = f"text-0: at most {length} tokens hold no word of it, the smallest length is {smallest}"
        with pytest.raises(TaskError, match=f"^{message}$"):
            documents(model(None, tokenizer), [text], template=template, length=length)
        length, wanted = smallest, brute(tokenizer, TEMPLATES.get(template, template), text, smallest)
    (document,) = documents(model(None, tokenizer), [text], template=template, length=length)
    assert document.prompt.text == TEMPLATES.get(template, template).replace("{context}", wanted)
    assert document.truncated == (wanted != text) and len(document.prompt) <= length


def test_the_length_counts_the_chat_template_too():
    text = "word " * 50
    for length in range(20, 60):
        (document,) = documents(model(), [text], template="none", chat=True, length=length)
        assert length - 5 < len(document.prompt) <= length and document.truncated


def test_a_model_leaves_room_for_one_token():
    text = "word " * 400  # cut behind a word it has 4, 9, 14, … tokens
    assert len(documents(model(1000), [text], template="none")[0].prompt) == 999
    assert len(documents(model(999), [text], template="none")[0].prompt) == 994
    assert len(documents(model(999), [text], template="none", length=999)[0].prompt) == 999
    assert len(documents(model(), [text], template="none")[0].prompt) == 2000
    with pytest.raises(TaskError, match="length is 1001, the model reads at most 1000"):
        documents(model(1000), [text], length=1001)


def test_few_tokenisations():
    class Counted(Chunks):
        calls = 0

        def __call__(self, text, **options):
            self.calls += len(text) > 1  # not the look at special tokens
            return super().__call__(text, **options)

    for words, length in ((100_000, 5000), (6000, 5000), (100_000, 40)):
        tokenizer = Counted()
        documents(model(None, tokenizer), ["some words of it " * (words // 4)], length=length)
        assert tokenizer.calls <= 14


# --- how many, joined how


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_groups_are_disjoint_consecutive_and_cover(texts, join, data):
    groups = len(texts) // join
    if not groups:
        with pytest.raises(TaskError, match=f"join is {join}, must be at most the {len(texts)} texts there are"):
            documents(model(), texts, join=join)
        return
    n = data.draw(st.none() | st.integers(1, groups))
    found = documents(model(), texts, join=join, n=n, template="none")
    assert len(found) == len({document.name for document in found}) == (n or groups)
    for i, document in enumerate(found):
        members = texts[i * join : (i + 1) * join]
        wanted = members[0] if join == 1 else "\n\n".join(text.strip() for text in members)
        first, last = i * join, i * join + join - 1
        assert document.prompt.text == wanted and document.texts == join
        assert document.name == (f"text-{first}" if join == 1 else f"text-{first}..text-{last}")


def test_the_first_documents_and_no_more_than_there_are():
    every = documents(model())
    assert [document.name for document in every] == [text.name for text in read()]
    two = documents(model(), n=np.int64(2))
    assert [d.prompt.text for d in two] == [d.prompt.text for d in every[:2]]
    with pytest.raises(
        TaskError, match=f"n is {len(every) + 1}, must be at most the {len(every)} documents there are, or None"
    ):
        documents(model(), n=len(every) + 1)
    with pytest.raises(
        TaskError, match=f"n is {len(every)}, must be at most the {len(every) // 2} documents there are"
    ):
        documents(model(), n=len(every), join=2)


def test_texts_and_documents_by_hand(tmp_path):
    texts = [Text("a", "one two"), Text("b", "three")]
    found = documents(model(), tuple(texts), join=2)
    assert found[0].name == "a..b" and "News:\none two\n\nthree\n\nNow" in found[0].prompt.text
    both = [*found, *documents(model(), texts[:1])]
    assert documents(model(), both) == both and documents(model(3), both, n=1) == both[:1]
    (tmp_path / "mine.txt").write_text("four {five}\n")
    for source in (tmp_path, str(tmp_path / "mine.txt")):
        (document,) = documents(model(), source, template="none")
        assert (document.name, document.prompt.text) == ("mine", "four {five}\n")


def test_a_document_by_hand_is_checked():
    prompt = Prompt.from_ids([7, 5, 6, 8], attention_mask=[0, 1, 1, 1])
    assert Document("mine", prompt, 4).context_stop == 4
    for stop in (0, 1, 5):
        with pytest.raises(TaskError, match=f"context_stop is {stop}, must be from 2 to the prompt's 4 tokens"):
            Document("mine", prompt, stop)
    for stop in (1.0, "2", True, None):
        with pytest.raises(TaskError, match=f"context_stop is {stop!r}, must be a whole number"):
            Document("mine", prompt, stop)
    with pytest.raises(TaskError, match=r"prompt is \[5, 6\], must be a Prompt"):
        Document("mine", [5, 6], 1)


# --- mistakes

ONE = [Text("a", "one two three")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0, must be a whole number of at least 1 or None"),
        ({"n": True}, "n is True, must be a whole number"),
        ({"n": "3"}, "n is '3', must be a whole number"),
        ({"join": 0}, "join is 0, must be a whole number of at least 1"),
        ({"join": None}, "join is None, must be a whole number"),
        ({"length": 1.5}, "length is 1.5, must be a whole number of at least 1 or None"),
        ({"length": 0}, "length is 0, must be a whole number"),
        ({"length": False}, "length is False, must be a whole number"),
        ({"template": "multi_new"}, "template is 'multi_new', must be 'multi_news', 'none' or a text that holds"),
        ({"template": "{context} {context}"}, r"template is .* a text that holds \{context\} exactly once"),
        ({"template": "{ context }"}, r"template is .* a text that holds \{context\} exactly once"),
        ({"template": None}, "template is None, must be"),
        ({"template": ["none"]}, r"template is \['none'\], must be"),
        ({"chat": 1}, "chat is 1, must be True, False or the name"),
        ({"chat": None}, "chat is None, must be True, False or the name"),
        ({"chat": ""}, "chat is '', must be True, False or the name"),
        ({"chat": "tool"}, "document 'a': chat='tool' is not one of the tokenizer's templates"),
        ({"length": 3}, "a: at most 3 tokens hold no word of it, the smallest length is 144"),
    ],
)
def test_settings_that_are_not_allowed(options, message):
    with pytest.raises(TaskError, match=f"^{message}") as caught:
        documents(model(), ONE, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "source is 3, must be None, a folder"),
        (b"text", "source is b'text', must be None, a folder"),
        ({"a": "text"}, "source is .* or a list of texts or of Documents"),
        (ONE[0], "source is Text.* must be None, a folder"),
        ([], r"source is \[\], must be a list of only str, only Text or only Document, not empty"),
        (["a", ONE[0]], "source is .* must be a list of only str"),
        (["a", 3], "source is .* must be a list of only str"),
        ([None], "source is .* must be a list of only str"),
        (["a", ""], "text-1 is '', must be a text that is not empty"),
        (["a", " \n"], r"text-1 is ' \\n', must be a text that is not empty"),
        ([Text("a", "")], "a is '', must be a text that is not empty"),
        ([Text("a", None)], "a is None, must be a text that is not empty"),
        ([Text("a", "x"), Text("a", "y")], "source has the name 'a', must be names .* no two are the same"),
        ([Text(3, "x")], "source has the name 3, must be names"),
        (["fine", "lone \ud800"], "document 'text-1': the text holds a lone surrogate"),
    ],
)
def test_sources_that_are_not_allowed(source, message):
    with pytest.raises(TaskError, match=f"^{message}") as caught:
        documents(model(), source)
    assert "\n" not in str(caught.value)


def test_documents_take_no_settings_and_no_company():
    made = documents(model(), ONE)
    for options in ({"length": 9}, {"join": 2}, {"template": "none"}, {"chat": True}):
        with pytest.raises(
            TaskError, match="source is made of Documents: length, join, template and chat must be left"
        ):
            documents(model(), made, **options)
    for more in (ONE, ["text"], made):  # the last: the same name twice
        with pytest.raises(TaskError, match=r"source (is|has)"):
            documents(model(), [*made, *more])
    with pytest.raises(TaskError, match="n is 2, must be at most the 1 documents there are"):
        documents(model(), made, n=2)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.txt file"):
        documents(model(), tmp_path)
    with pytest.raises(DataError, match="there is no file or folder 'nowhere'"):
        documents(model(), "nowhere")
    assert resources.path("essays").is_dir()
