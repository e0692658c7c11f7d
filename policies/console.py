"""Where tables are printed: as wide as the terminal; where there is none, so wide that no number or name is cut."""

from rich.console import Console

TABLE_COLUMNS = 200


def table_console() -> Console:
    """A console on standard output for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, TABLE_COLUMNS))


def odd_batch(documents: int, batch: int) -> str:
    """What to say where so many documents do not make whole batches, else nothing."""
    whole, rest = divmod(documents, batch)
    if not rest:
        return ""
    if not whole:
        return f"{documents} documents are less than a batch of {batch}"
    return f"{documents} documents: the last batch is of {rest}, not {batch}, and whole runs take it in"
