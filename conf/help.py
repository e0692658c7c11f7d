"""What `specdial VERB --help` prints: examples, every setting with its default and meaning, the groups, the options.

Read from the verb's yaml file: a setting's meaning is the comment behind it, or else above it; settings that several
files share are explained here once. Leaves out Hydra, so that help is instant.
"""

import difflib
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from specdial.conf.explained import EXPLAINED

HERE = Path(__file__).parent
REQUIRED = "???"
LEFT = 32  # columns of the settings' names
ALSO = {"model": ", or model=FOLDER, FILE.gguf or owner/name"}  # ways to choose besides the options
OPTIONS = (
    ("-m", "sweep: every combination of values given as a,b,c, one run each"),
    ("--cfg job", "print the composed settings and do nothing"),
    ("--help", "this text; with group=option, of that option"),
)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. default: as the file writes it. text: what it means, empty where nobody says."""

    name: str
    default: str
    text: str

    @property
    def required(self) -> bool:
        return self.default == REQUIRED


@dataclass(frozen=True, slots=True)
class Group:
    """A set of settings to choose by name. chosen: the option in force, None for none. options: name to its meaning."""

    name: str
    chosen: str | None
    options: dict[str, str]
    settings: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Verb:
    """All that help and completion know of a verb."""

    header: str
    settings: tuple[Option, ...]
    groups: tuple[Group, ...]


def read_verb(verb: str, chosen: Mapping[str, str] | None = None) -> Verb:
    """The verb's settings and groups. chosen: options of groups other than the defaults, unknown ones ignored."""
    text = (HERE / f"{verb}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    defaults = {k: v for entry in content["defaults"] if isinstance(entry, dict) for k, v in entry.items()}
    picked = {k: v for k, v in defaults.items() if not k.startswith("override ")}
    found = options_in(text, of=verb)
    own = tuple(option for option in found if option.name.split(".")[0] not in picked)
    changed = {option.name: option for option in found if option.name.split(".")[0] in picked}
    groups = tuple(_group(name, (chosen or {}).get(name, option), changed) for name, option in picked.items())
    return Verb(content["hydra"]["help"]["header"], own, groups)


def options_in(text: str, prefix: str = "", of: str = "") -> list[Option]:
    """Every setting of a yaml file, nested ones by their dotted name. of: whose they are, for shared meanings."""
    lines = text.splitlines()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    found = _walk([e for e in entries if e[0].value not in ("defaults", "hydra")], lines, prefix)
    return [o if o.text else replace(o, text=_explained(f"{of}.{o.name}")) for o in found if o.text or o.default]


def _walk(entries: list[tuple[yaml.Node, yaml.Node]], lines: list[str], prefix: str) -> Iterator[Option]:
    for key, value in entries:
        name = f"{prefix}{key.value}"
        text = _comment(key, value, lines)
        if isinstance(value, yaml.MappingNode) and value.value:
            yield Option(name, "", text)
            yield from _walk(value.value, lines, f"{name}.")
        else:
            yield Option(name, _raw(value, lines), text)


def _comment(key: yaml.Node, value: yaml.Node, lines: list[str]) -> str:
    """The comment behind the value (of a block: behind its key), else the comment lines right above the key."""
    block = isinstance(value, yaml.MappingNode) and not value.flow_style
    mark = key.end_mark if block else value.end_mark
    behind = lines[mark.line][mark.column :].lstrip(": ") if mark.line < len(lines) else ""
    if behind.startswith("#"):
        return behind.lstrip("# ")
    above: list[str] = []
    line = key.start_mark.line - 1
    if lines[line + 1][: key.start_mark.column].strip():  # inside braces, behind another key
        return ""
    while line >= 0 and lines[line].lstrip().startswith("#"):
        above.insert(0, lines[line].lstrip("# "))
        line -= 1
    return " ".join(above) if line >= 0 else ""  # what a file starts with is about the file


def _explained(name: str) -> str:
    """The meaning of a shared setting: of its whole dotted name, else of the longest end of it that is known."""
    parts = name.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    return next((EXPLAINED[end] for end in ends if end in EXPLAINED), "")


def _raw(value: yaml.Node, lines: list[str]) -> str:
    """A value as the file writes it, on one line."""
    start, end = value.start_mark, value.end_mark
    if start.line == end.line:
        return lines[start.line][start.column : end.column]
    parts = [lines[start.line][start.column :], *lines[start.line + 1 : end.line], lines[end.line][: end.column]]
    return " ".join(part.strip() for part in parts).strip()


def _group(name: str, chosen: str | None, changed: Mapping[str, Option]) -> Group:
    """changed: what the verb's own file sets in it."""
    files = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / name).glob("*.yaml"))}
    meanings = {}
    for option, text in files.items():
        above = [line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#")]
        meanings[option] = " ".join(above)
    settings = {option.name: option for option in _settings(files, chosen, f"{name}.")}
    return Group(name, chosen, meanings, tuple((settings | _known(changed, settings)).values()))


def _settings(files: Mapping[str, str], chosen: str | None, prefix: str) -> list[Option]:
    """Settings of one option, with those of the options that it builds on before them."""
    if chosen is None or chosen not in files:
        return []
    own = {option.name: option for option in options_in(files[chosen], prefix)}
    bases = [base for base in yaml.safe_load(files[chosen]).get("defaults", []) if base != "_self_"]
    found = {option.name: option for base in bases for option in _settings(files, base, prefix)}
    return list((found | own).values())


def _known(changed: Mapping[str, Option], settings: Mapping[str, Option]) -> dict[str, Option]:
    return {name: option for name, option in changed.items() if name in settings}


def nearest(verb: str, name: str) -> str | None:
    """The setting or group of a verb that a mistyped name most likely means; None where none is like it."""
    found = read_verb(verb)
    names = [option.name for group in found.groups for option in group.settings] + [g.name for g in found.groups]
    close = difflib.get_close_matches(name, [*names, *(option.name for option in found.settings)], n=1)
    return close[0] if close else None


def help_text(verb: str, chosen: Mapping[str, str] | None = None) -> str:
    """What `specdial VERB --help` prints, as wide as the terminal."""
    found = read_verb(verb, chosen)
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    blocks = [
        found.header.rstrip(),
        "Settings, as setting=value:",
        *(_lines(option, width) for option in found.settings),
    ]
    for group in found.groups:
        blocks += ["", *_group_lines(group, width)]
    blocks += ["", "Options:", *(_line(f"  {name}", text, width) for name, text in OPTIONS)]
    return "\n".join(["\n".join(blocks[:1]), "", *blocks[1:]])


def _lines(option: Option, width: int) -> str:
    if option.required:
        return _line(f"  {option.name}=...", f"{option.text} (required)", width)
    return _line(f"  {option.name}={option.default}" if option.default else f"  {option.name}.*", option.text, width)


def _line(left: str, text: str, width: int) -> str:
    """A name, and its meaning in a column of its own; below it where the name is too long."""
    wrapped = textwrap.wrap(text, max(width - LEFT, 30)) or [""]
    if len(left) >= LEFT - 1:
        return "\n".join([left, *(" " * LEFT + part for part in wrapped)])
    return "\n".join([f"{left:<{LEFT}}{wrapped[0]}", *(" " * LEFT + part for part in wrapped[1:])])


def _group_lines(group: Group, width: int) -> list[str]:
    ways = f"{group.name}=OPTION{ALSO.get(group.name, '')}"
    title = f"Group {group.name}, as {ways}" + (f" (now {group.chosen}):" if group.chosen else ":")
    lines = [title, *(_line(f"  {option}", text, width) for option, text in group.options.items())]
    if group.settings:
        lines += [f"Settings of {group.name}={group.chosen}:", *(_lines(option, width) for option in group.settings)]
    return lines
