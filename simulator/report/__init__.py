"""The report: one HTML page of what the verbs found, a module a section, and a timeline of a trace's rounds."""
