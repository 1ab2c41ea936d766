"""Prompts: BOS and chat policy, and spans that are exactly the tokens whose characters overlap the text."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import kvprobe.prompts.alignment as alignment
from kvprobe import resources
from kvprobe.errors import PromptError
from kvprobe.prompts import Prompt

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRIPPING = CHAT.replace("m.content", "m.content | trim")


def corpus():
    return [path.read_text() for path in sorted(resources.path("essays").glob("*.txt"))]


@cache
def trained(kind):
    """A small tokenizer of a common make, trained on the shipped essays."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "wordpiece":  # lower case, no spaces in its tokens
        raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
        raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        raw.decoder = decoders.WordPiece(cleanup=False)
        raw.train_from_iterator(corpus(), trainers.WordPieceTrainer(vocab_size=900, special_tokens=special))
    elif kind == "metaspace":  # sentencepiece's spaces; its decoder drops the first one
        raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        raw.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=1200, special_tokens=special))
    else:  # byte-level
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        # The Chinese line makes merges across character borders.
        texts = [*corpus(), "你好世界你好世界 " * 50]
        raw.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=1200, special_tokens=special, initial_alphabet=alphabet)
        )
    return raw.to_str()


def fast(kind="byte", *, adds_bos=False, adds_eos=False, bos="<s>", chat=CHAT, nfc=False):
    raw = Tokenizer.from_str(trained(kind))
    if nfc:
        raw.normalizer = normalizers.NFC()
    if adds_bos or adds_eos:
        parts = [*(["<s>"] * adds_bos), "$A", *(["</s>"] * adds_eos)]
        special = [(name, raw.token_to_id(name)) for name in ("<s>", "</s>")]
        raw.post_processor = processors.Sequence(
            [processors.TemplateProcessing(single=" ".join(parts), special_tokens=special)]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token="</s>", unk_token="<unk>")
    wrapped.chat_template = chat
    return wrapped


class Chunks:
    """A slow tokenizer without offsets: every token is up to three bytes, whatever characters they belong to."""

    is_fast, chat_template, bos_token, bos_token_id = False, None, "", 0

    def __init__(self, size=3, empty_every=0):
        self.size, self.empty_every = size, empty_every

    def __call__(self, text, add_special_tokens=True, verbose=True):
        data = text.encode()
        ids = [int.from_bytes(b"\1" + data[i : i + self.size]) for i in range(0, len(data), self.size)]
        if self.empty_every:  # a token that shows nothing before each of the others
            ids = [token for pair in zip([1] * len(ids), ids, strict=True) for token in pair]
        return {"input_ids": [0] * add_special_tokens + ids}

    def decode(self, ids, **_):
        return b"".join(token.to_bytes(8).lstrip(b"\0")[1:] for token in ids).decode(errors="replace")

    def __len__(self):
        return 2 << 24


class Lying:
    """A fast tokenizer with wrong offsets."""

    def __init__(self, tokenizer, lie):
        self.tokenizer, self.lie = tokenizer, lie

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **options):
        found = dict(self.tokenizer(text, **options))
        if "offset_mapping" in found:
            found["offset_mapping"] = [self.lie(*pair) for pair in found["offset_mapping"]]
        return found


def model(tokenizer, max_length=None):
    return SimpleNamespace(tokenizer=tokenizer, max_length=max_length)


@pytest.fixture(scope="module")
def tokenizer():
    return fast(adds_bos=True)


def decoded(tokenizer, prompt, name):
    return alignment.decode(tokenizer, prompt.ids[slice(*prompt[name])].tolist())


def byte_spans(sizes, text, start, stop):
    """The span by its definition: tokens that share a byte with the characters, from the bytes of every token."""
    low, high = len(text[:start].encode()), len(text[:stop].encode())
    ends = np.cumsum(sizes)
    inside = np.flatnonzero((ends > low) & (ends - sizes < high) & (np.array(sizes) > 0))
    return int(inside[0]), int(inside[-1]) + 1


# --- spans of text


