"""Lays the code out so that no name of 1 to 40 letters changes where ruff breaks a line.

Run it as `python tests/template/layout.py` when test_generated.py says that the layout depends on the name.
A generated project must pass `ruff format --check` without ruff at hand when it is made. Imports are broken by the
generator; elsewhere brackets that a long name would open are opened here for good, by a trailing comma. What that does
not mend is listed, to be put differently by hand: a shorter line, a variable.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from hooks.generate import renamed, tracked_files, wrap_imports  # noqa: E402
from hooks.names import LONGEST, PACKAGE, SLUG, VARIABLES  # noqa: E402

SHORT, LONG = "q", "q" * LONGEST


def ruff(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ruff", *arguments], capture_output=True, text=True, check=False)
    return done.stdout


def names(package: str) -> dict[str, str]:
    return {"package_name": package, "project_slug": package.replace("q", "s")}


def formatted(package: str, folder: Path) -> dict[Path, tuple[str, str]]:
    """Under this name, each file whose layout ruff would change: what it is, and what ruff makes of it."""
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(renamed(config, names(package)), encoding="utf-8")
    texts = {}
    for path in tracked_files(ROOT):
        if path.endswith(".py") and not path.startswith(("hooks/", "tests/template/", "scripts/rename")):
            texts[path] = wrap_imports(renamed((ROOT / path).read_text(encoding="utf-8"), names(package)))
            target = folder / renamed(path, names(package))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(texts[path], encoding="utf-8")
    ruff("format", "--no-cache", str(folder))
    results = {path: (folder / renamed(path, names(package))).read_text(encoding="utf-8") for path in texts}
    return {ROOT / path: (text, results[path]) for path, text in texts.items() if results[path] != text}


def mend(path: Path, laid_out: str) -> None:
    text = laid_out
    for line in path.read_text(encoding="utf-8").splitlines():
        broken = wrap_imports(renamed(line, names(LONG)))
        text = text.replace(broken + "\n", line + "\n") if "\n" in broken else text
    for new, old in ((LONG.upper() + "_", VARIABLES), (LONG, PACKAGE), (names(LONG)["project_slug"], SLUG)):
        text = text.replace(new, old)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path, (_, laid_out) in formatted(LONG, Path(folder)).items():
            mend(path, laid_out)
    ruff("format", str(ROOT))
    for package in (SHORT, LONG):
        with tempfile.TemporaryDirectory() as folder:
            for path, (text, laid_out) in formatted(package, Path(folder)).items():
                for line in [line for line in text.splitlines() if line not in laid_out.splitlines()]:
                    print(f"{path}, with a name of {len(package)} letters: {line.strip()}")


if __name__ == "__main__":
    main()
