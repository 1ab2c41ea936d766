"""How much of the asked value an answer holds: ROUGE-1 recall and SQuAD's token F1."""

from __future__ import annotations

import re
import string
from collections import Counter

ARTICLES = re.compile(r"\b(a|an|the)\b")


def rouge1_recall(answer: str, value: str) -> float:
    """Share of the value's words, counted as often as they stand there, that the answer holds.

    Words are runs of ``[a-z0-9]`` in lower case (Lin 2004; the tokens of Google's ``rouge_score`` without its stemmer,
    which leaves numbers as they are). A value without a word has recall 0.
    """
    wanted, found = (Counter(re.findall(r"[a-z0-9]+", text.lower())) for text in (value, answer))
    return (wanted & found).total() / wanted.total() if wanted else 0.0


def token_f1(answer: str, value: str) -> float:
    """F1 of the words that answer and value share: 2·precision·recall / (precision + recall).

    Normalised as SQuAD does (Rajpurkar et al. 2016): lower case, no punctuation, no articles. Without a common word: 0.
    """
    given, wanted = _words(answer), _words(value)
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total()) if common else 0.0


def _words(text: str) -> Counter[str]:
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return Counter(ARTICLES.sub(" ", plain).split())
