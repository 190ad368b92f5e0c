"""The documentation: its links lead somewhere, and what the site's hooks do to pages."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from docs_site.links import loaded_from_network, on_site
from made_parts import long_tables_to_data, markdown_table, with_tables

from tests.conftest import PROJECT_ROOT

TOP = ("README", "CHANGELOG", "CONTRIBUTING", "RELEASING", "SECURITY")
PAGES = [
    *(path for name in TOP for path in PROJECT_ROOT.glob(f"{name}.md")),
    *sorted((PROJECT_ROOT / "docs").rglob("*.md")),
    *sorted((PROJECT_ROOT / "examples").rglob("*.md")),
]
_CODE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def relative_links(text: str) -> Iterator[str]:
    for match in _LINK.finditer(_CODE.sub("", text)):
        target = match[1] or match[2]
        if not re.match(r"[a-z]+:|/", target):
            yield target


def anchors(text: str) -> set[str]:
    """The anchors of all headings, as GitHub makes them, and anchors that a page sets itself."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    numbered = {f"{slug}-{k}" for slug, times in found.items() for k in range(1, times)}
    return set(found) | numbered | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def broken_links(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in relative_links(text):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        known = anchors(file.read_text(encoding="utf-8")) if anchor and file.is_file() else {anchor}
        if not file.exists() or (anchor and anchor not in known):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT_ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `title`, with signs\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[1](other.md) [2](other.md#a-title-with-signs) [3](#here) [4](other.md#twice-1) `[5](code.md)`\n"
        '```\n[6](code.md)\n```\n[7](missing.md) [8](other.md#nowhere) [9](#there) <img src="no.svg"> [10](https://x.y)\n'
    )
    assert broken_links(page) == ["missing.md", "other.md#nowhere", "#there", "no.svg"]


@pytest.mark.parametrize(
    ("uri", "text", "there"),
    [
        ("index.md", "[a](docs/design.md#why)", "[a](design.md#why)"),
        ("index.md", "![a](docs/images/x.svg)", "![a](images/x.svg)"),
        ("index.md", '<img src="docs/images/x.svg">', '<img src="images/x.svg">'),
        ("index.md", "[a](examples/gpt/README.md), [b](LICENSE)", "[a](examples/gpt.md), b"),
        ("design.md", "[a](../examples/gpt/README.md)", "[a](examples/gpt.md)"),
        ("design.md", "[a](../CONTRIBUTING.md#style)", "[a](contributing.md#style)"),
        ("recipes/library.md", "[a](../cli.md) [b](#here) [c](https://x.y)", "[a](../cli.md) [b](#here) [c](https://x.y)"),
        ("examples/gpt.md", "[a](../../docs/multinode.md)", "[a](../multinode.md)"),
    ],
)  # fmt: skip
def test_links_are_as_they_are_on_the_site(uri: str, text: str, there: str) -> None:
    assert on_site(text, uri) == there


def test_fields_in_a_docstring_become_a_list() -> None:
    griffe = pytest.importorskip("griffe", reason="the extra 'docs' is not installed")
    from docs_site.docstrings import FieldLists

    written = "One line.\n\nname   words,\n       more\na, b   words\nThen prose.\n\n    code  here"
    obj = griffe.Function("f", docstring=griffe.Docstring(written))
    FieldLists().on_object(obj=obj)
    assert obj.docstring.value == (
        "One line.\n\n\n- `name`: words,\n  more\n- `a, b`: words\n\nThen prose.\n\n    code  here"
    )


def test_a_long_table_is_a_data_file_that_the_site_puts_back(tmp_path: Path) -> None:
    rows = [("a", "b"), *((f"`{k}&#124;`", "1,000") for k in range(7))]
    text = f"### Both\n\n{markdown_table(rows)}\n\nbehind\n"
    page = tmp_path / "page.md"
    moved = long_tables_to_data(page, "x", "y", text)
    assert moved == "### Both\n\n[Table: Both](data/x_both.csv)\n\nbehind\n"
    assert (tmp_path / "data" / "x_both.csv").read_text().splitlines()[:2] == ["a,b", '`0|`,"1,000"']
    assert with_tables(page, moved) == text
    assert with_tables(page, moved, "{title}:\n{table}").startswith("### Both\n\nBoth:\n| a | b |\n")
    assert long_tables_to_data(page, "x", "y", markdown_table(rows[:3])) == markdown_table(rows[:3])


# Folders in the sources of peers.
_OTHERS = (
    "megatron/",
    "runtime/pipe/",
    "dualpipe/",
    "primuspipe/",
    "zerobubble/",
    "tests/unit_tests/pipeline_parallel/",
)
_FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|sh|md|toml))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT_ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names what was, too
    tests = [PROJECT_ROOT / "tests" / kind for kind in ("unit_tests", "functional_tests")]
    roots = [PROJECT_ROOT, PROJECT_ROOT / "megatron_pp", page.parent, *tests]
    named = {name for name in _FILE.findall(page.read_text(encoding="utf-8")) if not name.startswith(_OTHERS)}
    assert {name for name in named if not any((root / name).exists() for root in roots)} == set()


