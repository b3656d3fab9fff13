"""Callbacks, one concern a file. Those that run by default are listed in ``configs/default.yaml``."""

from lit_project.callbacks.keyed_randomness import KeyedRandomness
from lit_project.callbacks.last_checkpoint import LastCheckpoint
from lit_project.callbacks.monitor_check import MonitorCheck
from lit_project.callbacks.non_finite import NonFinite
from lit_project.callbacks.prediction_writer import PredictionWriter
from lit_project.callbacks.progress import ThroughputBar
from lit_project.callbacks.run_record import RunRecord
from lit_project.callbacks.test_report import TestReport

__all__ = [
    "KeyedRandomness",
    "LastCheckpoint",
    "MonitorCheck",
    "NonFinite",
    "PredictionWriter",
    "RunRecord",
    "TestReport",
    "ThroughputBar",
]
