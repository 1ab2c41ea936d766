"""Plans: bytes and FLOPs of a job before it runs, and the pass sizes under which it fits the memory at hand.

>>> import kvprobe as kp                                                              # doctest: +SKIP
>>> plan = kp.plan.make("meta-llama/Llama-3.1-8B", length=32768, arms=16)             # doctest: +SKIP
>>> trace = kp.observe(model, prompt, plan=plan)                                      # doctest: +SKIP
"""

from kvprobe.plan.making import PROCESS_BYTES, Plan, make

__all__ = ["PROCESS_BYTES", "Plan", "make"]
