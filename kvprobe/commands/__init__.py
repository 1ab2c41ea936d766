"""What the commands print and store; the command line itself is in :mod:`kvprobe.cli`."""

from kvprobe.commands.checking import check, print_report
from kvprobe.commands.compression import evict, print_evict
from kvprobe.commands.probing import niah, print_niah

__all__ = ["check", "evict", "niah", "print_evict", "print_niah", "print_report"]
