"""The command line: specdial VERB [hydra overrides]. It composes settings and hands them to the verb.

No work is done here.

Exit codes: 0 done, 1 a fault of the program, 2 a mistake in the input, told in one line.
"""

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from specdial.conf.completion import HOW_TO, SHELLS, script
from specdial.conf.help import help_text, nearest
from specdial.conf.schema import plain_settings, with_model, with_policies, with_policy_file, with_trace
from specdial.policies.errors import UserError

Settings = dict[str, Any]


def _model_and_policy(settings: Settings) -> Settings:
    return with_policies(with_model(_no_context(settings)), many=False)


def _model_and_policies(settings: Settings) -> Settings:
    return with_policies(with_model(_no_context(settings)), many=True)


def _model_and_policy_file(settings: Settings) -> Settings:
    return with_policy_file(with_model(_no_context(settings)))


def _model(settings: Settings) -> Settings:
    return with_model(_no_context(settings))


def _trace_and_policies(settings: Settings) -> Settings:
    return with_policies(with_trace(settings), many=True)


def _policy(settings: Settings) -> Settings:
    return with_policies(settings, many=False)


def _as_is(settings: Settings) -> Settings:
    return settings


def _no_context(settings: Settings) -> Settings:
    """`context` is a shorthand that workload.context_tokens already took over."""
    settings.pop("context", None)
    return settings


# verb: (module with run(settings), what turns a composed config into its settings, one line of help)
VERBS: dict[str, tuple[str, Callable[[Settings], Settings], str]] = {
    "record": ("specdial.engine.verbs.record", _model_and_policy, "decode a workload, record its rounds"),
    "calibrate": ("specdial.engine.verbs.calibrate", _model, "measure what each operation costs"),
    "heads": ("specdial.engine.verbs.heads", _model, "rank heads, record the attention they are chosen by"),
    "train_eagle": ("specdial.engine.verbs.train_eagle", _model, "train an EAGLE-3 head that drafts for a model"),
    "replay": ("specdial.simulator.verbs.replay", _trace_and_policies, "simulate policies on a trace"),
    "tune": ("specdial.simulator.verbs.tune", _as_is, "search policies on a trace"),
    "refine": ("specdial.conf.refine", _model, "tune, measure the finalists, correct the costs, again"),
    "tune_heads": ("specdial.simulator.verbs.tune_heads", _as_is, "choose scoring heads on recorded attention"),
    "run": ("specdial.engine.verbs.run", _model_and_policy_file, "decode prompts with a policy"),
    "validate": (
        "specdial.engine.verbs.validate",
        _model_and_policies,
        "predicted against measured, held-out documents",
    ),
    "report": ("specdial.simulator.verbs.report", _as_is, "one HTML page of what the verbs found"),
    "import": ("specdial.simulator.verbs.import_logs", _as_is, "read what other tools write"),
    "drift": ("specdial.simulator.verbs.drift", _as_is, "has a live trace left what its policy was tuned on"),
    "export": ("specdial.policies.export", _policy, "write a policy file"),
    "doctor": ("specdial.engine.verbs.doctor", _as_is, "check this machine: packages, GPU, kernels, disk"),
    "demo": ("specdial.conf.demo", _model, "all of it, small, on a real model"),
}

# What Hydra offers that makes sense here.
OPTIONS = (
    "-m",
    "--multirun",
    "--hydra-help",
    "-c",
    "--cfg",
    "--resolve",
    "-p",
    "--package",
    "-i",
    "--info",
)


def main() -> None:
    """Entry point of the `specdial` command."""
    try:
        _main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        stop_quietly()
    except KeyboardInterrupt:
        print("interrupted; finished parts are on disk", file=sys.stderr)
        sys.exit(130)