def test_a_substring_becomes_its_tokens(tokenizer):
    text = "The water was cold. The key is 4718. Nobody came."
    prompt = Prompt.from_text(model(tokenizer), text, {"key": "The key is 4718.", "number": (31, 35)})
    assert decoded(tokenizer, prompt, "key") == " The key is 4718."
    assert "4718" in decoded(tokenizer, prompt, "number")
    assert prompt["key"][0] <= prompt["number"][0] < prompt["number"][1] <= prompt["key"][1]
    assert prompt.text == text and prompt.pad == 0 and len(prompt) == prompt.ids.shape[0]
    assert prompt.ids.dtype == torch.long
    assert prompt.ids.tolist() == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("aa", "'aa' occurs 2 times in the text, must be exactly once; give (char_start, char_stop) instead"),
        ("zebra", "'zebra' occurs 0 times"),
        ("", "'' occurs 0 times"),
        ((2, 2), "0 <= start < stop <= 8 (characters)"),
        ((5, 3), "is (5, 3), must have"),
        ((0, 9), "is (0, 9), must have"),
        ((-1, 3), "is (-1, 3), must have"),
        ((1.0, 2.0), "pair (start, stop) of whole numbers"),
        ((True, 2), "pair (start, stop) of whole numbers"),
        ((1, 2, 3), "pair (start, stop) of whole numbers"),
        (4, "pair (start, stop) of whole numbers"),
    ],
)
def test_a_bad_span_is_quoted(tokenizer, wanted, message):
    with pytest.raises(PromptError) as caught:
        Prompt.from_text(model(tokenizer), "aaa bell", {"it": wanted})
    assert message in str(caught.value) and "span 'it'" in str(caught.value)


def test_overlapping_occurrences_are_counted():
    assert alignment.occurrences("banana", "ana") == [1, 3]


