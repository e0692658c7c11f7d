"""The verbs that need a model: record, calibrate, run, validate. Each takes plain settings and returns plain data."""
