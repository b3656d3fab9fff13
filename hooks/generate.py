"""Makes a project of the tree around this folder: what git tracks, without the parts left out, under its own name.

The result depends on the tree and the answers alone, not on the date, the machine or the tools installed, so that
`cruft update` finds nothing but real changes. Standard library only.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hooks.names import PACKAGE, SLUG, VARIABLES

Answers = dict[str, Any]
LINE_LENGTH = 120
#: What `license` is in pyproject.toml (SPDX).
SPDX = {"Proprietary": "LicenseRef-Proprietary"}

_OPEN = r"^[ \t]*(?:#|<!--) part: (\w+(?: or \w+)*)(?: -->)?[ \t]*$"
_CLOSE = r"^[ \t]*(?:#|<!--) /part(?: -->)?[ \t]*$"
_LINE = r"[ \t]*(?:#|<!--) part: (\w+(?: or \w+)*)(?: -->)?[ \t]*$"


def git(root: Path, *arguments: str, check: bool = True, **env: str) -> str:
    """Run git in ``root``, whoever owns it, untouched by the git command or hook that this may run within."""
    kept = {name: value for name, value in os.environ.items() if not re.match("GIT_(DIR|WORK_TREE|INDEX|PREFIX)", name)}
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=root, env=kept | env, capture_output=True, text=True, encoding="utf-8")
    if check and done.returncode:
        sys.exit(f"error: `{' '.join(command)}` in {root} failed:\n{done.stderr.strip()}")
    return done.stdout


def tracked_files(root: Path) -> list[str]:
    """The files git tracks; of an unpacked archive all that .gitignore does not exclude."""
    if (root / ".git").exists():
        found = git(root, "ls-files", "-z")
    else:
        with tempfile.TemporaryDirectory() as folder:
            git(Path(folder), "init", "--quiet")
            places = (f"--git-dir={folder}/.git", f"--work-tree={root}")
            found = git(root, *places, "ls-files", "-z", "--others", "--exclude-per-directory=.gitignore")
    return sorted(name for name in found.split("\0") if name and (root / name).is_file())


def parts(root: Path) -> dict[str, list[str]]:
    """The files of each part: paths, patterns, or folders with a slash at the end.

    What stands under ``a or b`` is kept with either part, as is a block of that mark. ``template`` is never kept.
    """
    found: dict[str, list[str]] = json.loads((root / "hooks" / "parts.json").read_text(encoding="utf-8"))
    return found


def keeps(kept: set[str], names: str) -> bool:
    """Whether what belongs to the part, or the parts ``a or b``, stays with the parts that are ``kept``."""
    return any(name in kept for name in names.split(" or "))


def belongs(path: str, patterns: list[str]) -> bool:
    """Whether a part with these ``patterns`` claims ``path``."""
    return any(path.startswith(p) if p.endswith("/") else fnmatchcase(path, p) for p in patterns)


def project(root: Path, answers: Answers) -> dict[str, bytes]:
    """Work out the new project: the content of each of its files, by path."""
    manifest = parts(root)
    kept = {part for part in manifest if part != "template" and answers.get(part)}
    dropped = [pattern for names, patterns in manifest.items() if not keeps(kept, names) for pattern in patterns]
    texts, result = {}, {}
    for path in tracked_files(root):
        if belongs(path, dropped):
            continue
        content = (root / path).read_bytes()
        try:
            if b"\0" in content:
                raise UnicodeError
            texts[path] = content.decode().replace("\r\n", "\n")
        except UnicodeError:  # not text
            result[renamed(path, answers)] = content

    before = _requirements(texts["pyproject.toml"])
    for path, text in texts.items():
        if not path.endswith(".py"):
            try:
                texts[path] = without_parts(text, kept)
            except ValueError as error:
                sys.exit(f"error: in {path} of the template, {error}")
    gone = before - _requirements(texts["pyproject.toml"])
    for path in texts:
        if path.endswith(".lock"):
            texts[path] = without_packages(texts[path], gone)
    texts = {renamed(path, answers): renamed(text, answers) for path, text in texts.items()}
    for path, pattern, replacement in facts(root, answers):
        if path in texts:
            texts[path] = re.sub(pattern, replacement, texts[path], flags=re.MULTILINE)
    for path, text in texts.items():
        if path.endswith(".py"):
            texts[path] = wrap_imports(text)
    _allow_long_lines(texts)
    return result | {path: text.encode() for path, text in texts.items()}


def renamed(text: str, answers: Answers) -> str:
    """Put the project's names in place of the template's; in one pass, as a new name may contain an old one."""
    names = {
        PACKAGE: answers["package_name"],
        SLUG: answers["project_slug"],
        VARIABLES: answers["package_name"].upper() + "_",
    }
    return re.sub(rf"{PACKAGE}|{SLUG}|(?<![A-Za-z0-9_]){VARIABLES}(?=[A-Z\"'])", lambda found: names[found[0]], text)


def without_parts(text: str, kept: set[str]) -> str:
    """Drop the blocks and lines of parts that are not ``kept``, and the marks of all."""
    if "part: " not in text and "/part" not in text:
        return text
    lines: list[str] = []
    dropping: list[bool] = []
    gap = False  # just behind a dropped block, whose blank lines before and after would add up
    for line in text.removesuffix("\n").split("\n"):
        if found := re.match(_OPEN, line):
            dropping.append(not keeps(kept, found[1]))
        elif re.match(_CLOSE, line):
            if not dropping:
                raise ValueError("a block of a part ends that has not begun")
            gap = dropping.pop() or gap
        elif any(dropping) or (gap and not line and lines and not lines[-1]):
            continue
        elif found := re.search(_LINE, line):
            if keeps(kept, found[1]):
                lines.append(line[: found.start()])
        else:
            lines.append(line)
            gap = False
    if dropping:
        raise ValueError("a block of a part does not end")
    while gap and lines and not lines[-1]:
        lines.pop()
    return "".join(f"{line}\n" for line in lines)


def _requirements(pyproject: str) -> set[str]:
    """The names of all packages that the project asks for itself."""
    declared = pyproject.split("\n[tool.")[0]
    names = re.findall(r'"([A-Za-z0-9][\w.-]*)(?:\[[\w,-]+\])?(?:\s*[<>=!~;]|")', declared)
    return {re.sub("[-_.]+", "-", name).lower() for name in names}


def without_packages(lock: str, gone: set[str]) -> str:
    """Drop from uv's lock what only the requirements in ``gone`` needed, found by its ``# via`` comments."""
    root = f"{SLUG} (pyproject.toml)"
    header, *entries = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)
    wanted_by: dict[str, set[str]] = {}
    for entry in entries:
        name = entry.split("==")[0]
        via = re.search(r"^    # via((?: .*\n)|(?:\n    #   .*)+)", entry, re.MULTILINE)
        wanted = set(re.findall(r"(?:^ |#   )(.+)", via[1])) if via else set()
        # a package can be there twice, for different platforms
        wanted_by.setdefault(name, set()).update(wanted - ({root} if name in gone else set()))
    kept = {root}
    while more := {name for name, wanted in wanted_by.items() if wanted & kept} - kept:
        kept |= more

    def shorter(found: re.Match[str]) -> str:
        wanted = [name for name in re.findall(r"#   (.+)", found[0]) if name in kept and name in allowed]
        if len(wanted) == 1:
            return f"    # via {wanted[0]}\n"
        return "    # via\n" + "".join(f"    #   {name}\n" for name in wanted)

    text = header
    for entry in entries:
        name = entry.split("==")[0]
        if name in kept:
            allowed = wanted_by[name]
            text += re.sub(r"^    # via\n(?:    #   .+\n)+", shorter, entry, flags=re.MULTILINE)
    return text