_ROOTS = ("megatron_pp", "tests")


def test_the_lines_that_keep_a_promise_are_where_the_design_says() -> None:
    """Rows of ``promise | kept by | tested by``: the files exist, and each name behind a file is in it."""
    text = (PROJECT_ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| promise \| kept by \| tested by \|\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.strip("|").split(" | ") for table in tables for row in table.splitlines()]
    assert len(rows) > 25
    wrong = []
    for _, lines, tests in rows:
        files: list[Path] = []
        for name in re.findall(r"`([\w./]+)`", lines):
            if name.endswith(".py"):
                files = list((PROJECT_ROOT / "megatron_pp").rglob(name))
                wrong += [] if files else [name]
            elif files and not any(re.search(rf"\b{name.split('.')[-1]}\b", file.read_text()) for file in files):
                wrong.append(f"{files[0].name}: {name}")
        named = re.findall(r"`((?!scripts)[\w/]+\.py)`", tests)
        wrong += [name for name in named if not any(list((PROJECT_ROOT / root).rglob(name)) for root in _ROOTS)]
    assert wrong == []


def test_a_page_that_needs_a_network_is_found() -> None:
    html = (
        '<link rel="stylesheet" href="https://fonts.x/a.css"><link rel="canonical" href="https://x.y">'
        '<script src="//cdn.x/b.js"></script><script src="c.js"></script><img src="http://x.y/d.png"><a href="https://x.y">'
    )
    assert loaded_from_network(html) == ["https://fonts.x/a.css", "//cdn.x/b.js", "http://x.y/d.png"]


def test_every_page_is_in_the_navigation_and_guides_come_before_the_reference() -> None:
    """mkdocs warns of a page that is missing, where nothing is excused."""
    config = (PROJECT_ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "not_in_nav" not in config
    for page in ("megatron.md", "migrating/from_torch.md", "recipes/megatron.md", "troubleshooting.md"):
        assert f": {page}\n" in config
    hooks = pytest.importorskip("docs_site.hooks")
    for address, boosted in (("api/schedules.md", True), ("megatron.md", False)):
        file = SimpleNamespace(src_uri=address)
        page = SimpleNamespace(file=file, meta={})
        hooks.on_page_markdown("# A page\n", page, None, [])
        assert ("search" in page.meta) is boosted
        assert page.meta.get("search", {}).get("boost", 1.0) <= 1.0


@pytest.mark.parametrize("picture", ["docs/charts", "docs/images"])
def test_every_picture_has_a_dark_version_or_is_turned_by_the_style_sheet(picture: str) -> None:
    style = (PROJECT_ROOT / "docs/site.css").read_text(encoding="utf-8")
    for path in (PROJECT_ROOT / picture).glob("*.svg"):
        turned = f'[src*="{path.parent.name}/"]' in style or f'[src$="{path.name}"]' in style
        assert turned or "prefers-color-scheme" in path.read_text(encoding="utf-8"), path


def test_the_api_pages_name_what_there_is() -> None:
    """Modules, and what they have."""
    gone, count = [], 0
    for page in (PROJECT_ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: (megatron_pp[\w.]*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            count += 1
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                gone.append(f"{page.name}: {name}: {error}")
    assert count > 30
    assert gone == []
