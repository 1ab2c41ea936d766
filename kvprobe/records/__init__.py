"""Run folders: what a command was asked, what it found, and what it ran on.

Every file is written out of sight and then renamed, so that a reader sees a whole file or none. ``manifest.json``
speaks of the files beside it. It says ``running`` until the run is over, then ``complete``, ``failed`` or
``interrupted``; only a folder that has one is written into again. Where an earlier run is complete, its files and its
manifest stay as they are, with a note of the ``later`` run, until that is complete, too. What a run had finished when
it was ended waits in a hidden folder for the next run that asks the same (:mod:`kvprobe.parts`).
"""

from kvprobe.records.folder import Run, run
from kvprobe.records.manifests import MANIFEST, SCHEMA
from kvprobe.records.writing import peak_rss_mib, to_json, write_figure, write_json, write_table, write_text

__all__ = [
    "MANIFEST",
    "SCHEMA",
    "Run",
    "peak_rss_mib",
    "run",
    "to_json",
    "write_figure",
    "write_json",
    "write_table",
    "write_text",
]
