"""What a job costs, counted by running the model's own code without numbers, and limits under which it fits."""

from kvprobe.costs.automatic import base_bytes, limits_for, rough_bytes
from kvprobe.costs.dry import Pass, from_config, hollow, run_dry
from kvprobe.costs.steps import Costs, Job, Step, fit, peak

__all__ = [
    "Costs",
    "Job",
    "Pass",
    "Step",
    "base_bytes",
    "fit",
    "from_config",
    "hollow",
    "limits_for",
    "peak",
    "rough_bytes",
    "run_dry",
]
