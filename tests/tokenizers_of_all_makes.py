"""Small tokenizers of every common make, trained on a few lines of many scripts."""

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
LINES = [
    "The magic number of the harbour is 4718, and nobody in the old town remembers the name of the keeper.",
    "She counted the lamps again: one, two, three; the fourth had gone out before the rain began to fall.",
    "你好世界 花子は学校へ行きます。",
    "مرحبا بالعالم هذا نص عربي",
    "नमस्ते दुनिया यह हिन्दी है",
    "สวัสดีชาวโลกนี่คือภาษาไทย",
    "naïve café, e\u0301 and o\u0308",
    "👩‍👩‍👧‍👦 family 😀 🇩🇪 flag",
    "Ｆｕｌｌ width, ﬁ and ①",
    "Straße, İstanbul, ǅ",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TRAINED = LINES * 8


def _bytes(normaliser=None, prefix=False):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()
    if normaliser is not None:
        raw.normalizer = normaliser
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return raw, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)


def _llama():
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw, trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL + BYTES)


def _unigram(normaliser=None):
    raw = Tokenizer(models.Unigram())
    if normaliser is not None:
        raw.normalizer = normaliser
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return raw, trainers.UnigramTrainer(vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>")


def _wordpiece(lowercase):
    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=lowercase)
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    return raw, trainers.WordPieceTrainer(vocab_size=700, special_tokens=SPECIAL)


MAKES = {
    "byte": _bytes,
    "byte, space before": lambda: _bytes(prefix=True),
    "byte, NFKC": lambda: _bytes(normalizers.NFKC()),
    "byte, lower case": lambda: _bytes(normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])),
    "byte fallback": _llama,
    "unigram": _unigram,
    "unigram, NFKC": lambda: _unigram(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    ),
    "wordpiece": lambda: _wordpiece(True),
    "wordpiece, cased": lambda: _wordpiece(False),
}
FAITHFUL = ("byte", "byte, space before", "byte fallback")
"""Those that give every text back, character for character."""


@cache
def make(kind, pad=None):
    """A trained tokenizer; ``pad`` names its padding token, which may be a real one's."""
    raw, trainer = MAKES[kind]()
    raw.train_from_iterator(TRAINED, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=pad
    )
