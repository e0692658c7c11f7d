"""Shell completion: a script for bash and one for zsh that know verbs, settings and options of groups.

Everything is in the script, so that a key press starts no Python; after an update it is made anew. Leaves out values
that are not options of a group: those complete as paths.
"""

from collections.abc import Iterable

from specdial.conf.help import Verb, read_verb

HOW_TO = "use bash or zsh: source <(specdial --completion bash) in ~/.bashrc, or with zsh in ~/.zshrc after compinit"
BASH = """\
# Completion of specdial. In ~/.bashrc: source <(specdial --completion bash)
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
ZSH = """\
# Completion of specdial. In ~/.zshrc, after compinit: source <(specdial --completion zsh)
_specdial() {{
  local word="${{words[CURRENT]}}" verb="${{words[2]}}" words_
  if (( CURRENT == 2 )); then
    compadd -- {verbs} --help --version --completion
    return
  fi
  case "$verb:${{word%%=*}}" in
{cases}
  esac
  if [[ "$word" == *=* ]]; then
    compset -P '*='
    if [[ -n "$words_" ]]; then compadd -- ${{=words_}}; else _files; fi
    return
  fi
  case "$verb" in
{settings}
  esac
  compadd -S '' -- ${{=words_}}
}}
compdef _specdial specdial
"""
SHELLS = {"bash": (BASH, "words"), "zsh": (ZSH, "words_")}  # the script, and its variable for what fits


def script(shell: str, verbs: Iterable[str]) -> str:
    """The script for a shell of SHELLS. verbs: every verb's name."""
    template, variable = SHELLS[shell]
    known = {verb: read_verb(verb) for verb in verbs}
    cases = [
        f'    {verb}:{group.name}) {variable}="{" ".join(group.options)}" ;;'
        for verb, found in known.items()
        for group in found.groups
    ]
    settings = [f'    {verb}) {variable}="{" ".join(_words(found))}" ;;' for verb, found in known.items()]
    return template.format(verbs=" ".join(known), cases="\n".join(cases), settings="\n".join(settings))


def _words(found: Verb) -> list[str]:
    own = [option.name for option in found.settings if option.default]
    grouped = [o.name for group in found.groups for o in group.settings if o.default]
    return [f"{name}=" for name in (*own, *(group.name for group in found.groups), *grouped)] + [
        "-m",
        "--help",
        "--cfg",
    ]
