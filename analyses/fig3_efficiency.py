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
    from kvprobe.plots import headline, sheet

    about = df.attrs["about"]
    figure = sheet(height=4.6)
    parts = {part: df[df["part"] == part] for part in ("ttft", "decode", "chunked")}
    axes = figure.subplots(1, 3)
    handles = _draw_ttft(axes[0], parts["ttft"])
    handles |= _draw_bars(axes[1], parts["decode"], "batch", 1e3, "ms a step")
    handles |= _draw_bars(axes[2], parts["chunked"], "chunk", 1.0, "seconds")
    titles = (
        "Selection: on top of the prefill",
        f"Decoding behind {_tokens(parts['decode'])}, {_percent(about['decode_cache'])} kept",
        f"Prefill of {_tokens(parts['chunked'])}, {_percent(about['chunk_cache'])} kept",
    )
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    headline(
        figure,
        "What eviction costs, and what it saves",
        f"{about['model']}, {about['dtype']}, {about['device']} with {about['threads']} thread(s); medians of "
        f"{int(df['rounds'].min())} rounds in one process.",
        "Left: the selection's own seconds over the rest of the same pass; crosses: whole pass over a prefill − 1, "
        "with its smallest and largest round. Middle and right: the ratio to the whole cache, and MiB of keys and "
        "values held (before the first step; after the last chunk).",
        list(handles.values()),
        ncols=6,
    )
    return figure


def _draw_ttft(ax: Axes, rows: pd.DataFrame) -> dict[str, Any]:
    from matplotlib.ticker import PercentFormatter

    handles = {}
    for name, mine in rows.groupby("contender", sort=False):
        look = _look(str(name))
        places = [str(n) for n in mine["tokens"]]
        difference = mine["ratio"] - 1
        ends = [mine["ratio"] - mine["ratio_low"], mine["ratio_high"] - mine["ratio"]]
        faint = {"color": look["color"], "markersize": 4, "elinewidth": 0.7, "alpha": 0.5}
        ax.errorbar(places, difference, yerr=ends, fmt="x", **faint)
        (handles[str(name)],) = ax.plot(places, mine["own_ratio"], marker="o", markersize=5, label=name, **look)
    ax.axhline(0, color="#595959", linewidth=0.6)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="context tokens", ylabel="time on top")
    return handles


def _draw_bars(ax: Axes, rows: pd.DataFrame, group: str, scale: float, unit: str) -> dict[str, Any]:
    """Bars side by side, ratio and MiB above each."""
    groups, names = (list(dict.fromkeys(rows[column])) for column in (group, "contender"))
    width, handles = 0.8 / len(names), {}
    for place, name in enumerate(names):
        mine = rows[rows["contender"] == name]
        at = [groups.index(value) + width * (place - (len(names) - 1) / 2) for value in mine[group]]
        handles[name] = ax.bar(at, mine["seconds"] * scale, width * 0.92, label=name, **_look(name))
        for x, (_, row) in zip(at, mine.iterrows(), strict=True):
            ratio = "" if name == "full" else f"×{row['ratio']:.2f}, "
            text = f"{ratio}{row['cache_mib']:.3g} MiB"
            ax.annotate(text, (x, row["seconds"] * scale), (0, 3), textcoords="offset points", rotation=90, **_SMALL)
    ax.set_xticks(range(len(groups)), [str(value) for value in groups])
    ax.margins(y=0.45)
    ax.set(xlabel=f"tokens a {group}" if group == "chunk" else group, ylabel=unit)
    return handles


_SMALL = {"fontsize": 7, "ha": "center", "va": "bottom"}


def _look(name: str) -> dict[str, Any]:
    from kvprobe.plots.budgets import COLOURS

    own = {"full": "#9A9A9A", "snapkv": COLOURS[0], "compacted": COLOURS[2], "snapkv+two_stage, L2": COLOURS[4]}
    return {"color": own.get(name, COLOURS[1])}


def _tokens(rows: pd.DataFrame) -> str:
    return f"{int(rows['tokens'].iloc[0]):,} tokens"


def _percent(share: str) -> str:
    return f"{100 * float(share):g} %"


def report(table: pd.DataFrame) -> None:
    """Print the table for a person."""
    about = table.attrs["about"]
    print("{model}, {dtype}, {device}, {threads} thread(s); ratio: to the first row of its group".format(**about))
    columns = ["ratio", "ratio_low", "ratio_high", "own_ratio"]
    shown = table.drop(columns=["baseline_s", "own_s", "max_abs_diff"])
    shown[columns] = shown[columns].astype(float).round(3)
    shown["cache_mib"] = shown["cache_mib"].astype(float).round(1)
    shown["seconds"] = shown["seconds"].round(4)
    print(shown.to_string(index=False, na_rep=""))
    print(f"\n{PAPER}")


def main(words: Sequence[str] | None = None) -> int:
    """Compute, draw, print and, with ``--out``, write a run folder."""
    given = _parser().parse_args(words)
    from kvprobe import records
    from kvprobe.errors import KVProbeError
    from kvprobe.models import load

    asked = {key: value for key, value in vars(given).items() if key not in ("model", "out")}
    try:
        model = load(given.model)
        if given.out is None:
            report(compute(model, progress=_progress, **asked))
            return 0
        with records.run(given.out, command=NAME, arguments=vars(given), model=given.model) as run:
            table = compute(model, progress=_progress, **asked)
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
    lists = {"ttft_tokens": (int, TTFT_TOKENS), "batches": (int, BATCHES), "chunks": (str, CHUNKS)}
    for option, (kind, default) in lists.items():
        shown = ",".join(map(str, default))
        parser.add_argument(
            _flag(option), type=partial(_list, kind), default=default, help=f"comma-separated ({shown})"
        )
    for option, value in (("tokens", TOKENS), ("steps", 8), ("rounds", 5)):
        parser.add_argument(_flag(option), type=int, default=value, help="(%(default)s)")
    for option, value in (("decode_cache", "0.4"), ("chunk_cache", "0.5")):
        parser.add_argument(_flag(option), default=value, help="share that stays (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for table, figure and manifest")
    return parser


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _list(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    return tuple(kind(part.strip()) for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(main())
