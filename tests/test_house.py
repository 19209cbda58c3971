"""The house keeps its order: who may import whom, rooms without __init__.py, what the wheel holds, what pages name."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest
from script_files import script

from trireme.engine.run.options import Options

ROOT = Path(__file__).parents[1]
BELOW = {"models", "models/losses", "models/sizes", "storage", "kernels"}
ALL = BELOW | {
    "models/families",
    "engine",
    "engine/check",
    "engine/data",
    "engine/data/files",
    "engine/data/formats",
    "engine/hosts",
    "engine/queues",
    "engine/tuning",
    "engine/planner",
    "engine/planner/probe",
    "engine/run",
    "engine/run/begin",
    "engine/run/config",
    "engine/run/finished",
    "engine/run/hub",
    "engine/run/output",
}
MAY_IMPORT = {  # beside files of the same room
    "kernels": set(),
    "kernels/attention": {"kernels"},
    "kernels/chips": {"kernels"},
    "kernels/experts": {"kernels"},
    "kernels/fp8": {"kernels"},
    "kernels/packed": {"kernels"},
    "kernels/scan": {"kernels"},
    "kernels/teacher": {"kernels"},
    "models": {"kernels", "models/families", "models/mixers", "models/sizes", "storage"},
    "models/families": set(),
    "models/losses": {"models"},
    "models/mixers": {"kernels", "models", "models/families"},
    "models/sizes": {"models", "models/families"},
    "storage": set(),
    "engine": BELOW | {"engine/queues"},
    "engine/check": BELOW | {"engine", "engine/data", "engine/queues", "engine/planner", "engine/planner/probe"},
    "engine/data": {"engine", "engine/data/files", "engine/data/formats", "models", "storage"},
    "engine/data/files": {"models", "storage"},
    "engine/data/formats": {"engine/data/files", "models", "storage"},
    "engine/hosts": BELOW | {"engine"},
    "engine/queues": set(),
    "engine/planner": BELOW | {"engine", "engine/planner/probe", "engine/queues"},
    "engine/planner/probe": BELOW | {"engine", "engine/planner", "engine/queues"},
    "engine/run": ALL,
    "engine/run/begin": ALL,
    "engine/run/config": ALL,
    "engine/run/finished": ALL,
    "engine/run/hub": ALL,
    "engine/run/output": ALL,
    "engine/tuning": BELOW | {"engine"},
    "scripts": {"engine/run", "scripts/command"},
    "scripts/command": {"engine/run", "engine/run/finished"},
    "scripts/bench": ALL,
    "scripts/papers": ALL,
    "scripts/dev": ALL,
}
ROOMS = [room for room in MAY_IMPORT if not room.startswith("scripts")]  # of the package
MOST_FILES = 17
TORCH_FREE = [
    *[
        "engine/amounts",
        "engine/queues/names",
        "engine/plan",
        "engine/planner/rates",
        "models/config",
        "models/hf",
    ],
    *(
        f"engine/run/{name}"
        for name in [
            "config/config_file",
            "finished/python",
            "begin/snapshot",
            "command",
            "output/curve",
            "demo",
            "output/log",
            "main",
            "config/option_names",
            "options",
            "output/records",
            "screen",
            "signals",
            "output/folder",
        ]
    ),
]
DEPENDENCIES = {"torch", "triton", "safetensors", "tokenizers", "numpy", "jinja2", "yaml", "xxhash"}
PAGES = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
USERS_PAGES = [
    "docs/after-training.md",
    "README.md",
    "docs/coming-from.md",
    "docs/data.md",
    "docs/troubleshooting.md",
    "docs/how-it-works.md",
    "docs/transcripts.md",
]


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).glob("*.py"))


def module(path: Path) -> str:
    return ".".join(("trireme", *path.relative_to(ROOT).with_suffix("").parts))


MODULES = {module(path): path for room in ROOMS for path in sources(room)}
MODULES["trireme.__main__"] = ROOT / "scripts" / "command" / "__main__.py"
TORCH_FREE = [f"trireme.{name.replace('/', '.')}" for name in TORCH_FREE]
TORCH_FREE += [
    name
    for name, path in MODULES.items()
    if path.parent.name in ("storage", "data", "files", "formats", "families", "sizes")
]


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted module, whether it is imported at the top level) of every import in a file."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            beside = [f"{node.module}.{a.name}" for a in node.names]
            names = [name if name in MODULES else node.module for name in beside]
        found += [(name, node in tree.body) for name in names]
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(room):
    for path in sources(room):
        for name, _ in imports(path):
            assert name.split(".")[0] not in ROOMS, f"{path} imports {name}: write trireme.{name}"
            if name.startswith("trireme"):
                assert name in MODULES, f"{path} imports {name}, which is no file"
                there = MODULES[name].parent.relative_to(ROOT).as_posix()
                there = "kernels" if there.startswith("kernels/") else there
                assert there in MAY_IMPORT[room] | {room}, f"{path} imports {name}"


def test_files_import_each_other_in_no_circle():
    needs = {name: {other for other, _ in imports(path) if other in MODULES} for name, path in MODULES.items()}
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    assert not needs


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_what_is_imported_at_the_top_is_declared(room):
    beside = {path.stem for path in sources(room)} if room.startswith("scripts") else set()
    for path in sources(room):
        for name, top in imports(path):
            root = name.split(".")[0]
            if top and root not in {"trireme", *beside, *sys.stdlib_module_names}:
                assert root in DEPENDENCIES, f"{path} imports {root}, which pyproject.toml does not declare"


def test_tests_import_helpers_and_not_each_other():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not [name for name, _ in imports(path) if name.startswith("test_")], path


def test_no_test_waits_for_a_process_without_end():
    """A call of subprocess.run without a timeout hangs with the process that it started."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "subprocess.run":
                assert "timeout" in [word.arg for word in node.keywords], f"{path}:{node.lineno}"


