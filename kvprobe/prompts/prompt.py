"""A prompt: token ids and named, exact token spans.

A span is half-open, ``(start, stop)``, and holds all tokens whose characters overlap the characters it was asked for
(:mod:`kvprobe.prompts.alignment`). BOS and chat templates follow one policy (:mod:`kvprobe.prompts.encoding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvprobe.errors import PromptError, quote
from kvprobe.prompts import alignment, batches, encoding
from kvprobe.prompts.alignment import Range

if TYPE_CHECKING:
    import torch

#: A substring of the text, or a half-open pair of positions.
Wanted = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids with named spans.

    Attributes
    ----------
    ids : LongTensor [n]
        Token ids on the CPU, left pads included, exactly as given.
    spans : dict of str to (int, int)
        Half-open token spans by name.
    pad : int
        How many of the first ids are left padding.
    text : str or None
        The text the ids encode (chat template included, added special tokens not), if it is known.

    Examples
    --------
    >>> prompt = Prompt.from_ids([5, 6, 7, 8], spans={"middle": (1, 3)})
    >>> prompt["middle"], len(prompt)
    ((1, 3), 4)
    """

    ids: torch.Tensor
    spans: dict[str, Range] = field(default_factory=dict)
    pad: int = 0
    text: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _id_tensor(self.ids))
        n = len(self)
        if not 0 <= self.pad < n:
            raise PromptError(f"pad is {self.pad}, must be at least 0 and less than the {n} ids")
        checked = {str(k): alignment.bounds(v, n, str(k), "tokens", self.pad) for k, v in self.spans.items()}
        object.__setattr__(self, "spans", checked)

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def __getitem__(self, name: str) -> Range:
        if name not in self.spans:
            raise PromptError(f"no span {name!r} in this prompt; there is {', '.join(map(repr, self.spans)) or 'none'}")
        return self.spans[name]

    @classmethod
    def from_text(
        cls,
        model: Any,
        text: str,
        spans: Mapping[str, Wanted] | None = None,
        *,
        bos: bool | str = "tokenizer",
        chat: bool | str = False,
        system: str | None = None,
        add_generation_prompt: bool = True,
        prefill: str = "",
    ) -> Prompt:
        """Tokenise a text and find named spans in it.

        Parameters
        ----------
        model
            A loaded model (its ``tokenizer`` and ``max_length`` are used, nothing else).
        text
            The text; in a chat, the user's message.
        spans
            Name → substring of ``text`` (must occur exactly once) or ``(char_start, char_stop)``.
        bos
            ``"tokenizer"``, True or False, see :mod:`kvprobe.prompts.encoding`.
        chat
            False; True for the tokenizer's chat template; or the name of one of its templates.
        system, add_generation_prompt
            A system message, and whether the assistant's turn is opened (chat only).
        prefill
            Text that follows everything else, for instance the beginning of the answer. It holds no spans.

        Raises
        ------
        PromptError
            For a span that is missing, ambiguous, or not given back by its tokens; a missing chat template or BOS;
            more tokens than ``model.max_length``.

        Examples
        --------
        >>> prompt = Prompt.from_text(model, "The key is 17. Go.", spans={"key": "17"})    # doctest: +SKIP
        """
        if not isinstance(text, str) or not isinstance(prefill, str):
            raise PromptError(f"text is {type(text).__name__}, prefill {type(prefill).__name__}: both must be str")
        rendered = encoding.render(
            model.tokenizer,
            text,
            chat=chat,
            system=system,
            add_generation_prompt=add_generation_prompt,
            prefill=prefill,
        )
        encoded = encoding.encode(model.tokenizer, rendered, bos=bos)
        _check_length(len(encoded.ids), model.max_length)
        chars = {k: rendered.locate(alignment.resolve(text, v, k), k) for k, v in (spans or {}).items()}
        found = alignment.align(model.tokenizer, rendered.text, encoded.body, list(chars.values()), encoded.offsets)
        lead = len(encoded.before)
        tokens = {name: (start + lead, stop + lead) for name, (start, stop) in zip(chars, found, strict=True)}
        return cls(_id_tensor(encoded.ids), tokens, 0, rendered.text)

    @classmethod
    def from_ids(
        cls,
        ids: Any,
        spans: Mapping[str, Wanted] | None = None,
        *,
        attention_mask: Any = None,
        tokenizer: Any = None,
    ) -> Prompt:
        """Take token ids exactly as they are; nothing is prepended.

        Parameters
        ----------
        ids
            One-dimensional whole numbers: list, array or tensor.
        spans
            Name → ``(start, stop)`` tokens; with a ``tokenizer`` also a substring of the decoded text.
        attention_mask
            0 for left pads, then 1; anything else is refused.
        tokenizer
            Decodes the ids (``text``) and checks them against its vocabulary.

        Raises
        ------
        PromptError
            For ids that are empty, not whole numbers or not one-dimensional; for right-padded or holed masks; for
            spans that lie outside, are empty or reversed, or touch the padding.
        """
        tensor = _id_tensor(ids)
        if spans is not None and not hasattr(spans, "items"):
            raise PromptError(f"spans are {quote(spans)}; allowed: a mapping of names to (start, stop)")
        pad = _left_pads(attention_mask, len(tensor))
        text = None if tokenizer is None else _decoded(tokenizer, tensor[pad:].tolist())
        found = {k: _token_span(v, k, tensor[pad:].tolist(), pad, tokenizer, text) for k, v in (spans or {}).items()}
        return cls(tensor, found, pad, text)

    @classmethod
    def from_batch(
        cls,
        encoded: Mapping[str, Any],
        spans: Sequence[Mapping[str, Wanted] | None] | None = None,
        *,
        tokenizer: Any = None,
    ) -> list[Prompt]:
        """The rows of a padded batch as a tokenizer gives it, one prompt each.

        Parameters
        ----------
        encoded
            ``input_ids`` and ``attention_mask``, [B, n] each. The mask alone says what is padding, so that a pad id may
            be a real token's. Left pads stay (positions count them), right pads are cut off: nothing sees them.
        spans
            One mapping a row (or None), as for :meth:`from_ids`; positions are those of the row as given.
        tokenizer
            As for :meth:`from_ids`.

        Raises
        ------
        PromptError
            Without ``attention_mask``; for padding inside a row, a row of padding alone, or spans that do not fit.

        Examples
        --------
        >>> batch = {"input_ids": [[7, 8, 0], [5, 6, 9]], "attention_mask": [[1, 1, 0], [1, 1, 1]]}
        >>> [prompt.ids.tolist() for prompt in Prompt.from_batch(batch)]
        [[7, 8], [5, 6, 9]]
        """
        rows = batches.rows(encoded)
        named = [None] * len(rows) if spans is None else list(spans)
        if len(named) != len(rows):
            raise PromptError(f"a batch of {len(rows)} rows has {len(named)} mappings of spans; allowed: one a row")
        prompts = []
        for number, ((ids, mask), some) in enumerate(zip(rows, named, strict=True)):
            try:
                prompts.append(cls.from_ids(ids, some, attention_mask=mask, tokenizer=tokenizer))
            except PromptError as error:
                raise PromptError(f"row {number} of the batch: {error}") from None
        return prompts

    def tokens(self, model: Any) -> list[str]:
        """Every id as a readable string; a token that is part of a character shows its raw vocabulary entry."""
        strings = [alignment.decode(model.tokenizer, [token]) for token in self.ids.tolist()]
        raw = model.tokenizer.convert_ids_to_tokens(self.ids.tolist())
        return [piece if alignment.PARTIAL in shown else shown for shown, piece in zip(strings, raw, strict=True)]

    def extended(self, ids: Any) -> Prompt:
        """The same prompt and spans with more ids behind it (``text`` is no longer known)."""
        import torch

        return Prompt(torch.cat([self.ids, _id_tensor(ids)]), dict(self.spans), self.pad, None)

    def continuation(self, model: Any, text: str) -> tuple[int, ...]:
        """Ids that continue this prompt exactly as tokenising prompt and ``text`` in one go would.

        Raises
        ------
        PromptError
            If the prompt's text is not known, or the tokenizer joins characters across the border.
        """
        if self.text is None:
            raise PromptError("this prompt does not know its text: build it with Prompt.from_text")
        whole = encoding.Rendered(self.text + text, 0, (0, 0), chat=True)
        ids, own = encoding.encode(model.tokenizer, whole, bos=False, offsets=False).body, self.ids.tolist()
        fits = (k for k in range(len(own)) if own[k] == ids[0] and tuple(own[k:]) == ids[: len(own) - k])
        lead = next(fits, None)  # special tokens before the text
        if lead is None or not text:
            raise PromptError(f"the tokenizer does not keep the prompt's tokens before {text[:40]!r}: no exact border")
        return ids[len(own) - lead :]


