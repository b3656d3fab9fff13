"""Turns jsonargparse's error reports into one short message with the nearest right name."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

import lightning as L
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import nn, optim

from lit_project import commands
from lit_project.data.augment import BatchTransform

#: What jsonargparse says about every alternative of a type; it tells nothing about what the user got wrong.
_NOISE = re.compile(
    r"\s*(- )?(Does not validate against any of the Union subtypes|Subtypes: |Errors:|Given value type: |"
    r"Given value: (\{|NestedArg)|Expected a <class 'NoneType'>|Expected a path but )"
)


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
    if match := re.search(r"(?:ption|string:|attribute) '?(\w+)'?", message):
        argument = next((argument for argument in argv if match[1] in argument and argument.startswith("--")), None)
        if argument and argument not in text:
            text += f" (from {argument})"
    return text + _suggestion(message, parser)


def _suggestion(message: str, parser: ArgumentParser) -> str:
    if match := re.search(r"unrecognized arguments: ([^-\s]\S*)", message):
        if Path(match[1]).exists():
            return "\nThe shell has made several files of a pattern: put it in quotes, as in --images 'images/*.jpg'."
        return "\nSeveral values of one option are written as a list, such as '[64,64]'."
    if match := re.search(r"unrecognized arguments: --([\w.-]+)", message):
        return _nearest(match[1], _options(parser), "--")
    if match := re.search(r"ption '([\w.]+)' is not accepted|does not accept option '([\w.]+)'", message):
        return _nearest(match[1] or match[2], _options(parser))
    if match := re.search(r"Expected a dot import path string: ([\w.]+)|has no attribute '(\w+)'", message):
        return _nearest((match[1] or match[2]).rsplit(".", 1)[-1], _class_names())
    if match := re.search(r"invalid choice: '(\w+)'", message):
        return _nearest(match[1], ["fit", "validate", "test", "predict", *commands.names()])
    return ""


def _nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"\nDid you mean '{prefix}{by_lower[found[0]]}'?" if found else ""


def _options(parser: ArgumentParser) -> set[str]:
    return {option[2:] for option in parser._option_string_actions if option.startswith("--")}


def _class_names() -> set[str]:
    """Names of the classes and functions that a config may name and that have been imported."""
    names = {"ReduceLROnPlateau"}
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
        names.add(cls.__name__)
        waiting += cls.__subclasses__()
    return names
