"""Tokenizers without a fast version have no offsets: spans come from decoded prefixes, proven or refused."""

import io
from functools import cache
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers_of_all_makes as makes
from transformers import ByT5Tokenizer, PreTrainedTokenizer

from kvprobe.errors import PromptError
from kvprobe.prompts import Prompt, alignment

TEXTS = {
    "The magic number is 4718, she said": "4718",
    "keeper: 花子 and no one": "花子",
    "keeper: 👩‍👩‍👧‍👦, she said": "👩‍👩‍👧‍👦",
    "keeper: नमस्ते दुनिया": "नमस्ते",
    " two spaces  before": "spaces",
}


@cache
def trained():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(makes.LINES * 20),
        model_writer=model,
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


class Pieces(PreTrainedTokenizer):
    """A tokenizer in Python over sentencepiece, as many models still ship one."""

    def __init__(self, **options):
        self.pieces = sentencepiece.SentencePieceProcessor(model_proto=trained())
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options)

    @property
    def vocab_size(self):
        return self.pieces.get_piece_size()

    def get_vocab(self):
        return {self.pieces.id_to_piece(i): i for i in range(self.vocab_size)} | self.added_tokens_encoder

    def _tokenize(self, text, **_):
        return self.pieces.encode(text, out_type=str)

    def _convert_token_to_id(self, token):
        return self.pieces.piece_to_id(token)

    def _convert_id_to_token(self, index):
        return self.pieces.id_to_piece(index)

    def convert_tokens_to_string(self, tokens):
        return self.pieces.decode(tokens)


class Forgetful(Pieces):
    """Decodes in lower case: what it shows is not what it was given."""

    def convert_tokens_to_string(self, tokens):
        return super().convert_tokens_to_string(tokens).lower()


def model(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer, max_length=None)


@pytest.mark.parametrize("slow", [Pieces, ByT5Tokenizer])
@pytest.mark.parametrize("text", TEXTS)
def test_a_needle_is_exactly_its_tokens(slow, text):
    tokenizer, needle = slow(), TEXTS[text]
    assert not tokenizer.is_fast
    prompt = Prompt.from_text(model(tokenizer), text, {"x": needle}, bos=False)
    start, stop = prompt["x"]
    ids = prompt.ids.tolist()
    assert needle in alignment.decode(tokenizer, ids[start:stop])
    # No token can be spared at either end, and none outside shows a character of the needle.
    for shorter in (ids[start + 1 : stop], ids[start : stop - 1]):
        assert needle not in alignment.decode(tokenizer, shorter)
    sizes = (
        len(alignment.decode(tokenizer, ids[:start]).encode()),
        len(alignment.decode(tokenizer, ids[:stop]).encode()),
    )
    shown = alignment.decode(tokenizer, ids)
    at = len(shown[: shown.index(needle)].encode())
    assert sizes[0] <= at and sizes[1] >= at + len(needle.encode())


def test_what_cannot_be_proven_is_refused():
    tokenizer = Forgetful()
    with pytest.raises(PromptError, match="reports no usable offsets, and its tokens decode to 'the") as caught:
        Prompt.from_text(model(tokenizer), "The keeper", {"x": "keeper"}, bos=False)
    assert "give token spans to Prompt.from_ids" in str(caught.value) and "\n" not in str(caught.value)
    assert Prompt.from_text(model(tokenizer), "The keeper", bos=False).spans == {}
