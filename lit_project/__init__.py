"""A PyTorch Lightning project: fast, exactly repeatable, tracked, tested and ready to grow."""

__version__ = "0.1.0"
