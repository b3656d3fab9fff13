"""Stands for ``fit`` in the tests of ``sweep``: the same options, files and ways to end, without the seconds for torch.

``val/acc`` is ``model.optimizer.lr`` itself. A start adds a line with its first epoch to ``starts`` in its folder.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

KNOWN = {"config", "model.optimizer", "model.optimizer.lr", "model.optimizer.momentum", "model.crash"}
KNOWN |= {"trainer.max_epochs", "trainer.default_root_dir", "ckpt_path", "pace"}


def main() -> None:
    given = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if unknown := given.keys() - KNOWN:
        sys.exit(f"error: Option {unknown.pop()!r} is not accepted\nAll options: --help")
    epochs, lr = int(given.get("trainer.max_epochs", 5)), float(given.get("model.optimizer.lr", 0.5))
    if "--print_config" in sys.argv:
        best = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/acc", "mode": "max"}}
        config: dict[str, Any] = {"trainer": {"max_epochs": epochs, "logger": None}, "loggers": {"csv": {}}}
        config["loggers"]["csv"] = {"class_path": "CSVLogger"}
        print(yaml.safe_dump(config | {"callbacks": {"best": best}, "model": {"lr": lr}}))
        return
    if given.get("model.crash") == "message":
        sys.exit("error: this data is broken\n  in line 2")
    if given.get("model.crash") == "memory":
        print("allocating", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    root = Path(given["trainer.default_root_dir"])
    run, epoch = root / f"fit-{time.time_ns()}", 0
    if "ckpt_path" in given:
        run = Path(given["ckpt_path"]).parents[1]
        epoch = int(Path(given["ckpt_path"]).read_text())
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "csv").mkdir(exist_ok=True)
    with (root / "starts").open("a") as file:
        file.write(f"{os.getpid()} {epoch} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = [f"{number},{number},{lr}\r\n" for number in range(epoch)]
    for epoch in range(epoch, epochs):  # noqa: B020
        time.sleep(float(given.get("pace", 0.02)))
        rows.append(f"{epoch},{epoch},{lr}\r\n")
        (run / "csv" / "metrics.csv").write_text("epoch,step,val/acc\r\n" + "".join(rows), newline="")
        (run / "checkpoints" / ".last").write_text(str(epoch + 1))
        (run / "checkpoints" / ".last").replace(run / "checkpoints" / "last.ckpt")


main()
