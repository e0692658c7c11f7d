"""Shell completion: a script for bash (and zsh through bashcompinit) that knows verbs, settings and options of groups.

Everything is in the script, so that a key press starts no Python; after an update it is made anew. Leaves out values
that are not options of a group: those complete as paths.
"""

from collections.abc import Iterable

from specdial.conf.help import Verb, read_verb

HOW_TO = "specdial --completion bash prints the script; in ~/.bashrc: source <(specdial --completion bash)"
TEMPLATE = """\
# Completion of specdial. bash: source <(specdial --completion bash)
# zsh: autoload -U bashcompinit && bashcompinit && source <(specdial --completion bash)
_specdial() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" word verb words
  word="${{line##* }}"
  verb="${{line#* }}"
  COMPREPLY=()
  if [[ "$verb" != *" "* ]]; then
    COMPREPLY=($(compgen -W "{verbs} --help --version --completion" -- "$word"))
    return
  fi
  verb="${{verb%% *}}"
  case "$verb:${{word%%=*}}" in
{cases}
  esac
  if [[ "$word" == *=* ]]; then
    # bash replaces what follows the equals sign
    if [[ -n "$words" ]]; then COMPREPLY=($(compgen -W "$words" -- "${{word#*=}}"))
    else compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "${{word#*=}}")); fi
    return
  fi
  case "$verb" in
{settings}
  esac
  compopt -o nospace 2>/dev/null
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _specdial specdial
"""


def bash_script(verbs: Iterable[str]) -> str:
    """The script. verbs: every verb's name."""
    known = {verb: read_verb(verb) for verb in verbs}
    cases = [
        f'    {verb}:{group.name}) words="{" ".join(group.options)}" ;;'
        for verb, found in known.items()
        for group in found.groups
    ]
    settings = [f'    {verb}) words="{" ".join(_words(found))}" ;;' for verb, found in known.items()]
    return TEMPLATE.format(verbs=" ".join(known), cases="\n".join(cases), settings="\n".join(settings))


def _words(found: Verb) -> list[str]:
    own = [option.name for option in found.settings if option.default]
    grouped = [o.name for group in found.groups for o in group.settings if o.default]
    return [f"{name}=" for name in (*own, *(group.name for group in found.groups), *grouped)] + [
        "-m",
        "--help",
        "--cfg",
    ]
