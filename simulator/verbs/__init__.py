"""The simulator's verbs as plain functions: settings in, files and a table out. conf/cli.py calls them."""
