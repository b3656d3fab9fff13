"""Turns jsonargparse's error reports into one short message with the nearest right name."""

import difflib
import inspect
import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import lightning as L
import torchvision.models
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import nn, optim

from lit_project import commands
from lit_project.config_files import CONFIGS
from lit_project.data.augment import BatchTransform

#: What jsonargparse says about every alternative of a type; it tells nothing about what the user got wrong.
_NOISE = re.compile(
    r"\s*(- )?(Does not validate against any of the Union subtypes|Subtypes: |Errors:|Given value type: |"
    r"Given value: (\{|NestedArg)|Expected a <class 'NoneType'>|Expected a path but )"
)
#: What other programs call an option of this one.
_ALSO_CALLED = {
    "model.optimizer.lr": {"lr", "learning_rate"},
    "model.optimizer.weight_decay": {"weight_decay", "wd"},
    "data.batch_size": {"batch_size"},
    "data.num_workers": {"num_workers", "workers"},
    "data.root": {"root", "data_dir", "data_path", "dataset"},
    "trainer.max_epochs": {"epochs", "num_epochs"},
    "trainer.devices": {"gpus", "num_gpus"},
    "trainer.accelerator": {"device", "accelerator"},
    "model.network": {"network", "arch", "backbone"},
    "model.optimizer": {"optimizer", "opt"},
    "callbacks.early_stopping.patience": {"patience"},
    "trainer.default_root_dir": {"output_dir", "save_dir", "log_dir"},
    "seed_everything": {"seed"},
    "ckpt_path": {"resume", "checkpoint", "ckpt"},
}