def wrap_imports(code: str) -> str:
    """Break imports that the new name made too long, as ruff does. Other code is laid out so that no name matters."""

    def wrapped(found: re.Match[str]) -> str:
        if len(found[0]) <= LINE_LENGTH:
            return found[0]
        indent, start, names = found.groups()
        return f"{indent}{start} (\n" + "".join(f"{indent}    {n},\n" for n in names.split(", ")) + f"{indent})"

    return re.sub(r"^( *)(from [\w.]+ import) ([^(#\n]+)$", wrapped, code, flags=re.MULTILINE)


def _allow_long_lines(texts: dict[str, str]) -> None:
    """A long name can push a comment or a string past the margin; the linter then allows just that."""
    longest = max(len(line) for path, text in texts.items() if path.endswith(".py") for line in text.splitlines())
    if longest > LINE_LENGTH:
        table = f"[tool.ruff.lint.pycodestyle]\nmax-line-length = {longest}\n\n[tool.ruff.lint.per-file-ignores]\n"
        texts["pyproject.toml"] = texts["pyproject.toml"].replace("[tool.ruff.lint.per-file-ignores]\n", table)


def facts(root: Path, answers: Answers) -> list[tuple[str, str, str]]:
    """The lines that say what was answered: file, pattern of what is there under the new names, what replaces it."""
    package, slug, kind, python = (
        answers[key] for key in ("package_name", "project_slug", "license", "python_version")
    )
    name, author, email, description = (
        " ".join(answers[key].split()) for key in ("project_name", "author", "email", "description")
    )
    person = {"name": author} | ({"email": email} if email else {})
    found = [
        ("README.md", rf"^# {slug}$", _plain(f"# {name}\n\n{description}")),
        ("README.md", r"^MIT, see", kind.replace("Proprietary", "All rights reserved") + ", see"),
        ("pyproject.toml", r"^description = .*$", f"description = {_quoted(description)}"),
        ("pyproject.toml", r"^authors = .*$", f"authors = [{{ {_pairs(person, ' = ', ', ')} }}]"),
        ("pyproject.toml", r"^license = .*$", f'license = "{SPDX.get(kind, kind)}"'),
        ("CITATION.cff", r"^title: .*$", f"title: {_quoted(name)}"),
        ("CITATION.cff", r"^abstract: .*$", f"abstract: {_quoted(description)}"),
        ("CITATION.cff", r"^  - name: .*$", "  - " + _pairs(person, ": ", "\n    ")),
        # the format knows no proprietary licence
        ("CITATION.cff", r"^license: .*\n", "" if kind in SPDX else f"license: {kind}\n"),
    ]
    if kind == "MIT":
        found.append(("LICENSE", r"^Copyright .*$", _plain(f"Copyright (c) {author}")))
    else:
        text = (root / "hooks" / "licenses" / f"{kind}.txt").read_text(encoding="utf-8")
        found.append(("LICENSE", r"\A[\s\S]*\Z", _plain(text.replace("AUTHOR", author))))
    if python != "3.11":
        found += [
            ("README.md", r"Python 3\.11\.4 or newer", f"Python {python} or newer"),
            ("pyproject.toml", r"^requires-python = .*$", f'requires-python = ">={python}"'),
            ("pyproject.toml", r'^python_version = "3\.11"$', f'python_version = "{python}"'),
            (".github/workflows/ci.yml", r'python-version: "3\.11"', f'python-version: "{python}"'),
            ("scripts/lock.sh", r"--python-version 3\.11", f"--python-version {python}"),
            ("scripts/lock.sh", r"for Python 3\.11 and", f"for Python {python} and"),
        ]
    if answers["data"] == "own images":  # they come first in what the README and a finished run say is next
        cifar10, images = (rf"^.*fit --config configs/{config}\.yaml.*\n" for config in ("cifar10", "image_folder"))
        found += [(path, f"({cifar10})({images})", r"\2\1") for path in ("README.md", f"{package}/cli.py")]
    return found


