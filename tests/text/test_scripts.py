"""Needles in every script and tokenizers of every make: a span holds exactly the tokens that hold its characters."""

import unicodedata
from types import SimpleNamespace

import pytest
import tokenizers_of_all_makes as makes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvprobe.errors import PromptError
from kvprobe.prompts import Prompt, alignment

every_make = pytest.mark.parametrize("kind", makes.MAKES)
NEEDLES = {
    "Chinese": ("The keeper is 花子 and no one else.", "花子"),
    "Arabic": ("keeper: مرحبا بالعالم, she said", "مرحبا بالعالم"),
    "Devanagari": ("keeper: नमस्ते दुनिया, she said", "नमस्ते"),
    "Thai": ("keeper: สวัสดีชาวโลก, she said", "สวัสดี"),
    "accents on their own": ("keeper: e\u0301 o\u0308, she said", "e\u0301 o\u0308"),
    "joined emoji": ("keeper: 👩‍👩‍👧‍👦, she said", "👩‍👩‍👧‍👦"),
    "a flag": ("keeper: 🇩🇪, she said", "🇩🇪"),
    "a ligature": ("keeper: ﬁ and ①, she said", "ﬁ and ①"),
    "full width": ("keeper: Ｆｕｌｌ, she said", "Ｆｕｌｌ"),
    "a capital with a dot": ("keeper: İstanbul, she said", "İstanbul"),
    "behind a line end": ("one\r\nThe number is 4718.\r\n", "4718"),
}


def model(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer, max_length=None)


def visible(text):
    """A text without spaces and without what only joins or controls."""
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) not in ("Cc", "Cf"))


def forms(tokenizer, text):
    """A text as written, and as this tokenizer's normaliser writes it."""
    normaliser = tokenizer.backend_tokenizer.normalizer
    both = [text] + ([normaliser.normalize_str(text)] if normaliser is not None else [])
    return [visible(form).replace("▁", "") for form in both]


def overlapping(tokenizer, prompt, start, stop):
    """The span by its definition, from the offsets of the tokenizer itself, token by token."""
    offsets = tokenizer.backend_tokenizer.encode(prompt.text, add_special_tokens=False).offsets
    hit = [place for place, (first, last) in enumerate(offsets) if first < stop and last > start]
    return hit[0], hit[-1] + 1


@every_make
@pytest.mark.parametrize("name", NEEDLES)
def test_a_needle_is_the_tokens_that_hold_it(kind, name):
    tokenizer, (text, needle) = makes.make(kind), NEEDLES[name]
    at = text.index(needle)
    prompt = Prompt.from_text(model(tokenizer), text, {"x": needle, "same": (at, at + len(needle))})
    assert prompt["x"] == prompt["same"] == overlapping(tokenizer, prompt, at, at + len(needle))
    shown = visible(alignment.decode(tokenizer, prompt.ids[slice(*prompt["x"])].tolist()))
    assert any(form in shown for form in forms(tokenizer, needle))


@pytest.mark.parametrize("text", [text for text, _ in NEEDLES.values()])
def test_the_embedded_models_tokenizer(text, smol_tokenizer):
    for start in range(len(text)):
        for stop in (start + 1, min(start + 3, len(text))):
            prompt = Prompt.from_text(model(smol_tokenizer), text, {"x": (start, stop)})
            assert prompt["x"] == overlapping(smol_tokenizer, prompt, start, stop)
            assert text[start:stop] in alignment.decode(smol_tokenizer, prompt.ids[slice(*prompt["x"])].tolist())


CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd<▁"),
    st.sampled_from("e\u0301\u0308\u200d\ufe0f 👩😀🇩花नम\u0947สั\u0e31ﬁ①Ａß\r\n\t\0"),
)
TEXTS = st.lists(CHARACTERS, min_size=1, max_size=24).map("".join)


