"""What is built from the project: its parts, its versions, and that it works from where it is
installed."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import contaccum
from contaccum.cli.parser import TAGLINE

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'version = "{contaccum.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert cited["version"] == contaccum.__version__
    assert "2406.12356" in cited["preferred-citation"]["url"]
    dated = re.findall(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dated[0] == (contaccum.__version__, str(cited["date-released"]))
    released = (ROOT / "docs" / "releasing.md").read_text()
    assert set(re.findall(r"contaccum-([\d.]+)-py3|`v([\d.]+)`", released)) == {
        (contaccum.__version__, ""), ("", contaccum.__version__),
    }  # fmt: skip


def test_one_tagline_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["abstract"] == TAGLINE
    assert f'description = "{TAGLINE}"' in (ROOT / "pyproject.toml").read_text()
    assert f"**{TAGLINE}**" in (ROOT / "README.md").read_text()
    assert f"site_description: {TAGLINE}" in (ROOT / "mkdocs.yml").read_text()


def test_workflows_run_the_checks_of_ci_on_every_supported_python():
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())["jobs"]
    run = [step["run"] for job in checks.values() for step in job["steps"] if "run" in step]
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"ruff check .", "ruff format --check .", "mypy", "codespell"} <= set(run) & set(ci)
    pythons = checks["tests"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={pythons[0]}"' in (ROOT / "pyproject.toml").read_text()
    docs = (ROOT / ".github" / "workflows" / "docs.yml").read_text()
    assert [line for line in ci if line.startswith("mkdocs") and f"run: {line}\n" in docs]
    for path in (ROOT / ".github" / "workflows").iterdir():
        text = path.read_text()
        for extras in re.findall(r"'\.\[(.+?)\]'", text):
            assert all(
                f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
                for extra in extras.split(",")
            )
        torch = re.findall(r"torch==([\d.]+)", text)
        assert all(
            f"torch=={version}\n" in (ROOT / "requirements.lock").read_text() for version in torch
        )


def test_hooks_and_ci_run_the_same_tools():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {
        " ".join(hook["entry"].replace("--force-exclude", "").split()) for hook in local["hooks"]
    }
    assert tools == {"ruff check", "ruff format", "mypy", "codespell"}
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert all(any(line.startswith(tool) for line in ci) for tool in tools)


@pytest.mark.acceptance
def test_wheel_and_sdist_hold_what_they_should_and_work(tmp_path):
    call = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(call, check=True, capture_output=True)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    files = set(zipfile.ZipFile(wheel).namelist())
    (metadata,) = [name for name in files if name.endswith(".dist-info/METADATA")]
    page = zipfile.ZipFile(wheel).read(metadata).decode()
    links = re.findall(r"(!?)\[[^]]*\]\(([^)#]+)", page)
    assert all(link.startswith("https://") for _, link in links)
    (home,) = re.findall("^Project-URL: Homepage, (.+)$", page, re.MULTILINE)
    named = [
        link.removeprefix(f"{home}/{'raw' if picture else 'blob'}/main/")
        for picture, link in links
        if link.startswith(home)
    ]
    assert {"docs/index.md", "docs/pictures/negatives.svg"} <= set(named)
    assert not [name for name in named if not (ROOT / name).is_file()]
    ours = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "contaccum").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in files if ".dist-info/" not in name} == ours
    assert any(name.endswith("licenses/LICENSE") for name in files)
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "CITATION.cff",
        "configs/finetune.yaml",
        "contaccum/py.typed",
    } <= held
    assert not [name for name in held if name.startswith(("tests", "data", "docs", "benchmarks"))]

    place = tmp_path / "installed"
    install = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place),
        str(wheel),
    ]  # fmt: skip
    subprocess.run(install, check=True, capture_output=True)
    script = (
        "import contaccum, sys; print(contaccum.__file__); from contaccum.cli import main; "
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "data", "demo", "demo"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    settings = subprocess.run(
        [sys.executable, "-c", script, "train", "--config", "finetune", "--print_config"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "method: grad_cache" in settings.stdout
    first, second = done.stdout.splitlines()[:2]
    assert first == str(place / "contaccum" / "__init__.py")
    assert second.startswith("demo: ")
    assert (tmp_path / "demo" / "corpus.jsonl").stat().st_size > 0
