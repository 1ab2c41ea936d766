"""Items made by hand for tiny models, and head scores by plain transformers, step by step, key by key."""

import torch

from kvprobe.heads import Decoded
from kvprobe.prompts import Prompt
from kvprobe.tasks.items import Item


def item(model, before, evidence, value, after, pad=0):
    """An item from three texts (or lists of ids); ``value`` is what is asked for."""
    parts = (before, evidence, after)
    ids = [model.tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else part for part in parts]
    ids[0] = [1, *ids[0]]
    start = pad + len(ids[0])
    prompt = Prompt(torch.tensor([*[0] * pad, *ids[0], *ids[1], *ids[2]]), {}, pad)
    spans = {"evidence": [(start, start + len(ids[1]))]}
    return Item("by_hand", 0, len(prompt), prompt, " " + value, (), (value,), start + len(ids[1]), spans)


def plain_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def slow_scores(model, ids, span, steps, eos=()):
    """Greedy tokens, retrieval and reasoning scores (nested lists [L][H]): everything run anew at each step."""
    start, stop = span
    size, ids, generated = stop - start, list(ids), []
    config = model.config
    retrieval = [[0.0] * config.num_attention_heads for _ in range(config.num_hidden_layers)]
    reasoning = [[0.0] * config.num_attention_heads for _ in range(config.num_hidden_layers)]
    for _ in range(steps):
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
        scores = out.logits[0, -1].tolist()
        token = scores.index(max(scores))
        if token in eos:
            break
        for layer, attention in enumerate(out.attentions):
            for head in range(attention.shape[1]):
                row = attention[0, head, -1].tolist()[: len(ids)]
                best = max(range(len(row)), key=lambda j: (row[j], -j))
                if start <= best < stop and ids[best] == token:
                    retrieval[layer][head] += 1 / size
                order = sorted(range(len(row)), key=lambda j: (-row[j], j))
                reasoning[layer][head] += sum(row[j] / size for j in order[:size] if start <= j < stop)
        ids.append(token)
        generated.append(token)
    return generated, retrieval, reasoning


def made_up(rows, ids, span, generated):
    """A Decoded whose single layer and heads attend exactly as ``rows`` [H, T, n] say (0: the key is not seen)."""
    attention = torch.tensor(rows, dtype=torch.float32)
    trace = _Fixed(torch.tensor(ids), attention)
    return Decoded(None, span, tuple(generated), "", trace, 1.0, 1.0)


class _Fixed:
    """As much of a trace as scores look at."""

    n_layers = 1

    def __init__(self, ids, attention):
        self.ids, self._attention, self.n_heads = ids, attention, len(attention)

    def layers(self):
        from types import SimpleNamespace

        yield SimpleNamespace(index=0, attention=self._attention)
