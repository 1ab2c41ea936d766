"""Prompts and traces of a few hundred bytes for placebo runs on tiny models, as a user's own JSON lines."""

import json

NAMES = ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "Gus")
FILLER = "It rained all day and nobody came to see the fair, so they shut it and went home. "
QUESTION = "What is the code? It is"


def item_row(index, needles=4, **changes):
    """A text with ``needles`` codes, one of them the target, the others hard, between pieces of filler."""
    sentences = [f"{name} has code {17 + 11 * k + index}. " for k, name in enumerate(NAMES[:needles])]
    pieces = [FILLER[7 * k + index : 7 * k + index + 25] for k in range(needles)]
    text = "Read this. " + "".join(a + b for a, b in zip(pieces, sentences, strict=True)) + FILLER + QUESTION
    target = sentences[index % needles]
    hard = [sentence for sentence in sentences if sentence != target]
    row = {"text": text, "target": target, "hard": hard, "protect": "Read this.", "question": QUESTION}
    return row | {"answer": str(17 + 11 * (index % needles) + index)} | changes


def trace_row(index, rederive=True, **changes):
    """A value worked out once, then mentioned three times; the last time it is worked out again."""
    value = 54 + index
    text = f"So, to begin: 6 by {9 + index} is {value}. "
    start, mentions = text.index("6 by"), [[text.index(str(value)), text.index(str(value)) + 2, 1]]
    hard = []
    for k in range(3):
        hard.append([len(text), len(text) + 10])
        text += f"{k} by 8 is {k}8. "
    text += FILLER
    for k, words in enumerate(("Now take ", "Then add ", f"As 6 by {9 + index} is "), 2):
        at = len(text) + len(words)
        again = [len(text), at + 2]
        text += f"{words}{value}, ok. "
        mentions.append([at, at + 2, k])
    stop = mentions[0][1] + 1
    row = {"text": text, "target": [start, stop], "mentions": mentions, "hard": hard, "protect": "So, to begin"}
    return row | ({"rederive": [again]} if rederive else {}) | changes


def written(path, *rows):
    """The rows as a file of JSON lines."""
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def answered(model, path, *rows, but=()):
    """The rows, each asking for the first letter that the model writes by itself; those in ``but`` for another."""
    from kvprobe import intervene
    from kvprobe.tasks import user

    found = []
    for k, (row, item) in enumerate(zip(rows, user.items(written(path, *rows), model), strict=True)):
        out = intervene(model, item.prompt, [()], suffix=1, generate=len(item.answer_ids) + 8)[0]
        text = model.tokenizer.decode(out.generated, skip_special_tokens=True)
        found.append(row | {"references": ["never written"] if k in but else [text.strip()[0]]})
    return written(path, *found)


def spans_of(text):
    """``"3:5 8:9"`` as a table shows it, as spans."""
    return [tuple(int(end) for end in span.split(":")) for span in text.split()]
