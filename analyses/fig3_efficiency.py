"""What does choosing entries cost before the first token, and what does a smaller cache save after it?

    python analyses/fig3_efficiency.py --out out/fig3

Three parts, each as ratios of contenders that run in turn in one process: time to the first token with and without a
selection, a decoding step behind a whole and behind a compacted cache, and a prefill in chunks that evicts after each
or never. Writes ``rows.parquet``, the figure and a manifest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "fig3_efficiency"
BENCH = Path(__file__).resolve().parents[1] / "kernels" / "bench"
TTFT_TOKENS, TOKENS, BATCHES, CHUNKS = (1024, 2048, 4096), 4096, (1, 4), ("256", "512", "1024", "whole")
WHOLE = "whole"
SELECTIONS = {
    "snapkv": {},
    "snapkv+two_stage, L1": {"selector": "two_stage", "p": 1},
    "snapkv+two_stage, L2": {"selector": "two_stage", "p": 2},
}
PAPER = (
    "The paper (CriticalKV, arXiv 2502.03805) reports, of Llama-3.1-8B on an A100: 1.7 % on the time to the first "
    "token (32K tokens, batch 1), a step 2.49 times as fast (batch 4, 32K tokens, 40 % cache), and a prefill of 128K "
    "tokens in chunks of 30K in 22.48 s instead of 30.57 s (50 % cache). Another model, length and machine."
)


def compute(
    model: Any,
    ttft_tokens: Sequence[int] = TTFT_TOKENS,
    tokens: int = TOKENS,
    batches: Sequence[int] = BATCHES,
    chunks: Sequence[str] = CHUNKS,
    decode_cache: str = "0.4",
    chunk_cache: str = "0.5",
    steps: int = 8,
    rounds: int = 5,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> pd.DataFrame:
    """Seconds of every contender, and ratios to the baseline of its group, round by round.

    Each group passes a correctness gate first: timing a pass changes nothing that it keeps; the decoding loop's logits
    are those of the same tokens behind masks; a chunked prefill without eviction predicts what a plain one does, and
    with eviction every head holds exactly what was asked for.

    Parameters
    ----------
    ttft_tokens
        Context lengths of the first part.
    tokens, batches, steps
        Context length of the other parts; rows decoded at once; steps a round.
    chunks
        Tokens a chunk, or ``"whole"``.
    decode_cache, chunk_cache
        Shares that stay.

    Returns
    -------
    DataFrame
        ``part`` (``ttft``, ``decode``, ``chunked``), ``tokens``, ``batch``, ``chunk``, ``contender``, ``seconds``
        (median; a step's where ``part`` is ``decode``), ``baseline_s``, ``ratio`` (median over rounds of seconds /
        baseline, with the smallest and largest round ``ratio_low``, ``ratio_high``), ``own_s``, ``own_ratio`` (of a
        selection: its own seconds inside one pass, and over the rest of that pass), ``cache_mib`` (keys and values:
        before the first step, after the last chunk), ``max_abs_diff`` (logits, of the gate), ``rounds``.
    """
    import pandas as pd

    bench = _bench()
    jobs = [partial(_ttft, bench, model, n, rounds) for n in ttft_tokens]
    jobs += [partial(_decode, bench, model, tokens, batch, decode_cache, steps, rounds) for batch in batches]
    jobs += [partial(_chunked, bench, model, tokens, chunk, chunk_cache, rounds) for chunk in chunks]
    table = pd.DataFrame([row for job in progress(jobs) for row in job()], columns=list(_row("", 0, "", [], [])))
    table.attrs["about"] = _about(model) | {"decode_cache": decode_cache, "chunk_cache": chunk_cache}
    return table


def _bench() -> Any:
    """The contenders and gates of ``make bench`` (``kernels/bench/eviction.py``), timed here at other sizes."""
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    import eviction

    return eviction


def _about(model: Any) -> dict[str, Any]:
    import torch

    threads = torch.get_num_threads()
    return {"model": model.name, "dtype": model.meta["dtype"], "device": model.device.type, "threads": threads}


def _ttft(bench: Any, model: Any, n: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Prefill alone against prefill + scores + norms + selection."""
    from kvprobe import eviction

    ids = bench.text_ids(model, n)
    for name, options in SELECTIONS.items():
        selection = bench.Selection(model, ids, eviction.policy("snapkv", **options))
        selection.gate()
        found = selection.rounds(rounds)
        plain, whole = ([row[key] for row in found] for key in ("prefill_s", "whole_s"))
        own = {
            "own_s": statistics.median(row["own_s"] for row in found),
            "own_ratio": statistics.median(row["own_s"] / row["rest_s"] for row in found),
        }
        yield _row("ttft", len(ids), name, whole, plain, **own)


