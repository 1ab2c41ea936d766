"""Who may import whom, and what the front door costs."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import kvprobe

ROOT = Path(__file__).parents[1]


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT)


def cpu_seconds(*arguments, tries=3):
    """CPU seconds of the cheapest try: what a quiet machine's clock would show, whoever else is busy on this one."""

    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def once():
        before = spent()
        run(*arguments)
        return spent() - before

    return min(once() for _ in range(tries))


def test_imports_go_one_way(capsys):
    from importlinter.cli import lint_imports

    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == 0, capsys.readouterr().out


def test_import_is_cheap():
    heavy = "{'torch', 'transformers', 'transformer_lens', 'pandas', 'scipy', 'matplotlib', 'numpy', 'rich', 'typer'}"
    assert run("-c", f"import sys, kvprobe; print(sorted({heavy} & set(sys.modules)))").stdout.strip() == "[]"
    assert cpu_seconds("-c", "import kvprobe") < 1.0


def test_help_is_quick_and_imports_no_torch():
    assert cpu_seconds("-m", "kvprobe", "--help") < 1.0
    code = "import sys; from kvprobe.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    assert "Usage: kvprobe" in run("-c", code).stdout


def test_front_door_is_small_and_lazy():
    assert len(kvprobe.__all__) <= 20
    assert set(dir(kvprobe)) == set(kvprobe.__all__)
    assert kvprobe.KVProbeError.__module__ == "kvprobe.errors"
    with pytest.raises(AttributeError, match=r"has no attribute 'observ'; it has .*observe"):
        kvprobe.observ  # noqa: B018


@pytest.mark.parametrize("name", kvprobe.__all__)
def test_every_name_of_the_front_door_is_there(name):
    assert getattr(kvprobe, name) is not None
