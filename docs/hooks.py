"""What MkDocs does besides rendering pages: tables from the code, files from outside docs/, formulas as MathML."""

import html
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import tables
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("notebooks/*.ipynb", "benchmarks/results/*.png", "benchmarks/results/*.json", "benchmarks/results/*.md")
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s]+)\)")
MATH = re.compile(r"<(span|div) class=\"arithmatex\">\\[(\[](.*?)\\[)\]]</\1>", re.DOTALL)
logging.getLogger("traitlets").setLevel(logging.ERROR)


@event_priority(100)  # before the plugin that looks for notebooks
def on_files(files: Files, config: Any) -> Files:
    """Add what the pages show and link from other folders of the repository."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in tables and resolve links that lead out of docs/."""
    try:
        markdown = tables.fill(markdown)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
    return LINK.sub(lambda match: link(match, page.file, config, files), markdown)


def link(match: re.Match[str], here: File, config: Any, files: Files) -> str:
    """Return a link as the site has it: to a page, to a file of the repository, or as text where that has no address.

    Pages are written so that links hold in a checkout: from docs/guides/, `../../notebooks/` is the notebooks' folder.
    """
    mark, text, target = match.groups()
    path, hash_, anchor = target.partition("#")
    inside = here.abs_src_path and Path(here.abs_src_path).is_relative_to(ROOT / "docs")
    at = posixpath.normpath(posixpath.join("docs" if inside else "", posixpath.dirname(here.src_uri), path))
    if at.startswith("docs/"):
        at = at.removeprefix("docs/")
        return match[0] if inside else f"{mark}[{text}]({relative(at, here)}{hash_}{anchor})"
    if files.get_file_from_path(at):
        return f"{mark}[{text}]({relative(at, here)}{hash_}{anchor})"
    if not (ROOT / at).exists():
        return match[0]  # which --strict reports
    return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{at})" if config.repo_url else text


def relative(path: str, here: File) -> str:
    """Return a path as seen from a page."""
    return posixpath.relpath(path, posixpath.dirname(here.src_uri) or ".")


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers draw without a script."""
    return MATH.sub(lambda match: formula(match[2], "block" if match[1] == "div" else "inline"), content)


def formula(latex: str, display: str) -> str:
    """Return a formula as MathML. The converter leaves a command that it does not know as it stands."""
    drawn = convert(html.unescape(latex), display=display)
    if "\\" in drawn:
        raise PluginError(f"a formula with an unknown command: {latex}")
    return drawn
