"""How does a task's score fall as the cache shrinks, and does a second stage (CriticalKV) hold it up?

    python analyses/fig2_eviction_scores.py --out out/fig2

Writes ``rows.parquet`` (score of every policy and size), ``pairs.parquet`` (the second stage against none, within
items), ``answers.parquet``, the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.curves import Result, Settings

NAME = "fig2_eviction_scores"
TASKS = ("niah_single_1", "niah_multikey_1")
SETTINGS = ("context", "joint")
POLICIES = ("snapkv", "snapkv+two_stage", "adakv", "adakv+two_stage", "streaming", "random", "oracle")
CACHES = ("0.1", "0.2", "0.3", "0.4", "0.6")
ASKED = {"context": "question unseen at compression", "joint": "question compressed with the context"}
PAPER = (
    "The paper (CriticalKV, arXiv 2502.03805, Figure 2) reports higher scores with the second stage than without, at "
    "the same budget, of models of 7B parameters and more at longer contexts. A small model need not replicate it."
)


def compute(model: Any, **asked: Any) -> pd.DataFrame:
    """Mean score of every task × setting × policy × cache, with its interval.

    Parameters
    ----------
    model
        A loaded model.
    **asked
        As :func:`plans` takes it: tasks, settings, policies, caches, items, length, seed.

    Returns
    -------
    DataFrame
        ``task``, ``setting``, ``policy``, ``cache``, ``kept`` (share of the entries, as counted), ``score`` in [0, 1]
        with ``ci_low``, ``ci_high`` (95 % over items), ``n``, ``method``, ``delta_logprob`` (nats; the gold answer
        against the whole cache). The whole cache is the policy ``full`` at cache 1. ``attrs["about"]``: model, length,
        seed, semantics, seconds.
    """
    return rows(model, answer(model, plans(model, **asked)))


def plans(
    model: Any,
    tasks: Sequence[str] = TASKS,
    settings: Sequence[str] = SETTINGS,
    policies: Sequence[str] = POLICIES,
    caches: Sequence[str] = CACHES,
    items: int = 8,
    length: int = 1500,
    seed: int = 0,
) -> list[Settings]:
    """One run a task × setting, each checked: an hour must not end in a mistake that was there at its beginning."""
    from kvprobe import curves, eviction

    chosen = tuple(eviction.policy(name, seed=seed) for name in policies)
    asked = [
        curves.Settings(chosen, tuple(caches), task, length, items, seed, setting)
        for task in tasks
        for setting in settings
    ]
    for plan in asked:
        curves.validate(model, plan)
    return asked


def answer(model: Any, asked: Sequence[Settings]) -> list[Result]:
    """Run them one after the other."""
    from kvprobe import curves

    return [curves.run(model, plan, _progress(f"{plan.task} {plan.setting}")) for plan in asked]


def rows(model: Any, results: Sequence[Result]) -> pd.DataFrame:
    """The table of :func:`compute`."""
    table = joined(results, _rows)
    first = results[0].settings
    table.attrs["about"] = {
        "model": model.name,
        "length": first.length,
        "seed": first.seed,
        "semantics": list(dict.fromkeys(result.settings.semantics for result in results)),
        "seconds": sum(result.summary["timings_s"]["items_s"] for result in results),
    }
    return table


def joined(results: Sequence[Result], table_of: Callable[[Result], pd.DataFrame]) -> pd.DataFrame:
    """One table of all results, with task and setting in front."""
    import pandas as pd

    parts = [table_of(result) for result in results]
    for part, result in zip(parts, results, strict=True):
        part.insert(0, "task", result.settings.task)
        part.insert(1, "setting", result.settings.setting)
    return pd.concat(parts, ignore_index=True)


def plot(df: pd.DataFrame) -> Figure:
    """One panel a task × setting, score against cache, all policies in one legend."""
    from kvprobe.plots.style import styled

    return styled(_drawn)(df)


def _drawn(df: pd.DataFrame) -> Figure:
    from kvprobe.plots import headline, score_curves, sheet
    from kvprobe.plots.style import plural

    tasks, settings = list(dict.fromkeys(df["task"])), list(dict.fromkeys(df["setting"]))
    figure = sheet(height=1.6 + 2.6 * len(tasks))
    handles: list[Any] = []
    for place, (task, setting) in enumerate((task, setting) for task in tasks for setting in settings):
        ax = figure.add_subplot(len(tasks), len(settings), place + 1)
        mine = df[(df["task"] == task) & (df["setting"] == setting)]
        full = mine[mine["policy"] == "full"].iloc[0].to_dict()
        handles = score_curves(ax, mine[mine["policy"] != "full"], full)
        ax.set_title(f"{task}: {ASKED[setting]}")
        ax.label_outer()
    about = df.attrs["about"]
    headline(
        figure,
        "Task score against cache budget",
        f"{about['model']}, {plural(int(df['n'].max()), 'item')} a point, length {about['length']}, "
        f"seed {about['seed']}. The compressed part is prefilled exactly, then evicted.",
        "Mean over items with its 95 % interval (t or BCa; Clopper–Pearson where all items agree); dotted: full cache, "
        "grey its interval. "
        "Dashed and hollow: without the second stage. oracle knows the question and the answer.",
        handles,
        ncols=4,
    )
    return figure


def main(words: Sequence[str] | None = None) -> int:
    """Compute, draw, print and, with ``--out``, write a run folder."""
    given = _parser().parse_args(words)
    from kvprobe import records
    from kvprobe.errors import KVProbeError
    from kvprobe.models import load

    asked = {key: value for key, value in vars(given).items() if key not in ("model", "out")}
    try:
        model = load(given.model)
        planned = plans(model, **asked)  # an earlier run's folder is not touched before the input is accepted
        if given.out is None:
            report(model, answer(model, planned))
            return 0
        with records.run(given.out, command=NAME, arguments=vars(given), seed=given.seed, model=given.model) as run:
            results = answer(model, planned)
            table = report(model, results)
            run.table(joined(results, lambda result: result.answers()), "answers.parquet")
            run.table(joined(results, lambda result: result.pairs()), "pairs.parquet")
            run.table(table, "rows.parquet")
            run.figure(plot(table), f"{NAME}.png")
            policies = [policy.to_dict() for policy in planned[0].policies]
            run.update(weight_processing=model.report.processing, policies=policies, **table.attrs["about"])
    except KVProbeError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    return 0


def _rows(result: Result) -> pd.DataFrame:
    """The rows of a result with the whole cache as one of them."""
    import pandas as pd

    full = {"policy": "full", "cache": 1.0, "delta_logprob": 0.0} | result.summary["full"]
    whole = pd.DataFrame([{key: value for key, value in full.items() if key != "logprob"}])
    return pd.concat([whole, result.rows()], ignore_index=True)


def _progress(what: str) -> Any:
    def bar(items: Iterable[int]) -> Iterable[int]:
        from tqdm import tqdm

        return tqdm(items, desc=what, unit="item", disable=not sys.stderr.isatty())

    return bar


def report(model: Any, results: Sequence[Result]) -> pd.DataFrame:
    """Print the tables for a person; returns the one of :func:`compute`."""
    table = rows(model, results)
    for result, (_, group) in zip(results, table.groupby(["task", "setting"], sort=False), strict=True):
        about = result.settings
        cells = {
            (row.policy, f"{row.cache:g}"): f"{row.score:.2f} [{row.ci_low:.2f}, {row.ci_high:.2f}]"
            for row in group.itertuples()
        }
        print(f"\n{about.task}, {about.items} items of length {about.length}, {ASKED[about.setting]}")
        print(f"whole cache {cells.pop(('full', '1'))}")
        _print_cells(cells)
    _print_pairs(joined(results, lambda result: result.pairs()))
    print(f"\n{PAPER}\n{table.attrs['about']['seconds']:.0f} s")
    return table


def _print_cells(cells: dict[tuple[str, str], str]) -> None:
    caches = list(dict.fromkeys(cache for _, cache in cells))
    print(f"{'policy':20s}" + "".join(f"{cache:>20s}" for cache in caches))
    for policy in dict.fromkeys(policy for policy, _ in cells):
        print(f"{policy:20s}" + "".join(f"{cells[policy, cache]:>20s}" for cache in caches))


def _print_pairs(pairs: pd.DataFrame) -> None:
    if pairs.empty:
        return
    print("\nSecond stage against none, within items: score, and ln p of the gold answer (nats)")
    for row in pairs.itertuples():
        print(
            f"{row.task:18s}{row.setting:9s}{row.policy:20s}{row.cache:5g} {row.measure:8s} {row.difference:+7.2f} "
            f"[{row.ci_low:+.2f}, {row.ci_high:+.2f}]  p {row.p_sign_flip:.3f} (smallest {row.p_attainable:.3f})"
        )


def _parser() -> argparse.ArgumentParser:
    def names(text: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name that kvprobe.load understands (%(default)s)")
    for option, default in (("tasks", TASKS), ("settings", SETTINGS), ("policies", POLICIES), ("caches", CACHES)):
        parser.add_argument(f"--{option}", type=names, default=default, help=f"comma-separated ({','.join(default)})")
    for option, value in (("items", 8), ("length", 1500), ("seed", 0)):
        parser.add_argument(f"--{option}", type=int, default=value, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for tables, figure and manifest")
    return parser


if __name__ == "__main__":
    sys.exit(main())
