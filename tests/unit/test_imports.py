"""Catches a dependency in the wrong direction: a package that reaches up, an import cycle, a heavy import where a process
cannot afford it, and a folder that would shadow somebody else's distribution.

All import statements count, those inside functions and under ``TYPE_CHECKING`` too: they are dependencies just the same.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {
    "specdraft_kernels": REPOSITORY / "kernels" / "specdraft_kernels",
    "trainer_bridge": REPOSITORY / "trainer_bridge",
    "vllm_specdraft": REPOSITORY / "vllm_specdraft",
}
FORBIDDEN = {
    "specdraft_kernels": {"trainer_bridge", "vllm_specdraft", "vllm", "transformers"},
    "trainer_bridge": {"vllm_specdraft", "vllm", "transformers"},
    "vllm_specdraft": set(),
}
"""Per package the top-level packages it never imports."""
MAY_IMPORT_VLLM = {
    "plugin.py",
    "compat.py",
    "patches.py",
    "worker.py",
    "swap.py",
    "endpoints.py",
    "serve_entry.py",
    "ranks.py",
    "shards.py",
    "shadow.py",
    "policy_swap.py",
    "weight_transfer.py",
    "governor/gaps.py",
    "governor/ngram.py",
    "governor/scheduler.py",
}
"""Files of vllm_specdraft that touch vLLM; everything else can be tested, and read, without an engine."""
WITHOUT_TORCH = {
    "idle.py",
    "config.py",
    "errors.py",
    "security.py",
    "engine_options.py",
    "failures.py",
    "preflight.py",
    "status_view.py",
    "target.py",
    "serve_entry.py",
    "versions.py",
    "answers.py",
    "admission.py",
    "link.py",
    "heap.py",
    "sync_link.py",
    "sync_process.py",
    "wire.py",
    "session.py",
    "plan.py",
    "digest.py",
    "delta.py",
    "staging.py",
    "inbox.py",
    "receiver.py",
    "receiving.py",
    "base.py",
    "tcp_receiver.py",
    "members.py",
    "costs.py",
    "draft_yield.py",
}
"""Modules that a command line, a state machine or a test imports alone."""


def modules_of(package: str, folder: Path) -> dict[str, Path]:
    """Dotted module names of all files of a package."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, wherever the statement stands.

    ``from a.b import c`` gives ``a.b.c``: whether ``c`` is a module is for the caller to find out.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def edges_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Which module of a package imports which other module of the same package."""
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        edges[module] = set()
        for _, name in imports_of(module, path):
            known = name if name in modules else name.rpartition(".")[0]
            if known in modules and known != module:
                edges[module].add(known)
    return edges


def cycle_in(edges: dict[str, set[str]]) -> list[str] | None:
    """The modules along one import cycle, or None."""
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return None
        for other in sorted(edges[module]):
            if found := visit(other, [*path, module]):
                return found
        finished.add(module)
        return None

    for module in sorted(edges):
        if found := visit(module, []):
            return found
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    modules = modules_of(package, PACKAGES[package])
    assert modules, f"no files of {package} found: the check would pass on nothing"
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for module, path in modules.items()
        for line, name in imports_of(module, path)
        if name.split(".")[0] in FORBIDDEN[package]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_cycles_between_the_modules_of_a_package(package: str) -> None:
    cycle = cycle_in(edges_of(modules_of(package, PACKAGES[package])))
    assert cycle is None, " -> ".join(cycle or ())


def test_vllm_is_imported_only_in_the_listed_files() -> None:
    folder = PACKAGES["vllm_specdraft"]
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for module, path in modules_of("vllm_specdraft", folder).items()
        for line, name in imports_of(module, path)
        if name.split(".")[0] == "vllm" and str(path.relative_to(folder)) not in MAY_IMPORT_VLLM
    ]
    assert not wrong, "\n".join(wrong)


def test_the_kernels_folder_is_no_package() -> None:
    """A package named ``kernels`` at the root would shadow the distribution of that name, and break whoever imports it."""
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()


def light_modules() -> list[str]:
    """Modules that exist at present and must import without torch."""
    every = {name: path for package, folder in PACKAGES.items() for name, path in modules_of(package, folder).items()}
    return [name for name, path in every.items() if path.name in WITHOUT_TORCH]


@pytest.mark.parametrize("module", light_modules())
def test_light_modules_import_without_torch_or_an_engine(module: str) -> None:
    code = f"import sys, {module}\nprint(*(name for name in ('torch', 'transformers', 'vllm') if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"{module} pulls in {done.stdout.strip()}"


def write_package(root: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return modules_of("pkg", root)


def test_the_checks_see_every_form_of_import(tmp_path: Path) -> None:
    """The checks above are no better than their eyes: each way to write an import is seen."""
    modules = write_package(
        tmp_path,
        {
            "__init__.py": "",
            "sub/__init__.py": "from .low import thing\n",
            "sub/low.py": "import vllm.worker as w\n",
            "top.py": (
                "import importlib\n"
                "def late():\n"
                "    from pkg.sub import low\n"
                "    from . import other\n"
                "    importlib.import_module('vllm.engine')\n"
            ),
            "other.py": "from .sub.low import thing\n",
        },
    )
    assert {name for _, name in imports_of("pkg.sub.low", modules["pkg.sub.low"])} == {"vllm.worker"}
    assert "vllm.engine" in {name for _, name in imports_of("pkg.top", modules["pkg.top"])}
    edges = edges_of(modules)
    assert edges["pkg.top"] == {"pkg.sub.low", "pkg.other"}
    assert edges["pkg.sub"] == {"pkg.sub.low"}
    assert edges["pkg.other"] == {"pkg.sub.low"}
    assert cycle_in(edges) is None


def test_a_cycle_through_a_function_level_import_is_found(tmp_path: Path) -> None:
    files = {"a.py": "from pkg import b\n", "b.py": "import pkg.c\n", "c.py": "def f():\n    from .a import x\n"}
    assert cycle_in(edges_of(write_package(tmp_path, files))) == ["pkg.a", "pkg.b", "pkg.c", "pkg.a"]
