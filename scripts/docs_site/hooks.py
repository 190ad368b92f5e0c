"""Hooks of mkdocs; see mkdocs.yml."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
for folder in (str(ROOT), str(ROOT / "scripts")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from made_parts import with_tables  # noqa: E402

from docs_site import gallery, links  # noqa: E402

FOLDED = "<details markdown>\n<summary>Table: {title}</summary>\n\n{table}\n\n</details>"

_API_BOOST = 0.3  # the weight of the reference in the search, so that guides come first

logger = logging.getLogger("mkdocs.hooks.megatron_pp")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for uri, source in links.OUTSIDE_PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    for uri, picture in gallery.pictures():
        files.append(File.generated(config, uri, content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": _API_BOOST}
    source = ROOT / links.source_of(page.file.src_uri)
    text = links.on_site(with_tables(source, markdown, FOLDED), page.file.src_uri)
    return gallery.filled(text) if page.file.src_uri == gallery.PAGE else text


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    for address in links.loaded_from_network(output):
        logger.warning("%s loads %s; the site must be readable without a network", page.file.src_uri, address)
    return output
