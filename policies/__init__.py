"""Policies: what to draft, when to stop, which keys to read, how to verify.

Plain data and NumPy, run by engine and simulator alike.
"""
