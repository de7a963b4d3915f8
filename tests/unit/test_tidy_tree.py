"""Style as tests: the shape of the tree, sizes, names and what files may mention."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that git tracks, or would if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = {ROOT / name for name in listed.split("\0") if name}
    return tuple(sorted(path for path in paths if path.is_file()))


def python_files(*folders: str) -> Iterator[Path]:
    for path in tracked():
        parts = path.relative_to(ROOT).parts
        if path.suffix == ".py" and (not folders or parts[0] in folders):
            yield path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the full name of all that a file imports itself."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def pyproject() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_search_sees_the_tree() -> None:
    names = {name_of(path) for path in python_files()}
    assert "libs/runtime/kvtide/runtime/clock.py" in names
    assert "tests/unit/test_tidy_tree.py" in names


def test_a_file_fits_a_sitting() -> None:
    long = {
        name_of(path): lines
        for path in python_files()
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert long == {}


def test_a_function_fits_a_screen() -> None:
    long = [
        f"{name_of(path)}:{node.lineno} {node.name} has {lines} lines"
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, Function)
        and node.end_lineno is not None
        and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_kvtide_is_a_namespace() -> None:
    found = [
        name_of(path)
        for path in python_files()
        if path.name == "__init__.py" and path.parent.name == "kvtide"
    ]
    assert found == []


def test_every_package_has_its_line_in_the_architecture() -> None:
    packages = {
        (f"kvtide.{init.parent.name}", str(init.parents[2].relative_to(ROOT)))
        for init in python_files("libs", "services")
        if init.name == "__init__.py" and init.parents[1].name == "kvtide"
    }
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    lines = re.findall(r"^\| `(kvtide\.\w+)` \| `([\w/]+)` \| \S", text, re.MULTILINE)
    assert sorted(lines) == sorted(packages)


def test_every_package_is_built_and_linted() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    folders = {
        str(init.parents[2].relative_to(ROOT))
        for init in python_files("libs", "services")
        if init.name == "__init__.py" and init.parents[1].name == "kvtide"
    }
    missing = [
        folder
        for folder in sorted(folders)
        if f'"{folder}"' not in text or f'"{folder}/kvtide"' not in text
    ]
    assert missing == []


def test_modules_are_named_after_what_they_hold() -> None:
    vague = re.compile(r"(^|_)(utils?|managers?|helpers?|misc|common|v\d+)(_|$)")
    found = [
        name_of(path)
        for path in python_files()
        if any(vague.search(part) for part in (path.stem, path.parent.name))
    ]
    assert found == []


def test_test_files_have_names_of_their_own() -> None:
    stems = [path.stem for path in python_files("tests") if path.stem != "conftest"]
    assert (
        sorted({stem for stem in stems if stems.count(stem) > 1} - {"__init__"}) == []
    )


def test_nothing_is_pickled() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    found = [
        f"{name_of(path)}:{line} imports {name}"
        for path in python_files("libs", "services", "ops")
        for line, name in imports_of(path)
        if name.split(".")[0] in banned
    ]
    found += [
        f"{name_of(path)}:{node.lineno} torch.{node.attr} unpickles"
        for path in python_files("libs", "services", "ops")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("load", "save")
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert found == []


def test_only_settings_read_the_environment() -> None:
    found: list[str] = []
    for path in python_files("libs", "services"):
        if path.name == "settings.py":
            continue
        found += [
            f"{name_of(path)}:{node.lineno} os.{node.attr}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute)
            and node.attr in ("environ", "environb", "getenv", "putenv")
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ]
        found += [
            f"{name_of(path)}:{line} {name}"
            for line, name in imports_of(path)
            if name in ("os.environ", "os.getenv")
        ]
    assert found == []


LOCAL_PATH = re.compile(
    r"(?<![\w.~$}-])(?<!\w\")(?<!HOME=)/(work|root|opt/(wheels|pypi))(/|\b)"
)
REGISTRY_HOSTS = re.compile(
    r"\b({})\b".format(
        "|".join(
            re.escape(".".join(parts))
            for parts in (
                ("pypi", "org"),
                ("files", "pythonhosted", "org"),
                ("download", "pytorch", "org"),
                ("registry", "npmjs", "org"),
                ("deb", "debian", "org"),
                ("archive", "ubuntu", "com"),
                ("proxy", "golang", "org"),
                ("registry-1", "docker", "io"),
            )
        )
    )
)


@pytest.mark.parametrize(
    ("pattern", "hit", "miss"),
    [
        (
            LOCAL_PATH,
            "see " + "/" + "work/x",
            'a framework/x, ~/work, $HOME/work, "$x"/root',
        ),
        (LOCAL_PATH, "'" + "/" + "root'", "/roots, tree.root/x"),
        (REGISTRY_HOSTS, "https://" + "pypi" + ".org/simple", "the PyPI package"),
    ],
)
def test_the_patterns_find_what_they_should(
    pattern: re.Pattern[str], hit: str, miss: str
) -> None:
    assert pattern.search(hit)
    assert not pattern.search(miss)


def test_files_name_no_path_of_a_machine_and_no_registry_host() -> None:
    found: list[str] = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if LOCAL_PATH.search(line) or REGISTRY_HOSTS.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:100]}")
    assert found == []