@pytest.mark.parametrize("kind", ["byte", "metaspace", "wordpiece"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_every_make_of_tokenizer_finds_every_word(kind, adds_bos):
    tokenizer = fast(kind, adds_bos=adds_bos)
    text = corpus()[0][:600]
    words = [(found, found + len(word)) for word in set(text.split()) for found in [text.index(word)]]
    prompt = Prompt.from_text(model(tokenizer), text, {str(pair): pair for pair in words})
    for start, stop in words:
        word = text[start:stop].lower() if kind == "wordpiece" else text[start:stop]
        assert word in decoded(tokenizer, prompt, str((start, stop))).replace(" ", "")


@pytest.mark.parametrize("text", ["one 😀 two", "名前は花子です。", "naïve café", " leading", "a\n\n\tb  c ", "😀"])
def test_characters_over_several_tokens(text):
    slow, byte = Chunks(), fast()
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            got = Prompt.from_text(model(slow), text, {"x": (start, stop)}, bos=False)["x"]
            assert got == byte_spans(_chunks(text), text, start, stop)
            prompt = Prompt.from_text(model(byte), text, {"x": (start, stop)})
            assert prompt["x"] == byte_spans(_byte_sizes(byte, prompt), text, start, stop)


def _chunks(text, size=3):
    n = len(text.encode())
    return [min(size, n - i) for i in range(0, n, size)]


def _byte_sizes(tokenizer, prompt):
    return [len(token) for token in tokenizer.convert_ids_to_tokens(prompt.ids.tolist())]


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd<"), min_size=1, max_size=40)


@st.composite
def texts_with_a_span(draw):
    text = draw(ANY_TEXT)
    start = draw(st.integers(0, len(text) - 1))
    return text, start, draw(st.integers(start + 1, len(text)))


@settings(deadline=None, max_examples=200)
@given(texts_with_a_span())
@example(("你好世界 x", 1, 2))
@example(("a  b", 1, 3))
def test_any_text_byte_level_with_offsets(case):
    text, start, stop = case
    tokenizer = _byte()
    prompt = Prompt.from_text(model(tokenizer), text, {"x": (start, stop)})
    assert prompt["x"] == byte_spans(_byte_sizes(tokenizer, prompt), text, start, stop)
    assert text[start:stop] in decoded(tokenizer, prompt, "x")


@settings(deadline=None, max_examples=200)
@given(texts_with_a_span(), st.integers(1, 7), st.booleans())
@example(("😀😀", 1, 2), 3, False)
@example(("é", 0, 1), 1, True)
def test_any_text_without_offsets(case, size, empty):
    text, start, stop = case
    slow = Chunks(size, empty)
    prompt = Prompt.from_text(model(slow), text, {"x": (start, stop)}, bos=False)
    sizes = _chunks(text, size)
    sizes = [n for size in sizes for n in (0, size)] if empty else sizes
    assert prompt["x"] == byte_spans(sizes, text, start, stop)


@settings(deadline=None, max_examples=100)
@given(texts_with_a_span())
@example(("  ", 0, 2))
def test_any_text_with_useless_offsets(case):
    text, start, stop = case
    tokenizer = Lying(_byte(), lambda start, stop: (start, start))
    prompt = Prompt.from_text(model(tokenizer), text, {"x": (start, stop)})
    assert prompt["x"] == byte_spans(_byte_sizes(tokenizer, prompt), text, start, stop)


@cache
def _byte():
    return fast()


@pytest.mark.parametrize("text", ["the 😀 of é", "plain text here"])
def test_a_slow_tokenizer_that_hides_incomplete_characters(text):
    tokenizer = ByT5Tokenizer()
    for start in range(len(text)):
        prompt = Prompt.from_text(model(tokenizer), text, {"x": (start, len(text))}, bos=False)
        assert prompt["x"] == byte_spans([1] * len(text.encode()), text, start, len(text))


@pytest.mark.parametrize(
    "lie",
    [
        lambda start, stop: (start, start),
        lambda start, stop: (max(start - 3, 0), max(stop - 3, 0)),
        lambda start, stop: (start + 500, stop + 500),
        lambda start, stop: (start % 7, stop % 7),
        lambda start, stop: (0, 40),
    ],
)
def test_wrong_offsets_are_not_believed(lie):
    honest, text = fast(), "The first line is short. The second line hides 815 and a 😀 somewhere."
    spans = {"a": "first line", "b": "815", "c": "😀 some"}
    wanted = Prompt.from_text(model(honest), text, spans)
    found = Prompt.from_text(model(Lying(honest, lie)), text, spans)
    assert found.spans == wanted.spans and torch.equal(found.ids, wanted.ids)


def test_a_tokenizer_that_cannot_give_the_text_back_is_an_error():
    class Lossy(Chunks):
        def decode(self, ids, **options):
            return super().decode(ids, **options).replace("x", "")

    with pytest.raises(PromptError, match=r"no usable offsets, and its tokens decode to 'ay' where the text has 'xay'"):
        Prompt.from_text(model(Lossy()), "we xay", {"it": "we"}, bos=False)
    with pytest.raises(PromptError, match=r"U\+FFFD"):
        Prompt.from_text(model(Chunks()), "a \ufffd b", {"it": "b"}, bos=False)


def test_a_normaliser_is_followed():
    tokenizer, text = fast(nfc=True), "a cafe\u0301 by the sea"
    prompt = Prompt.from_text(model(tokenizer), text, {"word": "cafe\u0301"})
    assert decoded(tokenizer, prompt, "word") == " caf\u00e9"


def test_hangul_that_is_put_together():
    tokenizer, text = fast(nfc=True), "x \u1112\u1161\u11ab y"
    prompt = Prompt.from_text(model(tokenizer), text, {"word": text[2:5]})
    assert decoded(tokenizer, prompt, "word").strip() == "\ud55c"


def test_a_token_that_claims_its_neighbours_characters():
    class Letters:
        def decode(self, ids, **_):
            return "".join(("abc", "d", "e")[token] for token in ids)

    claims = [(0, 3), (0, 3), (4, 5)]  # the second token is really (3, 4)
    for wanted, span in (((1, 2), (0, 1)), ((3, 5), (1, 3)), ((4, 5), (2, 3))):
        assert alignment.align(Letters(), "abcde", [0, 1, 2], [wanted], claims) == [span]


def test_a_span_of_spaces(tokenizer):
    prompt = Prompt.from_text(model(tokenizer), "over\n\n\nthere", {"gap": "\n\n\n"})
    assert "\n\n\n" in decoded(tokenizer, prompt, "gap")


@pytest.mark.parametrize("text", ["", "\ud800 alone"])
def test_text_without_tokens_or_unicode(tokenizer, text):
    with pytest.raises(PromptError, match=r"has no tokens|lone surrogate at character 0"):
        Prompt.from_text(model(tokenizer), text)


def test_text_must_be_text(tokenizer):
    with pytest.raises(PromptError, match="text is list"):
        Prompt.from_text(model(tokenizer), ["a"])


def test_longer_than_the_model(tokenizer):
    n = len(Prompt.from_text(model(tokenizer, 100), "one two three"))
    assert len(Prompt.from_text(model(tokenizer, n), "one two three")) == n
    with pytest.raises(PromptError, match=f"the text has {n} tokens, the model reads at most {n - 1}"):
        Prompt.from_text(model(tokenizer, n - 1), "one two three")


# --- BOS


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(("bos", "text"), [(b, t) for b in ("tokenizer", True, False) for t in ("a cat", "<s>a cat")])
def test_bos_policy(adds_bos, bos, text):
    tokenizer = fast(adds_bos=adds_bos)
    prompt = Prompt.from_text(model(tokenizer), text, {"cat": "cat"}, bos=bos)
    has_one = text.startswith("<s>") or bos is True or (bos == "tokenizer" and adds_bos)
    assert (prompt.ids == tokenizer.bos_token_id).tolist() == [has_one] + [False] * (len(prompt) - 1)
    assert decoded(tokenizer, prompt, "cat").endswith("cat")
    assert alignment.decode(tokenizer, prompt.ids.tolist()) == ("<s>" if has_one else "") + "a cat"


def test_two_bos_in_the_text(tokenizer):
    for bos in ("tokenizer", True):
        with pytest.raises(PromptError, match=r"begins with BOS \('<s>'\) twice"):
            Prompt.from_text(model(tokenizer), "<s><s>a", bos=bos)
    assert Prompt.from_text(model(tokenizer), "<s><s>a", bos=False).ids[:2].tolist() == [tokenizer.bos_token_id] * 2


def test_no_bos_to_add():
    tokenizer = fast(bos=None)
    with pytest.raises(PromptError, match="bos=True, but the tokenizer has no BOS token"):
        Prompt.from_text(model(tokenizer), "a", bos=True)
    assert Prompt.from_text(model(tokenizer), "a", bos="tokenizer").ids.tolist() == tokenizer("a")["input_ids"]


def test_unknown_bos(tokenizer):
    with pytest.raises(PromptError, match="bos is 'auto', must be 'tokenizer', True or False"):
        Prompt.from_text(model(tokenizer), "a", bos="auto")


def test_what_the_tokenizer_adds_behind(tokenizer):
    closing = fast(adds_bos=True, adds_eos=True)
    prompt = Prompt.from_text(model(closing), "a cat", {"cat": "cat"})
    assert prompt.ids.tolist() == closing("a cat")["input_ids"]
    assert prompt["cat"] == Prompt.from_text(model(tokenizer), "a cat", {"cat": "cat"})["cat"]


# --- chat


@pytest.mark.parametrize("text", ["user", "a 4718 b", "kvprobe"])
def test_chat_spans_are_the_users(tokenizer, text):
    prompt = Prompt.from_text(model(tokenizer), text, {"all": text}, chat=True, system="user 4718 kvprobe")
    assert prompt.text == f"<|system|>user 4718 kvprobe</s><|user|>{text}</s><|assistant|>"
    assert text in decoded(tokenizer, prompt, "all")
    before = len("<|system|>user 4718 kvprobe</s><|user|>")
    plain = Prompt.from_text(model(tokenizer), prompt.text, {"all": (before, before + len(text))}, bos=False)
    assert prompt["all"] == plain["all"] and torch.equal(prompt.ids, plain.ids)
    assert tokenizer.bos_token_id not in prompt.ids


def test_chat_bos(tokenizer):
    with_bos = fast(adds_bos=True, chat="{{ bos_token }}" + CHAT)
    for bos in ("tokenizer", True, False):
        ids = Prompt.from_text(model(with_bos), "hello", chat=True, bos=bos).ids.tolist()
        assert ids.count(with_bos.bos_token_id) == 1 and ids[0] == with_bos.bos_token_id
    assert Prompt.from_text(model(tokenizer), "hello", chat=True, bos=True).ids[0] == tokenizer.bos_token_id


def test_chat_without_opening_and_with_prefill(tokenizer):
    shut = Prompt.from_text(model(tokenizer), "hi", chat=True, add_generation_prompt=False)
    assert shut.text == "<|user|>hi</s>"
    begun = Prompt.from_text(model(tokenizer), "hi", {"hi": "hi"}, chat=True, prefill=" Well, hi")
    assert begun.text == "<|user|>hi</s><|assistant|> Well, hi"
    assert Prompt.from_text(model(tokenizer), "hi", prefill=" there").text == "hi there"


def test_a_template_that_strips():
    tokenizer = fast(chat=STRIPPING)
    prompt = Prompt.from_text(model(tokenizer), "  a cat \n", {"cat": "cat"}, chat=True)
    assert prompt.text == "<|user|>a cat</s><|assistant|>" and "cat" in decoded(tokenizer, prompt, "cat")
    for lost in ((0, 1), (0, 3), (7, 9)):
        with pytest.raises(PromptError, match="the chat template strips"):
            Prompt.from_text(model(tokenizer), "  a cat \n", {"x": lost}, chat=True)


def test_templates_that_cannot_be_used(tokenizer):
    with pytest.raises(PromptError, match="no chat template: pass chat=False"):
        Prompt.from_text(model(fast(chat=None)), "hi", chat=True)
    with pytest.raises(PromptError, match="system='be brief' needs a chat template: pass chat=True"):
        Prompt.from_text(model(tokenizer), "hi", system="be brief")
    loud = fast(chat=CHAT.replace("m.content", "m.content | upper"))
    with pytest.raises(PromptError, match=r"message 0 times, must be once"):
        Prompt.from_text(model(loud), "hi", chat=True)
    changing = fast(chat=CHAT.replace("m.content", "m.content | replace('cat', 'dog')"))
    with pytest.raises(PromptError, match="the chat template changes the message, so no span is exact: it shows 'dog'"):
        Prompt.from_text(model(changing), "cat", chat=True)
    strict = fast(chat="{{ raise_exception('no system role') }}")
    with pytest.raises(PromptError, match="the chat template refuses the message: no system role"):
        Prompt.from_text(model(strict), "cat", chat=True)
    twice = fast(chat=CHAT.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}"))
    with pytest.raises(PromptError, match="shows the user's message 2 times, must be once"):
        Prompt.from_text(model(twice), "cat", chat=True)


def test_named_templates():
    tokenizer = fast(chat={"default": CHAT, "loud": "!!" + CHAT})
    assert Prompt.from_text(model(tokenizer), "hi", chat=True).text.startswith("<|user|>")
    assert Prompt.from_text(model(tokenizer), "hi", chat="loud").text.startswith("!!<|user|>")
    with pytest.raises(PromptError, match="chat='quiet' is not one of the tokenizer's templates: 'default', 'loud'"):
        Prompt.from_text(model(tokenizer), "hi", chat="quiet")


# --- ids


@pytest.mark.parametrize("ids", [[5, 1, 1], (5, 1, 1), np.array([5, 1, 1]), np.array([5, 1, 1], dtype=np.int32)])
def test_ids_stay_as_they_are(ids):
    prompt = Prompt.from_ids(ids, {"end": (1, 3)})
    assert prompt.ids.tolist() == [5, 1, 1] and prompt.ids.dtype == torch.long
    assert prompt["end"] == (1, 3) and prompt.pad == 0 and prompt.text is None


def test_a_prompt_does_not_change_with_the_callers_tensor():
    ids = torch.tensor([1, 2, 3])
    prompt = Prompt.from_ids(ids)
    ids[0] = 9
    assert prompt.ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "shape [0], must be one-dimensional with at least one id"),
        ([[1, 2]], "shape [1, 2]"),
        (torch.tensor(3), "shape []"),
        ([1.0, 2.0], "torch.float32, must be whole numbers"),
        ([True, False], "torch.bool, must be whole numbers"),
        ([1, -2], "hold -2, must be 0 or more"),
        (["a"], "must be one-dimensional whole numbers"),
        ([[1], [2, 3]], "must be one-dimensional whole numbers"),
        (None, "must be one-dimensional whole numbers"),
    ],
)
def test_bad_ids_are_quoted(ids, message):
    with pytest.raises(PromptError) as caught:
        Prompt.from_ids(ids)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("span", [(0, 6), (3, 3), (4, 2), (-1, 2), (5, 6), (0.5, 2), None, "word"])
