"""What both fuzz tests throw at kvprobe, and the law that what it answers must keep."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

from hypothesis import strategies as st

from kvprobe import cli

NUMBERS = (
    *(
        "0",
        "1",
        "2",
        "3",
        "5",
        "7",
        "29",
        "-1",
        "-7",
        "00",
        "1e3",
        "0.5",
        "-0.0",
        "1e-320",
        "1e308",
        "1e400",
        "nan",
        "inf",
    ),
    *(
        "-inf",
        "2147483648",
        "9223372036854775808",
        "18446744073709551616",
        "-9223372036854775809",
        "9" * 30,
        "9" * 5000,
    ),
    *("1_0", "٣", "½", "0x10", "1,5", "1.", ".5", "+1", " 4 ", "3\n"),
)
JUNK = (
    *(
        "",
        " ",
        ",",
        ",,",
        "none",
        "None",
        "True",
        "-",
        "--",
        "---",
        "-x",
        "é",
        "漢字",
        "🙂",
        "a\u0301",
        "\u2028",
        "\x85",
        "\t",
    ),
    *(
        "a\nb",
        "\x00",
        "a\x00b",
        "\udc80",
        "\ufeff",
        "\u202e",
        "x" * 5000,
        "%s%n",
        "{context}",
        "{}",
        "{0}",
        "[bold]",
        "$(id)",
    ),
    *(
        "../..",
        "/",
        ".",
        "~",
        "~nobody/x",
        "/dev/null",
        "/proc/self/mem",
        "file:///etc",
        "hub:a/b:c",
        "hub:",
        "a+b",
        "+",
        "=",
    ),
)
LISTED = st.lists(st.sampled_from((*NUMBERS[:20], *JUNK[:12])), min_size=2, max_size=4).map(",".join)
ANY = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(JUNK), LISTED, st.text(max_size=12))


def answer(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command line, encoded as a terminal's."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors, newline="\n") for errors in ("strict", "backslashreplace")
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(list(words))
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return status, texts[0], texts[1]


def lawful(words: Sequence[str]) -> tuple[int, str, str]:
    """The same, held to the law: 0, 1 or 2; a failure is one line that begins with the program's name."""
    status, out, err = answer(words)
    assert status in (0, 1, 2), f"{words}: {status}, {err}"
    if status:
        assert err.startswith("kvprobe: ") and err.endswith("\n") and err.count("\n") == 1, f"{words}: {err!r}"
        assert len(err) < 1200 + 2 * sum(map(len, words)), f"{words}: {len(err)} characters"
    assert "Traceback" not in out + err, f"{words}: {err}"
    return status, out, err