def _decode(
    bench: Any, model: Any, n: int, batch: int, cache: str, steps: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """One loop behind both caches."""
    from kvprobe import eviction

    decoding = bench.Decoding(model, n, batch, eviction.policy("snapkv+two_stage"), cache, steps)
    gate, found = decoding.gate(), decoding.rounds(rounds)
    full = [row["full"] for row in found]
    for which in decoding.layers:
        facts = {"batch": batch, "cache_mib": decoding.n_bytes(which) / 2**20, "max_abs_diff": gate}
        yield _row("decode", decoding.n, which, [row[which] for row in found], full, **facts)


def _chunked(bench: Any, model: Any, n: int, chunk: str, cache: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The same chunks without eviction, and with two policies."""
    chunking = bench.Chunking(model, bench.text_ids(model, n), None if chunk == WHOLE else int(chunk), cache)
    gate, found = chunking.gate(), chunking.rounds(rounds)
    full = [row["full"] for row in found]
    for name, n_bytes in chunking.n_bytes.items():
        facts = {"chunk": chunk, "cache_mib": n_bytes / 2**20, "max_abs_diff": gate if name == "full" else None}
        yield _row("chunked", len(chunking.ids), name, [row[name] for row in found], full, **facts)


def _row(
    part: str, tokens: int, contender: str, seconds: Sequence[float], baseline: Sequence[float], **facts: Any
) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(seconds, baseline, strict=True)] or [float("nan")]
    return {
        "part": part,
        "tokens": tokens,
        "batch": 1,
        "chunk": "",
        "contender": contender,
        "seconds": statistics.median(seconds or [float("nan")]),
        "baseline_s": statistics.median(baseline or [float("nan")]),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "own_s": None,
        "own_ratio": None,
        "cache_mib": None,
        "max_abs_diff": None,
        "rounds": len(seconds),
    } | facts


def plot(df: pd.DataFrame) -> Figure:
    """Three panels: the overhead on the first token, a decoding step, a prefill in chunks."""
    from kvprobe.plots.style import styled

    return styled(_drawn)(df)


def _drawn(df: pd.DataFrame) -> Figure:
    from kvprobe.plots import headline, sheet
    from kvprobe.plots.style import plural

    about, figure = df.attrs["about"], sheet(height=4.6)
    axes = figure.subplots(1, 3)
    ttft, decode, chunked = (df[df["part"] == part] for part in ("ttft", "decode", "chunked"))
    handles = _draw_selection(axes[0], ttft)
    handles |= _draw_bars(axes[1], decode, "batch", 1e3) | _draw_bars(axes[2], chunked, "chunk", 1.0)
    axes[0].set(title="Selection beside the prefill", xlabel="context tokens", ylabel="time on top")
    axes[1].set(title=_title("Step behind", decode, about["decode_cache"]), xlabel="rows", ylabel="ms a step")
    axes[2].set(title=_title("Prefill of", chunked, about["chunk_cache"]), xlabel="tokens a chunk", ylabel="seconds")
    headline(
        figure,
        "What eviction costs, and what it saves",
        f"{about['model']}, {about['dtype']}, {about['device']} with {plural(about['threads'], 'thread')}; medians of "
        f"{plural(int(df['rounds'].min()), 'round')} in one process.",
        "Left: the selection's own seconds over the rest of the same pass; crosses: a whole pass over a prefill, − 1. "
        "Middle and right: seconds over those with the whole cache (×), and MiB of keys and values (before the first "
        "step; after the last chunk).",
        list(handles.values()),
        ncols=6,
    )
    return figure


def _title(what: str, rows: pd.DataFrame, cache: str) -> str:
    return f"{what} {int(rows['tokens'].max()):,} tokens, {100 * float(cache):g} % kept"


def _draw_selection(ax: Axes, rows: pd.DataFrame) -> dict[str, Any]:
    from matplotlib.ticker import PercentFormatter

    handles = {}
    for name, mine in rows.groupby("contender", sort=False):
        look, places = _look(str(name)), [str(n) for n in mine["tokens"]]
        ax.plot(places, mine["ratio"] - 1, "x", markersize=4, alpha=0.6, **look)
        (handles[str(name)],) = ax.plot(places, mine["own_ratio"], marker="o", markersize=5, label=name, **look)
    ax.axhline(0, color="#595959", linewidth=0.6)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    return handles


def _draw_bars(ax: Axes, rows: pd.DataFrame, group: str, scale: float) -> dict[str, Any]:
    """Bars side by side, ratio and MiB above each."""
    groups, names = (list(dict.fromkeys(rows[column])) for column in (group, "contender"))
    width, handles = 0.8 / len(names), {}
    text = {"textcoords": "offset points", "rotation": 90, "fontsize": 7, "ha": "center", "va": "bottom"}
    for place, name in enumerate(names):
        mine = rows[rows["contender"] == name]
        at = [groups.index(value) + width * (place - (len(names) - 1) / 2) for value in mine[group]]
        handles[name] = ax.bar(at, mine["seconds"] * scale, width * 0.92, label=name, **_look(name))
        for x, (_, row) in zip(at, mine.iterrows(), strict=True):
            ratio = "" if name == "full" else f"×{row['ratio']:.2f}, "
            ax.annotate(f"{ratio}{row['cache_mib']:.3g} MiB", (x, row["seconds"] * scale), (0, 3), **text)
    ax.set_xticks(range(len(groups)), [str(value) for value in groups])
    ax.set_ylim(0, 1.55 * scale * float(rows["seconds"].max()))  # room for what is written above the bars
    return handles


def _look(name: str) -> dict[str, Any]:
    from kvprobe.plots.budgets import COLOURS

    own = {"full": "#9A9A9A", "snapkv": COLOURS[0], "compacted": COLOURS[2], "snapkv+two_stage, L2": COLOURS[4]}
    return {"color": own.get(name, COLOURS[1])}


def report(table: pd.DataFrame) -> None:
    """Print the table for a person."""
    about = table.attrs["about"]
    print("{model}, {dtype}, {device}, {threads} thread(s); ratio: to the first row of its group".format(**about))
    digits = {"seconds": 4, "ratio": 3, "ratio_low": 3, "ratio_high": 3, "own_ratio": 3, "cache_mib": 1}
    shown = table.drop(columns=["baseline_s", "own_s", "max_abs_diff"]).astype(dict.fromkeys(digits, float))
    print(shown.round(digits).to_string(index=False, na_rep=""))
    print(f"\n{PAPER}")


def main(words: Sequence[str] | None = None) -> int:
    """Compute, draw, print and, with ``--out``, write a run folder."""
    given = _parser().parse_args(words)
    from kvprobe import records
    from kvprobe.errors import KVProbeError
    from kvprobe.models import load

    asked = {key: value for key, value in vars(given).items() if key not in ("model", "out")} | {"progress": _progress}
    try:
        model = load(given.model)
        if given.out is None:
            report(compute(model, **asked))
            return 0
        with records.run(given.out, command=NAME, arguments=vars(given), model=given.model) as run:
            table = compute(model, **asked)
            run.table(table, "rows.parquet")
            run.figure(plot(table), f"{NAME}.png")
            run.update(weight_processing=model.report.processing, **table.attrs["about"])
            report(table)
    except KVProbeError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    return 0


def _progress(jobs: Iterable[Any]) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(jobs, desc="measurements", disable=not sys.stderr.isatty())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name that kvprobe.load understands (%(default)s)")
    options = {
        "ttft_tokens": (partial(_list, int), TTFT_TOKENS, "context lengths of the first part, comma-separated"),
        "tokens": (int, TOKENS, "context length of the others"),
        "batches": (partial(_list, int), BATCHES, "rows decoded at once, comma-separated"),
        "chunks": (partial(_list, str), CHUNKS, f"tokens a chunk or {WHOLE}, comma-separated"),
        "decode_cache": (str, "0.4", "share that stays while decoding"),
        "chunk_cache": (str, "0.5", "share that stays after each chunk"),
        "steps": (int, 8, "decoding steps a round"),
        "rounds": (int, 5, "rounds of every measurement"),
    }
    for option, (kind, default, text) in options.items():
        flag = "--" + option.replace("_", "-")
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for table, figure and manifest")
    return parser


def _list(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    return tuple(kind(part.strip()) for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(main())