def test_bad_token_spans_are_quoted(span):
    with pytest.raises(PromptError, match="span 'x'"):
        Prompt.from_ids([1, 2, 3, 4, 5], {"x": span})


@pytest.mark.parametrize("as_type", [list, np.array, torch.tensor])
def test_left_padding(as_type):
    prompt = Prompt.from_ids([0, 0, 7, 8, 9], {"x": (2, 4)}, attention_mask=as_type([0, 0, 1, 1, 1]))
    assert prompt.pad == 2 and prompt["x"] == (2, 4) and len(prompt) == 5
    with pytest.raises(PromptError, match=r"span 'x' is \(1, 4\), must have 2 <= start < stop <= 5"):
        Prompt.from_ids([0, 0, 7, 8, 9], {"x": (1, 4)}, attention_mask=as_type([0, 0, 1, 1, 1]))
    assert Prompt.from_ids([0, 7], attention_mask=as_type([1, 1])).pad == 0


@pytest.mark.parametrize(
    "mask", [[1, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1], [1] * 4, [0, 2, 1], [[0, 1, 1]], 3]
)
def test_other_masks_are_refused(mask):
    with pytest.raises(PromptError, match=r"attention_mask .*left padding"):
        Prompt.from_ids([1, 2, 3], attention_mask=mask)


