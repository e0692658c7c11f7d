"""Where tables are printed: as wide as the terminal, and never so narrow that a number is cut when there is none."""

from rich.console import Console

TABLE_COLUMNS = 144


def table_console() -> Console:
    """A console on standard output for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, TABLE_COLUMNS))
