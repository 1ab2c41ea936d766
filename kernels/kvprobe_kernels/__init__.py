"""Fast operations for kvprobe: one folder an operation, each equal to the slow line in its own ``reference.py``.

The package stands alone: it needs torch, and triton only once ``backend="triton"`` is asked for.
"""

# Not lazily: an operation's folder has the function's name, and an import of the folder would bind that name first.
from kvprobe_kernels.dispatch import BACKENDS, KernelError
from kvprobe_kernels.projected_norm import projected_norm
from kvprobe_kernels.two_stage_select import two_stage_select
from kvprobe_kernels.window_scores import window_scores

__all__ = ["BACKENDS", "KernelError", "projected_norm", "two_stage_select", "window_scores"]