def explain(message: str, parser: ArgumentParser, argv: list[str]) -> str:
    """Shorten jsonargparse's ``message`` and add the nearest known name where a name was not recognised.

    Args:
        message: the report.
        parser: the parser that wrote it; that of a class when one of its arguments was wrong.
        argv: the command line, to show the argument that was meant.
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip()]
    text = "\n  ".join(line for line in lines if not _NOISE.match(line))
    text = re.sub(r'Parser key "([\w.]+)":', r"\1:", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    if match := re.search(r"(?:ption|string:|attribute|Parser key) ['\"]?([\w.]+)", message):
        source = _source(match[1].rsplit(".", 1)[-1], message, argv)
        if source and source not in text:
            text += f" (from {source})"
    if match := re.search(r"argument (--[\w.]+): expected one argument", message):
        bare = [option for option, value in pairwise([*argv, "--"]) if value.startswith("--") and "=" not in option]
        text = f"{next((option for option in bare if option.startswith(match[1])), match[1])} needs a value"
    subcommands = ", ".join(_subcommands())
    text = re.sub(r"\(choose from .*\)", f"(choose from {subcommands})", text)
    text = re.sub(r'expected "subcommand" to be one of .*', f"say what to do, one of {subcommands}.", text)
    return text + _suggestion(message, parser, argv)


def _source(name: str, message: str, argv: list[str]) -> str:
    """The option, or else the last config file, that has a name in it; empty if none has."""
    config = ("--config=", "-c=")
    for argument, following in pairwise([*argv, ""]):
        option, equals, value = argument.partition("=")
        value = value if equals else following
        here = option.startswith("--") and re.search(rf"\b{name}\b", argument)
        # a value that was refused is in the message
        if here and not argument.startswith(config) and ("alue" not in message or value in message):
            return argument
    files = [argument.partition("=")[2] for argument in argv if argument.startswith(config)]
    for file in reversed(files):
        if re.search(rf"\b{name}\b['\"]?\s*:", Path(file).read_text(encoding="utf-8")):
            return file
    return ""


def _suggestion(message: str, parser: ArgumentParser, argv: list[str]) -> str:
    own_loggers = sorted(path.stem for path in (CONFIGS / "logger").glob("*.yaml"))
    if "loggers.Logger is abstract" in message or re.search(r"--loggers?\b|\btrainer\.logger\b", message):
        return f"\nChoose loggers with --config configs/logger/NAME.yaml, where NAME is {' or '.join(own_loggers)}."
    if match := re.search(r"unrecognized arguments: ([^-\s]\S*)", message):
        if match[1].endswith((".yaml", ".yml")):
            return f"\nGive a config with --config {match[1]}."
        if Path(match[1]).exists():
            return "\nThe shell has made several files of a pattern: put it in quotes, as in --images 'images/*.jpg'."
        return "\nSeveral values of one option are written as a list, such as '[64,64]'."
    if match := re.search(r"unrecognized arguments: --([\w.-]+)", message):
        meant = _nearest_option(match[1], _options(parser))
        return _did_you_mean(f"--{meant}" if meant else "")
    if match := re.search(r"Group '(\w+)' does not accept option '(\w+)'", message):
        meant = _nearest_option(f"{match[1]}.{match[2]}", _options(parser))
        return _did_you_mean(meant)
    if match := re.search(r"ption '([\w.]+)' is not accepted|does not accept option '([\w.]+)'", message):
        name = match[1] or match[2]
        meant = _nearest_option(name.replace(".init_args", ""), _options(parser)) if "." in name else ""
        return _did_you_mean(meant) or _class_that_has(name, argv) or _nearest(name, _options(parser))
    if match := re.search(r"arguments are required: (\w+)", message):
        return _option_that_is_missing(match[1], argv)
    if match := re.search(
        r"Expected a dot import path string: ([\w.]+)|module '([\w.]+)' has no attribute '(\w+)'", message
    ):
        return _nearest_class(match[1] or f"{match[2]}.{match[3]}")
    if match := re.search(r"invalid choice: '(\w+)'", message):
        return _nearest(match[1], _subcommands())
    return ""


def _nearest_class(path: str) -> str:
    module, _, name = path.rpartition(".")
    if name.lower() in ("none", "no", "off", "false"):
        return "\nA part is taken away with null."
    if hasattr(torchvision.models, name):
        return _did_you_mean(f"torchvision.models.{name}")
    if module and module.partition(".")[0] != __name__.partition(".")[0] and module in sys.modules:
        return _nearest(name, vars(sys.modules[module]))
    classes = _classes()
    if name in classes:  # of another kind than what was asked for
        network = issubclass(classes[name], nn.Module) and not issubclass(classes[name], L.LightningModule)
        return f"\nA network is chosen with --model.network={name}." if network else ""
    return _nearest(name, {"ReduceLROnPlateau", *classes})


def _did_you_mean(name: str) -> str:
    return f"\nDid you mean '{name}'?" if name else ""


def _nearest(name: str, known: Iterable[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return _did_you_mean(by_lower[found[0]] if found else "")


def _nearest_option(name: str, options: set[str]) -> str:
    """The option that was meant by a dotted name, level by level; empty if there is none."""
    also = next((option for option, names in _ALSO_CALLED.items() if name.replace("-", "_") in names), None)
    if also:
        return also
    prefix = ""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        level = {option.removeprefix(prefix).split(".")[0] for option in options if option.startswith(prefix)}
        if part not in level:
            found = difflib.get_close_matches(part, level, n=1, cutoff=0.6)
            if found:
                return prefix + ".".join([*found, *parts[depth + 1 :]])
            break
        prefix += f"{part}."
    # perhaps its group was left out, which names of callbacks and loggers are not: they stand for whole objects
    grouped = {option.rsplit(".", 1)[-1]: option for option in options if option.startswith("trainer.")}
    found = difflib.get_close_matches(parts[-1], grouped, n=1, cutoff=0.8)
    return grouped[found[0]] if found else ""


def _option_that_is_missing(name: str, argv: list[str]) -> str:
    """Which option gives an argument that a class chosen on the command line must have."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    for option, value in pairwise(words):
        cls = _classes().get(value.rsplit(".", 1)[-1])
        if option.startswith("--") and cls and name in inspect.signature(cls).parameters:
            return f"\nGive it to {cls.__name__} with {option}.{name}."
    return ""


def _class_that_has(name: str, argv: list[str]) -> str:
    """Which class to choose for an argument that the present one has not."""
    given = next((argument for argument in argv if re.match(rf"--[\w.]+\.{name}(=|$)", argument)), "")
    option = given.partition("=")[0].rpartition(".")[0]
    base = {"--data": L.LightningDataModule, "--model.network": nn.Module}.get(option)
    found = [
        cls.__name__
        for cls in _classes().values()
        if base and issubclass(cls, base) and name in inspect.signature(cls).parameters
    ]
    return f"\n{' and '.join(found)} would have it: choose with {option}={found[0]}." if found else ""


def _options(parser: ArgumentParser) -> set[str]:
    return {option[2:] for option in parser._option_string_actions if option.startswith("--")}


def _subcommands() -> list[str]:
    return ["fit", "validate", "test", "predict", *commands.names()]


def _classes() -> dict[str, type]:
    """The classes that a config may name and that have been imported, by name."""
    found: dict[str, type] = {}
    waiting: list[type] = [
        Callback,
        Logger,
        L.LightningModule,
        L.LightningDataModule,
        optim.Optimizer,
        optim.lr_scheduler.LRScheduler,
        BatchTransform,
    ]
    own = __name__.partition(".")[0] + "."
    waiting += [cls for cls in nn.Module.__subclasses__() if cls.__module__.startswith(own)]
    while waiting:
        cls = waiting.pop()
        found[cls.__name__] = cls
        waiting += cls.__subclasses__()
    return found
