"""What the commands print and store; the command line itself is in :mod:`kvprobe.cli`."""

from kvprobe.commands.auditing import audit, print_audit
from kvprobe.commands.checking import check, print_refusal, print_report
from kvprobe.commands.compression import evict, print_evict
from kvprobe.commands.mapping import map_, print_map
from kvprobe.commands.placebos import placebo, print_placebo
from kvprobe.commands.planning import print_plan
from kvprobe.commands.probing import niah, print_niah
from kvprobe.commands.scanning import heads, print_heads
from kvprobe.commands.sinking import print_sinks, sinks

__all__ = [
    "audit",
    "check",
    "evict",
    "heads",
    "map_",
    "niah",
    "placebo",
    "print_audit",
    "print_evict",
    "print_heads",
    "print_map",
    "print_niah",
    "print_placebo",
    "print_plan",
    "print_refusal",
    "print_report",
    "print_sinks",
    "sinks",
]