def _plain(text: str) -> str:
    """The text as the replacement of a pattern."""
    return text.replace("\\", r"\\")


def _quoted(text: str) -> str:
    """The text as a string of TOML and YAML (JSON's are both), in the replacement of a pattern."""
    return _plain(json.dumps(text, ensure_ascii=False))


def _pairs(values: dict[str, str], equals: str, between: str) -> str:
    return between.join(f"{key}{equals}{_quoted(value)}" for key, value in values.items())


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files; those with a shebang are executable, however the template came here (archives forget that)."""
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o755 if content.startswith(b"#!") else 0o644)


def generate(root: Path, folder: Path, answers: Answers) -> None:
    """Fill the new project's ``folder``, and make its first commit."""
    files = project(root, answers)
    write(folder, files)
    # `cruft update` and `cruft diff` make projects only to compare them file by file, in a temporary folder
    parent = folder.parent.resolve()
    temporary = parent.parent == Path(tempfile.gettempdir()).resolve() and re.fullmatch(r"tmp\w{8}", parent.name)
    if "_output_dir" not in answers and temporary:
        return
    first_commit(folder, files, answers)
    print(f"Made {folder.name}: {len(files)} files and a first commit. The first lines of its README say how to start.")


def first_commit(folder: Path, files: dict[str, bytes], answers: Answers) -> None:
    """Commit all on branch ``main``; without the hooks, signature or identity that the user's git may ask for."""
    git(folder, "init", "--quiet")
    git(folder, "symbolic-ref", "HEAD", "refs/heads/main")
    git(folder, "add", "--force", "--all")
    scripts = [path for path, content in files.items() if content.startswith(b"#!")]
    git(folder, "update-index", "--chmod=+x", *scripts)  # Windows has no such bit
    settings = ["core.hooksPath=.git/none", "commit.gpgSign=false"]
    for key, value in (("name", answers["author"].strip()), ("email", answers["email"].strip() or "nobody@localhost")):
        if not git(folder, "config", f"user.{key}", check=False).strip():
            settings.append(f"user.{key}={value}")
    git(folder, *(word for setting in settings for word in ("-c", setting)), "commit", "--quiet", "-m", "First commit")
