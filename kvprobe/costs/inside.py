"""What attention holds while it works: kvprobe's own arithmetic (:mod:`kvprobe.attention`, :mod:`kvprobe.twopart`)."""

from __future__ import annotations

from dataclasses import dataclass

from kvprobe.layerspec import LayerSpec

Heads = tuple[int, int, int, int]
"""(H, K, d, d_v) of one layer."""


@dataclass(frozen=True)
class Setting:
    """One pass: B × t rows over a shared prefix and each arm's own keys.

    Attributes
    ----------
    batch, rows
        B arms of t rows.
    prefix, own
        Keys shared by all arms, and each arm's own at the end of the last pass.
    limit
        Bytes of logits that are worked on at once.
    masked
        Some keys carry a bias.
    item
        Bytes of one number of the model.
    """

    batch: int
    rows: int
    prefix: int
    own: int
    limit: int
    masked: bool = False
    item: int = 4


def inside_bytes(setting: Setting, spec: LayerSpec, heads: Heads) -> int:
    """Bytes beside the result of one layer's attention, at their highest."""
    if not spec.plain or setting.masked or setting.prefix:
        return _two_parts(setting, spec, heads)
    if setting.own > setting.rows:
        return _continued(setting, heads)
    return setting.batch * setting.rows * heads[0] * heads[3] * setting.item  # SDPA's result, before it is laid out


def _two_parts(setting: Setting, spec: LayerSpec, heads: Heads) -> int:
    """Logits, distances (int64) and their signs, fp32 operands, rows; under a bias up to 3¼ copies of the logits.

    A bias gathers the logits that it meets, adds, reads back and compares: all of them, where it touches every key.
    """
    n_heads, kv_heads, d, d_v = heads
    keys = setting.prefix + setting.own
    rows = min(max(16, setting.limit // (4 * n_heads * keys)), setting.batch * setting.rows)
    at_once = min(rows, setting.rows)
    seen = keys if spec.window is None else min(keys, spec.window + at_once - 1)
    copies = 0 if setting.item == 4 else 4 * kv_heads * (d + d_v) * (setting.prefix + setting.batch * setting.own)
    logits = 4 * n_heads * rows * seen
    return (
        logits
        + (13 * logits // 4 if setting.masked else 0)
        + 10 * at_once * seen
        + copies
        + 8 * rows * n_heads * (d + d_v)
    )


def _continued(setting: Setting, heads: Heads) -> int:
    """The mask of one block of rows (as it is built, and as SDPA's additive one), and the block's rows."""
    n_heads, kv_heads, d, d_v = heads
    group = n_heads // kv_heads
    block = min(max(16, setting.limit // (4 * group * setting.own)), setting.rows)
    return 6 * block * group * setting.own + 2 * block * n_heads * (d + d_v) * setting.item