def test_ids_with_a_tokenizer(tokenizer):
    ids = tokenizer("a cat and a dog")["input_ids"]
    prompt = Prompt.from_ids([0, *ids], {"cat": "cat"}, attention_mask=[0] + [1] * len(ids), tokenizer=tokenizer)
    assert prompt.text == "<s>a cat and a dog" and decoded(tokenizer, prompt, "cat") == " cat"
    with pytest.raises(PromptError, match="'a ' occurs 2 times"):
        Prompt.from_ids(ids, {"a": "a "}, tokenizer=tokenizer)
    with pytest.raises(PromptError, match="give \\(start, stop\\) tokens, or pass tokenizer="):
        Prompt.from_ids(ids, {"cat": "cat"})
    with pytest.raises(PromptError, match=f"ids hold 99999, must be less than the tokenizer's {len(tokenizer)}"):
        Prompt.from_ids([99999], tokenizer=tokenizer)


def test_getting_a_span_that_is_not_there():
    with pytest.raises(PromptError, match="no span 'b' in this prompt; there is 'a'"):
        Prompt.from_ids([1, 2], {"a": (0, 1)})["b"]


@pytest.mark.parametrize("pad", [-1, 2])
def test_pads_leave_at_least_one_id(pad):
    with pytest.raises(PromptError, match=f"pad is {pad}, must be at least 0 and less than the 2 ids"):
        Prompt(torch.tensor([1, 2]), pad=pad)


