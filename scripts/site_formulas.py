r"""Formulas of the documentation site as MathML (a hook of mkdocs).

Pages contain LaTeX formulas between ``$`` or ``$$``. Browsers show MathML without a script.
"""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
"""Pattern of a formula in the output of ``pymdownx.arithmatex``."""


def mathml(latex: str, display: str) -> str:
    """Return a formula as MathML. ``display`` is ``inline`` or ``block``.

    Raises ValueError if the converter left a command or an ``&`` of LaTeX in its output.
    """
    made = convert(latex, display=display)
    try:
        words = "".join(ElementTree.fromstring(made).itertext())
    except ElementTree.ParseError as error:
        raise ValueError(f"cannot convert the formula {latex!r}: {error}") from error
    if "\\" in words:
        raise ValueError(f"cannot convert a command in the formula {latex!r}")
    return made


def on_page_content(html: str, *, page: Page, **_: object) -> str:
    def replaced(formula: re.Match[str]) -> str:
        tag, latex = formula["tag"], unescape(formula["latex"]).strip()
        try:
            made = mathml(latex, "block" if tag == "div" else "inline")
        except ValueError as error:
            raise PluginError(f"{page.file.src_uri}: {error}") from error
        return f'<{tag} class="arithmatex">{made}</{tag}>'

    return FORMULA.sub(replaced, html)
