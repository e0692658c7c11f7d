"""The simulator: what a recorded decode would have done, and how long it would have taken, under other policies.

Acceptance comes from the trace, time from the cost model; neither knows the other. Imports no torch.
"""