def _main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if arguments[0] == "--version":
        print(f"specdial {metadata.version('specdial')}")
        return
    if arguments[0] == "--completion":
        if len(arguments) != 2 or arguments[1] not in SHELLS:
            fail(f"no completion for {' '.join(arguments[1:]) or 'no shell'}; {HOW_TO}")
        print(script(arguments[1], VERBS))
        return
    verb = arguments[0]
    if verb not in VERBS:
        fail(f"unknown verb {verb!r}; use one of {', '.join(VERBS)}")
    if "--help" in arguments or "-h" in arguments:
        print(help_text(verb, dict(argument.split("=", 1) for argument in arguments[1:] if "=" in argument)))
        return
    check_arguments(verb, arguments[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and one line can be made of it in `task` and below
    sys.argv = [f"specdial {verb}", *(part for argument in arguments[1:] for part in rewrite(argument))]
    try:
        # Hydra 1.3 asks for its version, 1.4 warns of being asked.
        base = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
        hydra.main(config_path="pkg://specdial.conf", config_name=verb, **base)(task(verb))()
    except (HydraException, OmegaConfBaseException) as error:
        fail(f"{unknown_setting(verb, str(error)) or error}; see specdial {verb} --help")
    except OSError as error:  # of a sweep's own folder
        if error.filename is None:
            raise
        fail(f"cannot use {error.filename}: {error.strerror}; run it where you may write, or set hydra.sweep.dir=DIR")


def task(verb: str) -> Callable[[DictConfig], Any]:
    """The function that Hydra calls with the composed config; its value goes back to sweepers."""
    module, prepare, _ = VERBS[verb]

    def run(cfg: DictConfig) -> Any:
        try:
            settings = plain_settings(cfg)
            wanted = settings.pop("returns", None)
            return returned(import_module(module).run(prepare(settings)), wanted)
        except UserError as error:
            fail(str(error))
        # Caught here too, or Hydra adds a line of its own.
        except OmegaConfBaseException as error:
            fail(f"{error}; see specdial {verb} --help")
        except BrokenPipeError:
            stop_quietly()
        except OSError as error:
            if error.filename is None:
                raise
            fail(f"cannot use {error.filename}: {error.strerror}; check the path and its permissions")
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            cause = (str(error).splitlines() or [type(error).__name__])[0][:160]
            fail(f"out of memory: {cause}; lower the batch or the context, then start again")

    return run


def returned(result: Any, wanted: object) -> Any:
    """What a sweeper gets: the whole result, or the numbers that +returns=NAME or +returns=[NAME, NAME] asks for.

    A name is a path into the result, as in policies.0.measured.speedup. Raises UserError where it leads nowhere.
    """
    if wanted is None:
        return result
    if isinstance(wanted, list):
        return tuple(returned(result, name) for name in wanted)
    value = result
    for part in str(wanted).split("."):
        inside = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        known = [str(name) for name in inside]
        if part not in known:
            raise UserError(f"returns is {wanted!r}, which the result does not hold", f"use some of {', '.join(known)}")
        value = value[part] if isinstance(value, dict) else value[int(part)]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"returns is {wanted!r}, which is no number", "name a number of the result")
    return float(value)


def unknown_setting(verb: str, said: str) -> str | None:
    """Hydra advises to add a setting that it does not know; what was meant is more use. None for other words."""
    found = re.match(r"Could not override '([^']+)'", said)
    if found is None:
        return None
    meant = nearest(verb, found[1])
    return f"{verb} has no setting {found[1]}" + (f"; did you mean {meant}" if meant else "")


def out_of_memory(error: Exception) -> bool:
    """Did a device or this machine run out of memory? torch says so by class or in words, libraries in theirs."""
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(word in str(error) for word in words)


def check_arguments(verb: str, arguments: list[str]) -> None:
    """Refuse what Hydra would answer with a page of usage, or with advice that leads nowhere."""
    for argument in arguments:
        option = argument.split("=")[0]
        if argument.startswith("-") and option not in OPTIONS:
            fail(f"unknown option {option}; use setting=value, -m, --help or --cfg job")
        if argument.startswith("controller.") and not any(a.startswith("controller=") for a in arguments):
            fail(f"{option} is set without a controller; add controller=KIND, see specdial {verb} --help")


def rewrite(argument: str) -> list[str]:
    """Arguments as Hydra takes them.

    model=DIR (a folder, a .gguf file or a hub id) becomes model=path model.source=DIR. A prompt, and a path that
    exists, are quoted, so that commas and brackets in them mean nothing.
    """
    name, equals, value = argument.partition("=")
    if name == "prompt" and equals and value[:1] not in ("'", '"'):
        return [f"prompt={_quoted(value)}"]
    if name == "model" and ("/" in value or value.endswith(".gguf") or Path(value).is_dir()):
        return ["model=path", f"model.source={_quoted(value) if Path(value).exists() else value}"]
    return [argument]


def _quoted(text: str) -> str:
    return QuotedString(text.replace("${", "\\${"), Quote.single).with_quotes()


def usage() -> str:
    """What `specdial` prints without a verb."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {line}" for verb, (_, _, line) in VERBS.items()]
    first = "usage: specdial VERB [setting=value ...] [-m] [--help] [--cfg job]"
    last = ["", "specdial VERB --help explains every setting. Completion: source <(specdial --completion bash)"]
    return "\n".join([first, "", *lines, *last])


def stop_quietly() -> NoReturn:
    """The reader of a pipe has seen enough. Python must not flush into it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def fail(message: str) -> NoReturn:
    """One line on standard error, exit code 2."""
    print(f"specdial: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
