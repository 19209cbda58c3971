"""python scripts/dev/release.py FOLDER: builds the sdist and the wheel of this commit, and tries both.

Each is installed into an environment of its own beside the packages of this one, and trains the demo there. Nothing is
uploaded.
"""

import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = (
    "import sys; from setuptools import build_meta as b; print(b.build_sdist(sys.argv[1]), b.build_wheel(sys.argv[1]))"
)


def build(folder: Path) -> list[Path]:
    """The sdist and the wheel of what is committed."""
    with tempfile.TemporaryDirectory() as copy:
        subprocess.run(f"git archive HEAD | tar x -C {copy}", shell=True, check=True, cwd=ROOT)
        subprocess.run([sys.executable, "-c", BUILD, str(folder.resolve())], check=True, cwd=copy)
    return sorted(path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))


def run_demo(package: Path) -> None:
    """Installs a package into an empty folder and trains the demo with it."""
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, system_site_packages=True, with_pip=True)
        paths = [path for path in sys.path if path.endswith("site-packages")]
        (next(Path(place).glob("lib/*/site-packages")) / "outer.pth").write_text("\n".join(paths))
        pip = [f"{place}/bin/python", "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, str(package.resolve())], check=True, cwd=place)
        subprocess.run([f"{place}/bin/trireme", "--demo"], check=True, cwd=place)


def main(folder: str) -> int:
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if any(place.iterdir()):
        print(f"error: {folder} is not empty. Name a new folder.", file=sys.stderr)
        return 2
    packages = build(place)
    for package in packages:
        run_demo(package)
    for package in packages:
        print(hashlib.sha256(package.read_bytes()).hexdigest(), package)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 2 else print(__doc__, file=sys.stderr) or 2)
