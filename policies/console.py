"""Where tables are printed: as wide as the terminal; where there is none, so wide that no number or name is cut."""

from rich.console import Console

TABLE_COLUMNS = 200


def table_console() -> Console:
    """A console on standard output for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, TABLE_COLUMNS))