def _id_tensor(ids: Any) -> torch.Tensor:
    """``ids`` as a one-dimensional LongTensor on the CPU, or a PromptError that says what they are."""
    import torch

    try:
        tensor = torch.as_tensor(ids).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise PromptError(f"ids must be one-dimensional whole numbers: {error}") from None
    if tensor.ndim != 1 or tensor.numel() == 0:
        raise PromptError(f"ids have shape {list(tensor.shape)}, must be one-dimensional with at least one id")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise PromptError(f"ids are {tensor.dtype}, must be whole numbers")
    if int(tensor.min()) < 0:
        raise PromptError(f"ids hold {int(tensor.min())}, must be 0 or more")
    return tensor.long().clone()  # a prompt must not change with the caller's tensor


def _left_pads(attention_mask: Any, n: int) -> int:
    """Number of zeros before the ones of an attention mask."""
    if attention_mask is None:
        return 0
    try:
        mask = [float(value) for value in attention_mask]
    except (TypeError, ValueError, RuntimeError):
        raise PromptError(
            f"attention_mask must be {n} values, 0s (left padding) and then 1s, in one dimension"
        ) from None
    pads = mask.index(1.0) if 1.0 in mask else n
    if len(mask) != n or mask != [0.0] * pads + [1.0] * (n - pads) or pads == n:
        shown = ", ".join(f"{value:g}" for value in mask[:12]) + (", …" if len(mask) > 12 else "")
        raise PromptError(f"attention_mask is [{shown}] for {n} ids, must be left padding: {n} values, 0s and then 1s")
    return pads


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    if max(ids) >= len(tokenizer):
        raise PromptError(f"ids hold {max(ids)}, must be less than the tokenizer's {len(tokenizer)}")
    return alignment.decode(tokenizer, ids)


def _token_span(wanted: Wanted, label: str, ids: list[int], pad: int, tokenizer: Any, text: str | None) -> Range:
    """A token span given as such, or as a substring of the decoded ids."""
    if not isinstance(wanted, str):
        return alignment.bounds(wanted, pad + len(ids), label, "tokens", pad)
    if text is None:
        raise PromptError(f"span {label!r} is the text {wanted!r}: give (start, stop) tokens, or pass tokenizer=")
    start, stop = alignment.align(tokenizer, text, ids, [alignment.resolve(text, wanted, label)])[0]
    return start + pad, stop + pad


def _check_length(n: int, limit: int | None) -> None:
    if limit is not None and n > limit:
        raise PromptError(f"the text has {n} tokens, the model reads at most {limit}")