def test_tokens_are_readable(tokenizer):
    prompt = Prompt.from_text(model(tokenizer), "The cat 😀")
    shown = prompt.tokens(model(tokenizer))
    assert len(shown) == len(prompt) and shown[0] == "<s>"
    assert "".join(shown).startswith("<s>The cat") and "\ufffd" not in "".join(shown)


def test_extending():
    prompt = Prompt.from_ids([0, 1, 2], {"x": (1, 2)}, attention_mask=[0, 1, 1]).extended([7, 8])
    assert prompt.ids.tolist() == [0, 1, 2, 7, 8] and prompt.pad == 1 and prompt["x"] == (1, 2) and prompt.text is None


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_a_continuation_is_what_one_tokenisation_gives(adds_bos, chat):
    tokenizer = fast(adds_bos=adds_bos)
    prompt = Prompt.from_text(model(tokenizer), "The number is", chat=chat)
    ids = prompt.continuation(model(tokenizer), " 4718, and 12")
    whole = tokenizer(prompt.text + " 4718, and 12", add_special_tokens=not chat)["input_ids"]
    assert prompt.ids.tolist() + list(ids) == whole


def test_a_border_inside_a_token():
    tokenizer = fast()
    assert len(tokenizer(" the")["input_ids"]) == 1
    with pytest.raises(PromptError, match="the tokenizer does not keep the prompt's tokens before 'he'"):
        Prompt.from_text(model(tokenizer), "at t").continuation(model(tokenizer), "he")
    with pytest.raises(PromptError, match="does not know its text"):
        Prompt.from_ids([5, 6]).continuation(model(tokenizer), " a")
    closing = fast(adds_eos=True)
    with pytest.raises(PromptError, match="no exact border"):
        Prompt.from_text(model(closing), "a cat").continuation(model(closing), " sat")


def test_the_embedded_models_tokenizer(smol_tokenizer):
    text = "The magic number for 花子 😀 is 4718."
    spans = {"name": "花子", "face": "😀", "number": "4718."}
    prompt = Prompt.from_text(model(smol_tokenizer, 8192), text, spans)
    assert prompt.ids.tolist() == smol_tokenizer(text)["input_ids"]
    for name, wanted in spans.items():
        assert wanted in decoded(smol_tokenizer, prompt, name)
    chat = Prompt.from_text(model(smol_tokenizer, 8192), text, spans, chat=True, bos=True)
    assert chat.ids.tolist().count(smol_tokenizer.bos_token_id) == chat.text.count("<|im_start|>") == 3
    offset = chat["name"][0] - prompt["name"][0]
    assert {k: (a + offset, b + offset) for k, (a, b) in prompt.spans.items()} == chat.spans


def test_spans_without_names_are_one_line():
    with pytest.raises(PromptError, match="mapping of names"):
        Prompt.from_ids([1, 2, 3], spans=[(0, 1)])
