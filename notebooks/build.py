"""Execute every script of this folder and write it beside itself as a notebook, outputs included."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def build(script: Path) -> Path:
    """One percent script → one executed notebook."""
    notebook = jupytext.read(script)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # time stamps would change with every build
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _noise(output)]
    path = script.with_suffix(".ipynb")
    nbformat.write(notebook, path)
    return path


def _noise(output: Any) -> bool:
    """Progress bars and warnings of libraries on stderr."""
    return output.output_type == "stream" and output.name == "stderr"


if __name__ == "__main__":
    for source in sorted(HERE.glob("[0-9]*.py")):
        print(build(source).name)
