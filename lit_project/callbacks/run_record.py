"""Makes each checkpoint self-contained: it carries the config and the preprocessing it was trained with."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class RunRecord(Callback):
    """Stores the resolved config and the data's preprocessing in every checkpoint, as plain values.

    With them ``test --ckpt_path X`` and ``predict --ckpt_path X`` need nothing else.

    Args:
        config: the run's resolved config.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.config
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None and hasattr(datamodule, "preprocessing"):
            checkpoint["preprocessing"] = datamodule.preprocessing()
