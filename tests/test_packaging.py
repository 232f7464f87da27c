"""The ways in: each kind of installation imports the same kernels, and a machine that lacks something is told in one
line."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import s2_megatron
from s2_megatron.kernels.trial import OLDEST
from s2_megatron.tools import env_report

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pretrain_gpt_s2.py", "s2_megatron")
# The module is found, not imported: the question is where it comes from, and Triton's import takes seconds.
IMPORT_KERNELS = (
    "import importlib.util; print(importlib.util.find_spec('s2_megatron.kernels.hopper.d256.forward').origin); "
    "import s2_megatron.kernels.tiles"
)
KERNEL = "hopper/d256/forward.py"  # below kernels/, and in a folder of a folder there


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what is packaged: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(*command, cwd: Path, **environment) -> subprocess.CompletedProcess:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")
    }
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def origin_of_kernels(result: subprocess.CompletedProcess) -> Path:
    assert result.returncode == 0, result.stdout + result.stderr
    return Path(result.stdout.strip().splitlines()[-1])


def needs_setuptools() -> None:
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building a wheel without a network needs pip and setuptools in this environment")


def test_a_checkout_imports_its_kernels(tmp_path):
    origin = origin_of_kernels(run(sys.executable, "-c", IMPORT_KERNELS, cwd=ROOT))
    assert origin.samefile(ROOT / "s2_megatron" / "kernels" / KERNEL)


def test_no_top_level_kernels_package():
    # It would shadow the PyPI package of that name, which transformers looks for.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert os.readlink(ROOT / "kernels") == "s2_megatron/kernels"


def modules_of(folder: Path) -> set[str]:
    """Every module of the package, kernels included, and the training script."""
    package = {path.relative_to(folder).as_posix() for path in (folder / "s2_megatron").rglob("*.py")}
    return package | {"pretrain_gpt_s2.py"}


def git(*arguments, cwd: Path) -> None:
    names = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    done = run("git", *names, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def release(source, tmp_path_factory) -> Path:
    """The folder dist/ of `make dist` in a repository of the copied files, with a file beside that is not committed."""
    needs_setuptools()
    folder = tmp_path_factory.mktemp("release") / "checkout"
    shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for name in ("Makefile", "CHANGELOG.md", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    git("init", "-q", cwd=folder)
    git("add", ".", cwd=folder)
    git("commit", "-q", "-m", "all", cwd=folder)
    (folder / "s2_megatron" / "__pycache__").mkdir(exist_ok=True)
    (folder / "s2_megatron" / "__pycache__" / "left_over.py").touch()
    command = ("make", "dist", "VENV=", f"PYTHON={sys.executable}")
    built = run(*command, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    sdist, wheel = (folder / line for line in built.stdout.splitlines()[-2:])
    assert sorted((folder / "dist").iterdir()) == sorted([sdist, wheel])

    (folder / "notes.txt").touch()
    refused = run(*command, cwd=folder)
    assert refused.returncode != 0
    assert "error: the working tree has changes that are not in the commit" in refused.stderr
    return folder / "dist"


def test_a_release_has_every_module_in_both_forms(release, source):
    """The wheel is built from the source distribution, so that also gives what it needs."""
    (sdist,) = release.glob("*.tar.gz")
    (wheel,) = release.glob("*.whl")
    assert sdist.name == f"s2_megatron-{s2_megatron.__version__}.tar.gz"
    expected = modules_of(source)
    assert len(expected) > 100
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in names if name.endswith(".py")} == expected | {"setup.py"}
    assert {"README.md", "LICENSE", "pyproject.toml"} <= names
    tables = {str(path.relative_to(ROOT)) for path in (ROOT / "s2_megatron").rglob("*.json")}
    assert "s2_megatron/tools/forecast/h200.json" in tables and tables <= names
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected | tables


def test_a_wheel_imports_its_kernels_and_has_the_command(release, tmp_path):
    (wheel,) = release.glob("*.whl")
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    installed = run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    origin = origin_of_kernels(run(sys.executable, "-c", IMPORT_KERNELS, cwd=tmp_path, PYTHONPATH=str(site)))
    assert origin == site / "s2_megatron" / "kernels" / KERNEL
    command = run(site / "bin" / "s2-megatron", "schema", "--write", cwd=tmp_path, PYTHONPATH=str(site))
    assert command.returncode == 2
    assert command.stderr.startswith(f"error: --write: {site / 'configs'} does not exist")


# Imported name -> the distribution that brings it, where they differ.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "megatron": "megatron-core",
    "transformer_engine": "transformer-engine",
    "triton": "torch",
    "pydantic_core": "pydantic",
    "huggingface_hub": "transformers",
    "backports": "backports.zstd",
}
NEW_IN_PYTHON = {"compression"}  # 3.14


def third_party_imports(paths) -> dict[str, Path]:
    """{imported package: a file that imports it}, wherever in the file the import stands."""
    own = {"s2_megatron", "pretrain_gpt_s2", "examples", "studies", "tests", *sys.stdlib_module_names, *NEW_IN_PYTHON}
    found = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            found |= {name.partition(".")[0]: path for name in names}
    return {name: path for name, path in found.items() if name not in own}


def test_every_imported_package_is_declared(release):
    """Of the package, the training script, the examples and the studies, optional imports too."""
    (wheel,) = release.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    required = re.findall(r"^Requires-Dist: ([A-Za-z0-9._-]+)", archive.read(metadata).decode(), re.MULTILINE)
    declared = {name.lower() for name in required}
    folders = ("s2_megatron", "examples", "studies")
    paths = [ROOT / "pretrain_gpt_s2.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    imported = third_party_imports(paths)
    assert {"torch", "megatron", "rich", "tokenizers"} <= set(imported)
    missing = {
        name: str(path) for name, path in imported.items() if DISTRIBUTIONS.get(name, name).lower() not in declared
    }
    assert not missing
    assert "wandb" in declared, "Megatron imports it for --wandb-project"


def test_an_editable_installation_imports_the_checkouts_kernels(source, tmp_path):
    needs_setuptools()
    environment = tmp_path / "environment"
    made = run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    python = environment / "bin" / "python"
    # Only setuptools of this environment: its other packages may include an editable installation of this project.
    tools = tmp_path / "tools"
    tools.mkdir()
    for pattern in ("setuptools*", "_distutils_hack"):
        for path in Path(sysconfig.get_paths()["purelib"]).glob(pattern):
            (tools / path.name).symlink_to(path)
    install = ("install", "--no-build-isolation", "--no-deps", "--no-index", "-e", ".")
    pip = run(
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        *install,
        cwd=source,
        PYTHONPATH=str(tools),
    )
    assert pip.returncode == 0, pip.stdout + pip.stderr
    origin = origin_of_kernels(run(python, "-c", IMPORT_KERNELS, cwd=tmp_path))
    assert origin.samefile(source / "s2_megatron" / "kernels" / KERNEL)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare_path(tmp_path) -> Path:
    """A folder for PATH with the shell's tools and nothing else: no Python, no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "head", "sort", "ls", "dirname", "touch", "mkdir", "cp", "make", "nproc", "sed"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def find_python(argument: str, bare_path: Path, pyenv: Path) -> subprocess.CompletedProcess:
    return run(ROOT / "scripts" / "find-python.sh", argument, cwd=ROOT, PATH=str(bare_path), PYENV_ROOT=str(pyenv))


