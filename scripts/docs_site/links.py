"""Pages of the site that lie outside of docs/, and relative links between all pages."""

from __future__ import annotations

import posixpath
import re
from html.parser import HTMLParser

OUTSIDE_PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "examples/gpt.md": "examples/gpt/README.md",
}
"""Path on the site -> path in the project."""

_SITE_PATHS = {source: uri for uri, source in OUTSIDE_PAGES.items()}
_LINK = re.compile(
    r"(?<!!)\[(?P<label>[^\]\n]*)\]\((?P<target>[^)\s]+)\)|(?P<attribute>\b(?:src|srcset)=)\"(?P<file>[^\"]+)\""
)
_PICTURE = re.compile(r"(!\[[^\]\n]*\]\()([^)\s]+)\)")
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
_LOADED_LINKS = {"stylesheet", "preconnect", "icon", "preload", "prefetch", "modulepreload"}


def source_of(uri: str) -> str:
    """The path in the project of the page ``uri`` of the site."""
    return OUTSIDE_PAGES.get(uri, f"docs/{uri}")


def on_site(text: str, uri: str) -> str:
    """The Markdown of the page ``uri``, with its relative links changed to those of the site.

    A link to a file that the site does not have is replaced by its label.
    """

    def link(match: re.Match[str]) -> str:
        if match["attribute"]:
            return f'{match["attribute"]}"{_moved(match["file"], uri) or match["file"]}"'
        target = _moved(match["target"], uri)
        return match["label"] if target is None else f"[{match['label']}]({target})"

    def picture(match: re.Match[str]) -> str:
        return f"{match[1]}{_moved(match[2], uri) or match[2]})"

    return _PICTURE.sub(picture, _LINK.sub(link, text))


def _moved(target: str, uri: str) -> str | None:
    """``target``, which is relative to the page in the project, relative to the page on the site. None if the site
    lacks it."""
    path, hash_sign, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:|/", path):
        return target
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(uri)), path))
    if file in _SITE_PATHS:
        file = _SITE_PATHS[file]
    elif file.startswith("docs/"):
        file = file.removeprefix("docs/")
    else:
        return None
    return posixpath.relpath(file, posixpath.dirname(uri) or ".") + hash_sign + anchor


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        address = values.get(_LOADED.get(tag, ""), "")
        if tag == "link" and _LOADED_LINKS & set(values.get("rel", "").split()):
            address = values.get("href", "")
        if re.match(r"(?:https?:)?//", address):
            self.found.append(address)


def loaded_from_network(html: str) -> list[str]:
    """Addresses outside of the site that a browser loads with this page. Links that a reader clicks are not loaded."""
    parser = _Loads()
    parser.feed(html)
    return parser.found
