"""Fast operations for kvprobe: one folder an operation, each equal to the slow line in its own ``reference.py``."""
