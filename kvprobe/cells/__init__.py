"""Cells: what evicting does to one probe row, for every document × policy × cache size × layer × head.

``probe`` prefills a document's context once, lets every policy look at it, feeds the question and observes the row that
the question is answered from; ``measure`` turns kept sets into the exact perturbation L, its bounds and the masses
behind them. Maps and audits are summaries of these tables.
"""

from kvprobe.cells.measuring import Arm, Cells, choose, joined, measure, noted, refuse
from kvprobe.cells.pairs import Pair, matrix, pairs_of
from kvprobe.cells.probing import PROBES, Probed, extent, fitting, probe

__all__ = [
    "PROBES",
    "Arm",
    "Cells",
    "Pair",
    "Probed",
    "choose",
    "extent",
    "fitting",
    "joined",
    "matrix",
    "measure",
    "noted",
    "pairs_of",
    "probe",
    "refuse",
]