def test_the_rooms_are_those_that_are_packed():
    """A folder that is not listed would be missing from the wheel; an __init__.py would shadow others' packages."""
    listed = re.search(r"packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
    assert re.findall(r'"trireme\.([\w.]+)"', listed) == [room.replace("/", ".") for room in ROOMS]
    for room in ROOMS:
        assert not (ROOT / room / "__init__.py").exists()
        inside = {p for p in (ROOT / room).iterdir() if p.is_dir() and p.name != "__pycache__"}
        assert inside == {ROOT / other for other in ROOMS if Path(other).parent.as_posix() == room}


def test_the_package_is_links_to_the_folders():
    """Editors and type checkers follow them."""
    links = {path.name: os.readlink(path) for path in (ROOT / "trireme").iterdir() if path.name != "__pycache__"}
    folders = {room: f"../{room}" for room in ROOMS if "/" not in room}
    assert links == folders | {name: f"../scripts/command/{name}" for name in ("__init__.py", "__main__.py")}


def test_a_type_checker_resolves_imports_where_nothing_is_installed(tmp_path):
    """In a plain clone: -I and --no-site-packages hide the installed package."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "trireme", clone / "trireme", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for room in ROOMS:
        (clone / room).mkdir(parents=True, exist_ok=True)
        for path in sources(room):
            (clone / room / path.name).write_bytes(path.read_bytes())
    (clone / "probe.py").write_text("from trireme.storage.layout import TensorSpec\nreveal_type(TensorSpec.nbytes)\n")
    words = ["--config-file", os.devnull, "--no-site-packages", "--cache-dir", os.devnull, "probe.py"]
    done = subprocess.run(
        [sys.executable, "-I", "-m", "mypy", *words], cwd=clone, capture_output=True, text=True, timeout=600
    )
    assert 'Revealed type is "' in done.stdout, done.stdout + done.stderr
    assert '"Any"' not in done.stdout
    assert "import" not in done.stdout, done.stdout


@pytest.mark.parametrize("room", [*MAY_IMPORT, *(f"tests/{p.name}" for p in (ROOT / "tests").iterdir() if p.is_dir())])
def test_no_room_is_crowded(room):
    assert len(sources(room)) <= MOST_FILES


def test_the_page_of_all_files_is_as_they_are():
    assert (ROOT / "docs" / "tree.md").read_text() == script("dev/tree").page(), "renew it: python scripts/dev/tree.py"


def test_torch_stays_out_of_the_modules_that_need_none():
    """They answer --help and plan on machines without it, and import in milliseconds."""
    code = "\n".join(
        f"import {name}\nassert not {{'torch', 'triton'}} & set(sys.modules), {name!r}" for name in TORCH_FREE
    )
    subprocess.run([sys.executable, "-c", "import sys\n" + code], check=True, cwd="/", timeout=600)


def test_the_build_asks_for_a_setuptools_that_reads_the_licence():
    """An SPDX expression is refused by setuptools before 77."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'license = "Apache-2.0"' in project
    assert int(re.search(r'"setuptools>=(\d+)"', project)[1]) >= 77


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy so that the tree stays clean."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    work = tmp_path_factory.mktemp("wheel")
    copy = work / "source"
    for room in (*ROOMS, "scripts/command"):
        (copy / room).mkdir(parents=True)
        for path in (ROOT / room).iterdir():
            if path.is_file():
                (copy / room / path.name).write_bytes(path.read_bytes())
    shutil.copytree(ROOT / "trireme", copy / "trireme", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    new = int(metadata.version("setuptools").split(".")[0]) >= 77 if importlib.util.find_spec("setuptools") else False
    isolation = ["--no-build-isolation"] if new else []
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", str(work), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (built,) = work.glob("*.whl")
    return built


@pytest.mark.full
def test_the_wheel_has_every_file(wheel):
    packed = {name.removeprefix("trireme/") for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    on_disk = {p for room in ROOMS for p in (ROOT / room).iterdir() if p.suffix in (".py", ".cpp", ".typed")}
    assert packed == {p.relative_to(ROOT).as_posix() for p in on_disk} | {"__init__.py", "__main__.py"}


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """What pip would unpack, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def from_wheel(site: Path, cwd: Path, code: str, *words: str) -> str:
    """What `code` prints if the wheel's modules come first."""
    nowhere = {"XDG_CACHE_HOME": os.devnull}
    environment = {**os.environ, **nowhere, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_the_wheel_works_beside_others_packages(site, tmp_path):
    """In a folder that holds a package of the name `kernels`, as Hugging Face's does."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    code = (
        "import trireme.engine.run.command as c, trireme.storage.layout, kernels; print(c.__file__, kernels.__file__)"
    )
    ours, theirs = from_wheel(site, tmp_path, code).split()
    assert Path(ours).is_relative_to(site)
    assert Path(theirs).is_relative_to(tmp_path / "kernels")


@pytest.mark.full
def test_the_wheel_has_the_command(site, tmp_path):
    code = """if True:
        from importlib.metadata import entry_points
        (command,) = entry_points(group="console_scripts", name="trireme")
        command = command.load()
        print(command.__code__.co_filename)
        raise SystemExit(command())
    """
    said = from_wheel(site, tmp_path, code, "--demo", "--dry-run")
    assert Path(said.splitlines()[0]).is_relative_to(site)
    assert "Dry run: nothing written." in said
    assert not [*tmp_path.iterdir()]


def test_the_wheel_runs_as_a_module(site, tmp_path):
    code = "import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('trireme', run_name='__main__')"
    assert re.fullmatch(r"trireme \d+\.\d+\S*\n", from_wheel(site, tmp_path, code))


def options_of_commands() -> set[str]:
    """Of all commands but training, as they are declared."""
    declared = [path.read_text() for path in sources("engine/run/finished")]
    return {name for text in declared for name in re.findall(r'add(?:_argument)?\((?:\w+, )?\s*"--([a-z-]+)"', text)}


@pytest.mark.parametrize("page", USERS_PAGES)
def test_the_pages_name_only_options_that_exist(page):
    torchruns = {"nnodes", "node-rank", "nproc-per-node", "master-addr", "master-port", "rdzv-backend"}
    known = {
        "help",
        "local-dir",
        *options_of_commands(),
        *torchruns,
        *(f.name.replace("_", "-") for f in fields(Options)),
    }
    known |= {name for f in fields(Options) for name in f.metadata.get("also", "").split()}
    for option in re.findall(r"(?<![\w-])--([a-z][\w-]*)", (ROOT / page).read_text()):
        assert option.replace("_", "-") in known, f"{page} names --{option}"


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_link_only_what_is_there(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        linked = (ROOT / page).parent.joinpath(target) if target else ROOT / page
        assert linked.exists(), f"{page} links {target}"
        assert not anchor or anchor in anchors(linked), f"{page} links {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_name_only_files_that_exist(page):
    for name in re.findall(r"(?<![\w/.-])(?:[\w.-]+/)+[\w.-]+\.(?:py|cpp|md|svg)\b", (ROOT / page).read_text()):
        places = [ROOT / name, (ROOT / page).parent / name]
        assert any(place.is_file() for place in places), f"{page} names {name}"


PRIVATE = {  # words that only this project used -> what its pages say instead
    r"twins?": "reference implementation",
    r"promis\w*|foretold|foretell\w*|foreseen": "estimate, estimated",
    r"held to": "limited to",
    r"to the bit|(the )?same bits": "bitwise identical",
    r"relay\w*": "pipeline over GPUs",
    r"strands?": "partial sum",
    r"rehears\w*": "warm-up",
    r"signs? of life": "heartbeat",
    r"in sight": "reachable",
    r"on (their|its) way": "in flight",
    r"under (the )?(next )?(forward|backward)": "overlapped with forward",
    r"told anew": "updated",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_have_no_private_words(page):
    """Code blocks and inline code are what the program prints, or names of files."""
    prose = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for words, better in PRIVATE.items():
        found = re.search(rf"\b({words})\b", " ".join(prose.split()), re.IGNORECASE)
        assert not found, f"{page} says {found[0]!r}; say {better}"


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170