def test_without_a_new_enough_python_one_line_says_so(bare_path, tmp_path):
    executable(bare_path / "python3", "#!/bin/sh\nexit 1\n")  # what an older Python does with the question for 3.12
    result = find_python("", bare_path, tmp_path / "pyenv")
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1
    assert "no Python >= 3.12" in result.stderr


def test_a_shim_that_fails_is_passed_over_for_pyenvs_version(bare_path, tmp_path):
    executable(bare_path / "python3.12", "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    version = tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3"
    version.parent.mkdir(parents=True)
    version.symlink_to(sys.executable)
    result = find_python("", bare_path, tmp_path / "pyenv")
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).samefile(sys.executable)


def test_an_explicit_python_is_not_replaced(bare_path, tmp_path):
    old = executable(tmp_path / "old", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 || exit 1\n')
    (bare_path / "python3.12").symlink_to(sys.executable)
    result = find_python(str(old), bare_path, tmp_path / "pyenv")
    assert result.returncode != 0
    assert f"PYTHON={old}" in result.stderr
    assert "3.9.2" in result.stderr


FAKE_PYTHON = """#!/bin/sh
# Answers what the scripts ask a Python, and counts the installations.
case "$*" in
    *sys.executable*) echo "{self}" ;;
    *"%d.%d"*) echo 3.12 ;;
    *ensurepip*) exit {no_venv} ;;
    *Python.h*) exit {no_headers} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "{self}" "$3/bin/python" ;;
    *"pip install"*) echo installed >> "{log}" ;;
esac
"""


def fake_python(folder: Path, no_venv: int = 0, no_headers: int = 0) -> Path:
    path = folder / "fake-python"
    return executable(path, FAKE_PYTHON.format(self=path, log=folder / "log", no_venv=no_venv, no_headers=no_headers))


def make_venv(bare_path: Path, tmp_path: Path, python: Path) -> subprocess.CompletedProcess:
    return run(ROOT / "scripts" / "make-venv.sh", tmp_path / "venv", python, cwd=ROOT, PATH=str(bare_path))


def test_a_missing_venv_module_gives_the_apt_command(bare_path, tmp_path):
    result = make_venv(bare_path, tmp_path, fake_python(tmp_path, no_venv=1))
    assert result.returncode != 0
    assert result.stderr.strip().splitlines() == [
        f"{tmp_path / 'fake-python'} cannot make virtual environments: apt install python3.12-venv"
    ]


def test_a_missing_compiler_and_headers_give_the_apt_command(bare_path, tmp_path):
    executable(bare_path / "nvidia-smi", "#!/bin/sh\n")  # a GPU machine, where Triton compiles
    result = make_venv(bare_path, tmp_path, fake_python(tmp_path, no_headers=1))
    assert result.returncode != 0
    (line,) = result.stderr.strip().splitlines()
    assert line.endswith("apt install build-essential python3.12-dev")
    assert not (tmp_path / "log").exists()


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this is a GPU machine, where both are needed")
def test_without_a_gpu_a_missing_compiler_is_only_remarked_upon(bare_path, tmp_path):
    result = make_venv(bare_path, tmp_path, fake_python(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "apt install build-essential" in result.stderr
    assert (tmp_path / "log").read_text() == "installed\n"


def test_make_installs_once(bare_path, tmp_path):
    python = fake_python(tmp_path)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for name in ("Makefile", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = ("make", "install", f"PYTHON={python}")
    for _ in range(2):
        result = run(*command, cwd=tmp_path, PATH=str(bare_path))
        assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "log").read_text() == "installed\n"
    later = (tmp_path / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(tmp_path / "setup.py", (later, later))
    assert run(*command, cwd=tmp_path, PATH=str(bare_path)).returncode == 0
    assert (tmp_path / "log").read_text() == "installed\n" * 2


def test_make_without_an_environment_makes_none(bare_path, tmp_path):
    result = run(
        "make", "-n", "pretrain", "VENV=", f"PYTHON={fake_python(tmp_path)}", "ITERATIONS=7", "CONFIG=a.yaml", cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert "make-venv" not in result.stdout
    assert f"{tmp_path / 'fake-python'} -m examples.quickstart.run" in result.stdout
    assert '--config "a.yaml"' in result.stdout
    assert '--iterations "7"' in result.stdout


def test_make_names_the_packages_that_the_present_environment_lacks(tmp_path):
    made = run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    result = run("make", "pretrain", "VENV=", f"PYTHON={tmp_path / 'empty' / 'bin' / 'python'}", cwd=ROOT)
    assert result.returncode != 0
    line = result.stderr.splitlines()[0]
    assert "lacks packages" in line
    for package in ("torch", "megatron-core", "rich", "tokenizers"):
        assert package in line


def test_the_environment_report_names_what_is_there():
    result = run(sys.executable, "-m", "s2_megatron", "env-report", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines())
    for name in ("torch", "megatron-core"):
        assert lines[name].strip() == importlib.metadata.version(name)
    assert lines["python"].startswith(sys.version.split()[0])


def test_the_environment_report_survives_what_is_missing(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ImportError
    monkeypatch.setenv("PATH", "")
    lines = env_report.report()
    assert lines["torch"] == lines["transformer-engine"] == "not installed"
    assert lines["megatron-core"].endswith("pip's: not installed)")  # as of a checkout
    assert "ImportError" in lines["torch's build"] or "ModuleNotFoundError" in lines["torch's build"]
    assert lines["nvcc"] == lines["driver"] == "not found"


def test_pypis_apex_is_not_taken_for_nvidias(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert "another project" in env_report.apex_text()
    sys.modules.pop("apex", None)


def test_the_environment_has_the_oldest_triton_beside_its_own():
    script = ROOT / "scripts" / "make-venv.sh"
    (line,) = (line for line in script.read_text().splitlines() if line.startswith("oldest="))
    found = subprocess.run(
        ["bash", "-c", f'{line}; echo "$oldest"', script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == ".".join(map(str, OLDEST))
