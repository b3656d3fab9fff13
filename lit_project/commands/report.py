"""Write report.html of a run anew, from what lies in its folder: curves, mistakes, calibration, run record.

A run that came to its first batch ends with one already. This is for a run that was killed, that failed before, or
that had no matplotlib.
"""

from pathlib import Path

from lit_project import commands


def main(argv: list[str]) -> int:
    """Exit status 0 when the report is written."""
    parser = commands.parser("report", __doc__)
    parser.add_argument("run_folder", type=Path, help="The folder of a fit, validate or test.")
    folder = parser.parse_args(argv).run_folder

    from lit_project.report import write_report  # which imports torch

    print(write_report(folder))
    return 0
