"""The house keeps its order: who may import whom, flat folders without __init__.py, README's tree as it is on disk."""

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest

from trireme.engine.options import Options

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "models", "storage", "engine")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "storage": {"storage"},
    "models": {"models", "kernels", "storage"},
    "engine": {"engine", "models", "storage", "kernels"},
    "scripts": {"engine", "models", "storage", "kernels"},
}
ENGINE_FREE = (
    "cache chat codec command conversations curve data demo documents encode examples formats log options pack plan "
    "prepare rates records report rows rule sandbox schedule screen settled sources template tokens verify"
).split()
TORCH_FREE = [
    *(f"trireme.storage.{p.stem}" for p in sorted((ROOT / "storage").glob("*.py"))),
    *(f"trireme.models.{name}" for name in ("config", "shapes", "hf")),
    *(f"trireme.engine.{name}" for name in ENGINE_FREE),
]
DEPENDENCIES = {"torch", "triton", "safetensors", "tokenizers", "numpy", "jinja2", "yaml", "xxhash"}
PAGES = ["README.md", "docs/coming-from.md", "docs/troubleshooting.md", "docs/how-it-works.md", "docs/transcripts.md"]
PICTURE = re.compile(r"^(\w+)/ +\S|^ {2}([\w.-]+\.\w+) +\S")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted module, whether it is imported at the top level) of every import in a file."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [f"{node.module}.{a.name}" if node.module.count(".") == 1 else node.module for a in node.names]
            names = names if node.module.startswith("trireme") else [node.module]
        found += [(name, node in tree.body) for name in names]
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(folder):
    for path in sources(folder):
        for name, _ in imports(path):
            parts = name.split(".")
            assert parts[0] not in FOLDERS, f"{path} imports {name}: write trireme.{name}"
            if parts[0] == "trireme":
                assert len(parts) > 2, f"{path} imports {name}, which is no file"
                assert parts[1] in MAY_IMPORT[folder], f"{path} imports {name}"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_what_is_imported_at_the_top_is_declared(folder):
    beside = {path.stem for path in sources("scripts")} if folder == "scripts" else set()
    for path in sources(folder):
        for name, top in imports(path):
            root = name.split(".")[0]
            if top and root not in {"trireme", *beside, *sys.stdlib_module_names}:
                assert root in DEPENDENCIES, f"{path} imports {root}, which pyproject.toml does not declare"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_flat(folder):
    """A sub-folder would be missing from the wheel; an __init__.py would shadow others' packages of the same name."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert [p.name for p in (ROOT / folder).iterdir() if p.is_dir() and p.name != "__pycache__"] == []


def test_readme_shows_the_tree():
    readme = (ROOT / "README.md").read_text()
    picture = readme.split("<!-- tree -->")[1]
    shown, folder = set(), ""
    for line in picture.splitlines():
        if match := PICTURE.match(line):
            folder = match[1] or folder
            if match[2]:
                shown.add(f"{folder}/{match[2]}")
    on_disk = {
        f"{name}/{p.name}" for name in (*FOLDERS, "scripts", "docs") for p in (ROOT / name).iterdir() if p.is_file()
    }
    assert shown == on_disk


def test_torch_stays_out_of_the_modules_that_need_none():
    """They answer --help and plan on machines without it, and import in milliseconds."""
    code = "\n".join(
        f"import {name}\nassert not {{'torch', 'triton'}} & set(sys.modules), {name!r}" for name in TORCH_FREE
    )
    subprocess.run([sys.executable, "-c", "import sys\n" + code], check=True, cwd="/")


def test_the_build_asks_for_a_setuptools_that_reads_the_licence():
    """An SPDX expression is refused by setuptools before 77."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'license = "Apache-2.0"' in project and int(re.search(r'"setuptools>=(\d+)"', project)[1]) >= 77


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy so that the tree stays clean."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    work = tmp_path_factory.mktemp("wheel")
    copy = work / "source"
    for folder in FOLDERS:
        (copy / folder).mkdir(parents=True)
        for path in (ROOT / folder).iterdir():
            if path.is_file():
                (copy / folder / path.name).write_bytes(path.read_bytes())
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    have = importlib.util.find_spec("setuptools") and importlib.util.find_spec("wheel")
    isolation = ["--no-build-isolation"] if have else []
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", str(work), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = work.glob("*.whl")
    return built


def test_the_wheel_has_every_file(wheel):
    packed = {name.removeprefix("trireme/") for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    assert packed == {f"{f}/{p.name}" for f in FOLDERS for p in (ROOT / f).iterdir() if p.suffix in (".py", ".cpp")}


def test_the_wheel_works_from_another_folder(wheel, tmp_path):
    """Also from a folder that holds a package of the name `kernels`, as Hugging Face's does."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    code = "import trireme.engine.command as c, trireme.storage.layout, kernels; print(c.__file__, kernels.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = done.stdout.split()
    assert Path(ours).is_relative_to(site) and Path(theirs).is_relative_to(tmp_path / "kernels")


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_name_only_options_that_exist(page):
    known = {"help"} | {f.name.replace("_", "-") for f in fields(Options)}
    known |= {name for f in fields(Options) for name in f.metadata.get("also", "").split()}
    for option in re.findall(r"(?<![\w-])--([a-z][\w-]*)", (ROOT / page).read_text()):
        assert option.replace("_", "-") in known, f"{page} names --{option}"


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_link_only_what_is_there(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links {target}"
