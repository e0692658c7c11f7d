"""Colours of the page, light and dark, under the names that figures and the style sheet use. One accent, else greys."""

FONT = '-apple-system, BlinkMacSystemFont, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

LIGHT = {
    "paper": "#ffffff",
    "ink": "#16191d",
    "muted": "#5c6670",
    "faint": "#b3bbc3",
    "line": "#d5dade",
    "grid": "#eceef0",
    "cell": "#eaf1f4",
    "hatch": "#93a0aa",
    "accent": "#0a6c8f",
    "accent-soft": "#9cc4d3",
    "term-draft": "#0a6c8f",
    "term-verify": "#6d7881",
    "term-select": "#9cc4d3",
    "term-host": "#cdd3d8",
    "term-plain": "#aab3bb",
    "term-verify-partial": "#8f99a2",
    "term-refresh": "#3f4a53",
    "term-transfer": "#16191d",
}
DARK = {
    "paper": "#14171a",
    "ink": "#e8ebee",
    "muted": "#9aa5af",
    "faint": "#525c66",
    "line": "#3a424a",
    "grid": "#23282d",
    "cell": "#1e2a30",
    "hatch": "#6a7782",
    "accent": "#56b6d6",
    "accent-soft": "#2f6a80",
    "term-draft": "#56b6d6",
    "term-verify": "#87939d",
    "term-select": "#2f6a80",
    "term-host": "#3d464e",
    "term-plain": "#5f6a74",
    "term-verify-partial": "#6c7882",
    "term-refresh": "#c3ccd3",
    "term-transfer": "#e8ebee",
}


def variables(colors: dict[str, str]) -> str:
    """The colours as CSS variables."""
    return "".join(f"--{name}:{color};" for name, color in colors.items())
