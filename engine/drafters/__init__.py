"""Drafters: what proposes tokens. Each takes the sequences as they stand and then one token after another."""
