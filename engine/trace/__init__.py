"""The trace: what a recording leaves on disk, and how it is written and read.

Imports no torch: the simulator reads it.
"""
