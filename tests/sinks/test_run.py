"""The experiment on a tiny model that reads bytes: every number of a summary against loops over the scores."""

import numpy as np
import pytest

from kvprobe import observe, sinks
from kvprobe.errors import KVProbeError, TaskError, TheoryError
from kvprobe.sinks.settings import from_command

WORDS = "The heron stood in the reeds and watched a slow grey river turn under the bridge."
OPTIONS = {"tokens_to_generate": 16, "distractors": 3, "decoys": 1}
TEXTS = [f"{WORDS} {number} {WORDS}" for number in range(3)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    import tiny

    from kvprobe.models import load

    return load(tiny.save("llama", tmp_path_factory.mktemp("reader"), max_position_embeddings=4096))


@pytest.fixture(scope="module")
def made(reader):
    settings = sinks.Settings(items=2, length=1300, options=OPTIONS, epsilons=(0.0, 1e-2), exclude_layers=(1,))
    return settings, sinks.run(reader, settings)


@pytest.fixture(scope="module")
def documents(reader):
    settings = sinks.Settings(task=None, docs=TEXTS, threshold=0.2)
    return settings, sinks.run(reader, settings)


def scores_of(reader, settings, index):
    """Made again from a trace of question and answer rows; layers 0 and 2 are left in."""
    case = settings.cases(reader)[index]
    rows = list(range(case.context_stop, len(case.prompt) + len(case.answer_ids)))
    found = sinks.scores(observe(reader, case.whole, rows))
    return case, found.mass[[0, 2]], found.norms[[0, 2]], found.seen[[0, 2]]


def test_buckets_are_what_loops_say(reader, made):
    settings, result = made
    for index, probe in enumerate(result.probes):
        case, mass, norms, seen = scores_of(reader, settings, index)
        names = probe.tokens["bucket"].to_numpy()
        n_rows = probe.facts["n_rows"]
        assert set(names) <= {"first4", "evidence", "secondary_sink", "other", "recent"}
        ((start, stop),) = case.evidence
        assert (names[start:stop] == "evidence").all() and (names[:4] == "first4").all()
        assert set(names[case.context_stop :]) <= {"recent", "secondary_sink"}
        for name, row in probe.pooled.items():
            keys = np.flatnonzero(names == name)
            spent = sum(mass[..., key] * seen[:, None, key] / n_rows for key in keys)
            output = sum(mass[..., key] * norms[..., key] * seen[:, None, key] / n_rows for key in keys)
            value_mass = sum((mass[..., key] + settings.epsilon) * norms[..., key] for key in keys)
            assert row["share"] == pytest.approx(spent.mean()) and row["n_tokens"] == len(keys)
            assert row["ratio"] == pytest.approx(output.sum() / spent.sum())
            assert row["mass"] == pytest.approx(mass[..., keys].sum(-1).mean())
            assert row["value_mass"] == pytest.approx(value_mass.mean())
        assert sum(row["share"] for row in probe.pooled.values()) == pytest.approx(1, abs=1e-5)


def test_means_over_items_and_their_intervals(made):
    _, result = made
    found = result.summary["buckets"]["evidence"]
    values = [probe.pooled["evidence"]["ratio"] for probe in result.probes]
    assert found["ratio"] == pytest.approx(np.mean(values)) and found["n"] == 2
    assert found["ci"]["ratio"][0] < found["ratio"] < found["ci"]["ratio"][1]
    assert result.summary["buckets"]["learned_sink"] is None and result.summary["learned_sink"] is None


def test_the_first_position(reader, made):
    settings, result = made
    masses, ratios, relative = [], [], []
    for index in range(2):
        _, mass, norms, _ = scores_of(reader, settings, index)
        masses.append(mass[..., 0].mean())
        ratios.append((mass[..., 0] * norms[..., 0]).sum() / mass[..., 0].sum())
        relative.append((norms[..., 0] / np.median(norms, axis=-1)).mean())
    row = result.summary["first_position"]
    assert row["mass"] == pytest.approx(np.mean(masses)) and row["ratio"] == pytest.approx(np.mean(ratios))
    assert row["relative_norm"] == pytest.approx(np.mean(relative)) and row["n"] == 2
    assert [each["place"] for each in result.summary["positions"]] == [0, 1, 2, 3]


def above(values, evidence, first):
    """Pair by pair; the same byte has the same value in layer 0, a tie."""
    return np.mean([[(values[e] > values[f]) + 0.5 * (values[e] == values[f]) for f in first] for e in evidence])


def test_auroc_counts_pairs_with_the_evidence_higher(reader, made):
    settings, result = made
    pooled, heads = [], []
    for index, probe in enumerate(result.probes):
        case, mass, norms, _ = scores_of(reader, settings, index)
        evidence, first = range(*case.evidence[0]), range(4)
        ratio = (mass * norms).sum((0, 1)) / mass.sum((0, 1))
        pooled.append(above(ratio, evidence, first))
        each = [above(m, evidence, first) for layer in norms for m in layer]
        heads.append(np.mean(each))
        assert probe.auroc["pooled"]["ratio"] == pytest.approx(pooled[-1])
        assert probe.auroc["first_position"]["ratio"] == pytest.approx(above(ratio, evidence, [0]))
    found = result.summary["auroc_ratio_first4_vs_evidence"]
    assert found["mean"] == pytest.approx(np.mean(pooled)) and (found["n"], found["higher"]) == (2, "evidence")
    assert result.summary["auroc"]["ratio"] == found
    assert result.summary["auroc_heads"]["norm"]["mean"] == pytest.approx(np.mean(heads))


def test_sinky_heads_are_counted_in_the_layers_left_in(reader, made):
    settings, result = made
    shares = [(scores_of(reader, settings, index)[1][..., 0] > 0.3).mean() for index in range(2)]
    row = result.summary["heads_sinky"]
    assert row["share"] == pytest.approx(np.mean(shares)) and (row["threshold"], row["n_heads"]) == (0.3, 12)
    assert result.summary["layers"]["layer"] == [0, 1, 2] and result.summary["layers"]["excluded"] == [1]


def test_every_epsilon_has_a_verdict_that_follows_from_its_numbers(reader, made):
    settings, result = made
    for place, row in enumerate(result.summary["epsilon_sweep"]):
        assert row["epsilon"] == settings.epsilons[place]
        values = {"evidence": [], "first4": []}
        for index in range(2):
            case, mass, norms, _ = scores_of(reader, settings, index)
            keys = {"evidence": list(range(*case.evidence[0])), "first4": [0, 1, 2, 3]}
            for name, chosen in keys.items():
                values[name].append(((mass + row["epsilon"]) * norms)[..., chosen].sum(-1).mean())
        difference = np.subtract(values["evidence"], values["first4"])
        assert row["difference"]["value_mass"]["mean"] == pytest.approx(difference.mean())
        for name, middle in (("value_mass", 0.0), ("value_mass_per_token", 0.0), ("value_per_mass", 0.0)):
            found, verdict = row["difference"][name], row["verdict"][name]
            low, high = found["ci_low"], found["ci_high"]
            assert verdict == ("evidence" if low > middle else "first4" if high < middle else "open")
    first = result.summary["epsilon_sweep"][0]
    ratios = [result.summary["buckets"][name]["ratio"] for name in ("evidence", "first4")]
    assert first["difference"]["value_per_mass"]["mean"] == pytest.approx(ratios[0] - ratios[1])
    assert first["spearman_value_mass"] == pytest.approx(1) and first["spearman_ratio_norm"] == pytest.approx(1)


def test_after_and_courses_respect_the_rule_and_the_evidence(made):
    _, result = made
    after, courses = result.summary["after"], result.summary["courses"]
    corrected = after["readings"]["corrected"]["evidence"]
    assert corrected["share_change"]["mean"] == pytest.approx(-result.summary["buckets"]["evidence"]["share"])
    assert corrected["share_after"] == 0 and corrected["ratio_after"] is None
    assert after["readings"]["conditional"]["evidence"]["share_change"]["mean"] == 0
    conditional = after["readings"]["conditional"].values()
    assert sum(row["share_change"]["mean"] for row in conditional) == pytest.approx(0, abs=1e-5)
    table = result.tables()["courses"]
    kept = table[(table["layer"] != 1) & (table["token"] == 0) & (table["bucket"] == "evidence")]
    assert courses["buckets"]["evidence"]["mass"][0] == pytest.approx(kept.groupby("item")["mass"].mean().mean())
    assert courses["n"][0] == 2 and {"first4", "question", "generated", "other"} <= set(courses["buckets"])


def test_tables_hold_all_layers_and_every_position(made):
    _, result = made
    tables = result.tables()
    assert set(tables) == {"items", "buckets", "tokens", "sinks", "after", "courses", "secondary", "epsilon"}
    assert set(tables["buckets"]["layer"]) == {0, 1, 2} and len(tables["sinks"]) == 2 * 18
    total = sum(probe.facts["tokens"] for probe in result.probes) + 2 * 8
    assert abs(len(tables["tokens"]) - total) < 16 and len(tables["items"]) == 2 and len(tables["epsilon"]) == 4
    assert all("item" in table or name == "items" for name, table in tables.items())
    assert result.tables()["buckets"].equals(tables["buckets"])


def test_documents_have_no_evidence_and_say_so(documents):
    _, result = documents
    summary = result.summary
    assert (summary["n_items"], summary["unit"], summary["task"], summary["queries"]) == (3, "document", None, "all")
    assert summary["buckets"]["evidence"] is None and summary["after"] is None and summary["courses"] is None
    found = summary["auroc_ratio_first4_vs_evidence"]
    assert found["mean"] is None and found["n"] == 0 and "no evidence" in found["why"]
    assert all(value is None for row in summary["epsilon_sweep"] for value in row["verdict"].values())
    assert not {"after", "courses"} & set(result.tables())
    shares = [summary["buckets"][name]["share"] for name in ("first4", "other") if summary["buckets"][name]]
    assert sum(shares) == pytest.approx(1, abs=0.05)


def test_one_input_has_no_interval(reader):
    result = sinks.run(reader, sinks.Settings(task=None, docs=TEXTS[:1], secondary=False))
    row = result.summary["buckets"]["other"]
    assert row["ci"]["ratio"] == [None, None] and row["n"] == 1 and result.summary["secondary"] is None
    assert result.summary["heads_sinky"]["ci_low"] is None


def test_rows_of_each_kind(reader, made):
    case = made[0].cases(reader)[0]
    n, answer = len(case.prompt), len(case.answer_ids)
    assert case.rows("suffix") == list(range(case.context_stop, n + answer))
    assert case.rows("answer") == list(range(n - 1, n + answer - 1))
    assert case.rows("all") == list(range(n + answer)) and len(case.whole) == n + answer


def test_a_learned_sink_is_a_bucket_of_its_own(tiny):
    result = sinks.run(tiny("gpt_oss"), sinks.Settings(task=None, docs=TEXTS[:2], secondary=False))
    learned = result.summary["buckets"]["learned_sink"]
    assert learned["share"] > 0 and learned["ratio"] == 0 and result.summary["learned_sink"]["n"] == 2
    shares = [row["share"] for row in result.summary["buckets"].values() if row]
    assert sum(shares) == pytest.approx(1, abs=1e-5)


GIVEN = dict.fromkeys(("task", "docs", "items", "documents", "length", "decoys", "distractors", "needles"))
GIVEN |= {"haystack": None, "join": 1, "template": None, "chat": False, "queries": None, "epsilon": 1e-4}
GIVEN |= {"epsilons": None, "threshold": 0.3, "secondary": True, "courses": None, "after": None, "exclude_layers": ""}
GIVEN |= {"norm": 1, "seed": 0}


def test_words_become_settings():
    plain = from_command(GIVEN)
    assert (plain.task, plain.items, plain.length, plain.rows) == ("niah_single_2", 8, None, "suffix")
    assert plain.options == {"decoys": 0} and plain.with_after and plain.with_courses
    docs = from_command(GIVEN | {"docs": "essays", "documents": 6, "epsilons": "0,1e-3", "exclude_layers": "2,0,2"})
    assert (docs.task, docs.rows, docs.documents, docs.with_after) == (None, "all", 6, False)
    assert docs.epsilons == (0.0, 1e-3) and docs.exclude_layers == (0, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"docs": "essays", "task": "niah_single_1"}, "--docs .* --task"),
        ({"documents": 1, "items": 1}, "--documents .* --items"),
        ({"documents": 3}, "--documents goes with --docs; allowed: --docs essays"),
        ({"join": 2}, "--join goes with --docs; allowed: --docs essays"),
        ({"template": "none"}, "--template goes with --docs"),
        ({"chat": True}, "--chat goes with --docs"),
        ({"epsilon": 1e308}, r"epsilon=1e\+308; allowed: a number from 0 to 1e\+06"),
        ({"epsilons": "0,1e7"}, r"epsilon=10000000.0; allowed: a number from 0 to 1e\+06"),
        ({"docs": "essays", "after": True}, "after needs an answer"),
        ({"docs": "essays", "queries": "answer"}, "documents do not have"),
        ({"task": "niah"}, "no task 'niah'"),
        ({"queries": "last"}, "'last'"),
        ({"epsilon": -1.0}, "epsilon=-1"),
        ({"epsilons": "0,x"}, "'0,x'"),
        ({"epsilons": "0,0"}, "each once"),
        ({"threshold": 0.0}, "threshold is 0"),
        ({"exclude_layers": "a"}, "'a'"),
        ({"norm": 3}, "3"),
    ],
)
def test_what_is_refused(words, said):
    with pytest.raises(KVProbeError, match=said):
        from_command(GIVEN | words)


def test_what_a_model_refuses(reader):
    for words, said in (
        ({"exclude_layers": (3,)}, r"\[3\]"),
        ({"exclude_layers": (0, 1, 2)}, "must leave at least one"),
        ({"task": None, "docs": TEXTS, "queries": "suffix", "template": "none"}, "needs a question"),
        ({"length": 9999}, "9999"),
    ):
        with pytest.raises(TaskError, match=said):
            sinks.validate(reader, sinks.Settings(**words))
    with pytest.raises(TheoryError):
        sinks.Settings(p=0)


def test_chat_and_join_go_with_documents():
    plain = from_command(GIVEN | {"docs": "essays", "chat": True, "join": 2, "template": "none", "documents": 1})
    assert (plain.task, plain.docs, plain.chat, plain.join, plain.documents) == (None, "essays", True, 2, 1)