@every_make
@settings(deadline=None, max_examples=60, derandomize=True)
@given(text=TEXTS, ends=st.tuples(st.integers(0, 23), st.integers(1, 24)))
@example(text="é e\u0301 x", ends=(2, 4))
@example(text="👩\u200d👩", ends=(0, 3))
@example(text="\u0e2a\u0e31\u0e27", ends=(0, 2))
def test_any_text(kind, text, ends):
    """Found spans are the oracle's and show their characters; only makes that lose characters may refuse."""
    tokenizer = makes.make(kind)
    start = min(ends[0], len(text) - 1)
    stop = max(min(ends[1], len(text)), start + 1)
    try:
        prompt = Prompt.from_text(model(tokenizer), text, {"x": (start, stop)})
    except PromptError as error:
        assert "\n" not in str(error)
        assert kind not in makes.FAITHFUL or ("no tokens" in str(error) and not visible(text))
        return
    shown = visible(alignment.decode(tokenizer, prompt.ids[slice(*prompt["x"])].tolist()))
    wanted = [form for form in forms(tokenizer, text[start:stop])]
    whole = overlapping(tokenizer, prompt, start, stop)
    assert prompt["x"] == whole or kind == "byte fallback"  # where offsets of bytes are wrong, decoding decides
    covered = tokenizer.backend_tokenizer.encode(prompt.text, add_special_tokens=False).offsets[slice(*prompt["x"])]
    wider = forms(tokenizer, text[min(start, covered[0][0]) : max(stop, covered[-1][1])])
    assert any(form in shown for form in [*wanted, *wider])


@pytest.mark.parametrize("kind", makes.FAITHFUL)
@pytest.mark.parametrize("text", ["a\0b", "x\r\ny", "\t", "  ", " \n ", "e\u0301", "\u200d"])
def test_nothing_is_refused_by_makes_that_lose_nothing(kind, text):
    tokenizer = makes.make(kind)
    for start in range(len(text)):
        prompt = Prompt.from_text(model(tokenizer), text, {"x": (start, len(text))})
        assert text[start:].strip() in alignment.decode(tokenizer, prompt.ids[slice(*prompt["x"])].tolist())


def test_what_a_normaliser_drops_has_no_tokens():
    tokenizer = makes.make("wordpiece")
    with pytest.raises(PromptError, match=r"spans cannot be located|no tokens give back"):
        Prompt.from_text(model(tokenizer), "A b", {"x": (1, 2)})


def test_special_and_added_tokens_inside_a_text():
    tokenizer = makes.make("byte fallback").__class__(
        tokenizer_object=type(makes.make("byte").backend_tokenizer).from_str(makes.make("byte").backend_tokenizer.to_str()),
        bos_token="<s>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip
    tokenizer.add_tokens(["magicword", "花子"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|needle|>"]})
    text = "The magicword of 花子 is <|needle|>4718<|needle|>, </s> she said"
    spans = {"word": "magicword", "name": "花子", "number": "4718", "end": "</s>", "all": (0, len(text))}
    prompt = Prompt.from_text(model(tokenizer), text, spans)
    for name, wanted in {"word": "magicword", "name": "花子", "number": "4718", "end": "</s>", "all": text}.items():
        assert alignment.decode(tokenizer, prompt.ids[slice(*prompt[name])].tolist()) == wanted
    assert prompt["word"][1] - prompt["word"][0] == prompt["name"][1] - prompt["name"][0] == 1


def test_a_text_of_special_tokens_alone():
    tokenizer = makes.make("byte")
    prompt = Prompt.from_text(model(tokenizer), "</s><s>", {"first": "</s>", "second": "<s>"})
    assert prompt.ids.tolist() == tokenizer.convert_tokens_to_ids(["</s>", "<s>"])
    assert prompt["first"] == (0, 1) and prompt["second"] == (1, 2)


@every_make
@pytest.mark.parametrize("text", ["", "\ud83d alone", "half \udc00"])
def test_no_text_and_no_unicode(kind, text):
    with pytest.raises(PromptError, match=r"has no tokens|lone surrogate at character"):
        Prompt.from_text(model(makes.make(kind)), text)
